"""``linkcpp worker``: an expert worker by hand, until Ctrl-C."""

import asyncio
import secrets
from pathlib import Path
from typing import Annotated

import typer

from linkcpp.cli.output import byte_bar, console
from linkcpp.cli.verb import verb
from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import write_atomically
from linkcpp.common.paths import state_folder
from linkcpp.common.units import format_bytes
from linkcpp.engine.check import choose_engine
from linkcpp.model.slices.segments import Segment, describe, parse_segment
from linkcpp.model.slices.writing import choose_segments, open_whole_model
from linkcpp.registry.model_lookup import require_here
from linkcpp.worker.process import WorkerConfig, open_slabs, run_worker
from linkcpp.worker.slabs import experts_by_layer

app = verb()
_MAX_TOKEN_BYTES = 256


@app.callback(invoke_without_command=True)
def worker(
    *,
    slice_file: Annotated[
        list[Path] | None,
        typer.Option("--slice", help="A slice to serve; may be given several times."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A whole model instead: a GGUF file or an http(s) URL.")
    ] = None,
    segment: Annotated[
        list[str] | None,
        typer.Option(help="LAYERS:EXPERTS of the model, like 4:16-63; all if left out."),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of loopback; 0 takes a free one.")
    ] = 0,
    device: Annotated[str, typer.Option(help="Device to compute on.")] = "CPU",
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, help="Threads to compute with; the engine's choice if not given."
        ),
    ] = None,
    engine: Annotated[
        Path | None, typer.Option(help="Folder of the llama.cpp programs to use.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the token that peers must show; made if it is not there."),
    ] = None,
) -> None:
    """Serve experts: load them into an rpc-server and answer compute frames.

    It listens on this machine's loopback only; `linkcpp node` runs workers for other machines.
    """
    names = [str(path) for path in slice_file or ()]
    if bool(names) == (model is not None):
        raise LinkcppError(
            "Name what to serve: either slices or a model.",
            hint="linkcpp worker --slice FILE, or linkcpp worker --model FILE --segment 0-3:0-31",
        )
    if names and segment:
        raise LinkcppError(
            "A slice is served whole.", hint="Leave out --segment, or give the --model."
        )
    path = token_file or state_folder() / "workers" / "token"
    config = WorkerConfig(
        name="by hand",
        engine=choose_engine(engine).location,
        slabs=names[0] if names else str(model),
        more_slabs=tuple(names[1:]),
        segments=_segments(model, segment) if model is not None and segment else None,
        token=_token(path),
        log_path=state_folder() / "workers" / "by-hand-rpc.log",
        port=port,
        device=device,
        threads=threads,
    )
    asyncio.run(_run(config, path))


async def _run(config: WorkerConfig, token_path: Path) -> None:
    slabs = open_slabs(config)
    try:
        experts = experts_by_layer(slabs.segments)
        total = sum(tensor.slab_bytes * len(experts[tensor.layer]) for tensor in slabs.tensors)
    finally:
        slabs.close()
    out = console()
    with byte_bar(slabs.model_name, total) as on_progress:

        def announce(line: str) -> None:
            out.print(line, soft_wrap=True)
            held = describe(slabs.segments)
            out.print(f"  {format_bytes(total)} of experts of {slabs.model_name}")
            for text in held:
                out.print(f"  layers {text.replace(':', ', experts ')}")
            out.print(f"  the token is in {token_path}", soft_wrap=True)
            out.print("  Ctrl-C stops it.")

        await run_worker(config, announce, on_progress)


def _segments(model: str, texts: list[str]) -> tuple[Segment, ...]:
    require_here(model, "worker")
    with open_whole_model(model) as files:
        return choose_segments(files, [parse_segment(text) for text in texts])


def _token(path: Path) -> str:
    try:
        with path.open("rb") as file:
            token = file.read(_MAX_TOKEN_BYTES + 1).decode("ascii", errors="replace").strip()
    except FileNotFoundError:
        token = secrets.token_urlsafe(32)
        write_atomically(path, token + "\n", mode=0o600)
    except OSError as error:
        raise LinkcppError(f"The token file {path} cannot be read: {error.strerror}.") from error
    if not token or not token.isascii() or not token.isprintable():
        raise LinkcppError(
            f"{path} holds no token.", hint="Delete it: a new one is made, or write one line in it."
        )
    return token
