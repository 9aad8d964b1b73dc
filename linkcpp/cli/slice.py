"""``linkcpp slice``: chosen experts of a model as a file of their own, or all but the experts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from linkcpp.cli.output import byte_bar, console, print_json, status_console, working
from linkcpp.cli.verb import verb
from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import users_mode
from linkcpp.common.units import format_bytes
from linkcpp.model.parts import ModelFiles
from linkcpp.model.slices.hashing import Progress as OnProgress
from linkcpp.model.slices.layout import plan_slice
from linkcpp.model.slices.segments import (
    SegmentRequest,
    describe,
    parse_ranges,
    parse_segment,
)
from linkcpp.model.slices.verifying import listed_bytes, verify_file
from linkcpp.model.slices.writing import (
    WrittenFile,
    backbone_jobs,
    backbone_paths,
    choose_segments,
    open_whole_model,
    write_backbone,
    write_slice,
)
from linkcpp.registry.model_lookup import require_here

app = verb()
_MAX_NAMED = 5


@app.command(name="slice")
def slice_model(
    model: Annotated[
        str,
        typer.Argument(
            help="A GGUF file, a part of a split one, or an http(s) URL. With --verify: a slice."
        ),
    ],
    *,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The file to write.", dir_okay=False)
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers like 0-3,7; all layers with experts if left out.")
    ] = None,
    experts: Annotated[
        str | None, typer.Option(help="Experts like 0-31; all of these layers if left out.")
    ] = None,
    segment: Annotated[
        list[str] | None,
        typer.Option(help="LAYERS:EXPERTS, like 4:16-63,128-255; may be given several times."),
    ] = None,
    backbone: Annotated[
        bool, typer.Option("--backbone", help="Write everything but the experts (a hollow model).")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check a written file against its manifest.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a file that is already there.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Copy selected experts of a model into a GGUF file, by byte ranges, verified.

    From a URL only the header and the wanted bytes are fetched. After an interruption the same
    command goes on where it stopped.
    """
    requests = _requests(layers, experts, segment or [])
    if verify:
        if requests or backbone or output is not None:
            raise LinkcppError(
                "--verify takes the written file and no other choice.",
                hint="Write: linkcpp slice FILE --verify",
            )
        _verify(Path(model), as_json=as_json)
        return
    if output is None:
        raise LinkcppError("There is no file to write.", hint="Name it with -o FILE.")
    if backbone and requests:
        raise LinkcppError(
            "A backbone has no experts, so none can be chosen.",
            hint="Leave out either --backbone or the layers and experts.",
        )
    require_here(model, "slice")
    with working(f"Reading the header of {model}…"):
        files = open_whole_model(model)
    with files:
        if backbone:
            written = _write_backbone(files, output, force=force)
        else:
            written = [_write_slice(files, requests, output, force=force)]
    for file in written:
        file.path.chmod(users_mode())
        file.manifest.chmod(users_mode())
    if as_json:
        print_json({"files": written})
    else:
        _report(written)


def _requests(layers: str | None, experts: str | None, segments: list[str]) -> list[SegmentRequest]:
    requests = [parse_segment(text) for text in segments]
    if layers is not None or experts is not None:
        requests.insert(
            0,
            SegmentRequest(
                None if layers is None else parse_ranges(layers, "layers"),
                None if experts is None else parse_ranges(experts, "experts"),
            ),
        )
    return requests


def _write_slice(
    files: ModelFiles, requests: list[SegmentRequest], output: Path, *, force: bool
) -> WrittenFile:
    segments = choose_segments(files, requests)
    _check_new([output], force=force)
    total = plan_slice(files, segments).job.copied_bytes
    with _bar(output.name, total) as on_progress:
        return write_slice(files, segments, output, on_progress)


def _write_backbone(files: ModelFiles, output: Path, *, force: bool) -> list[WrittenFile]:
    jobs = backbone_jobs(files)
    _check_new(backbone_paths(output, len(jobs)), force=force)
    total = sum(job.copied_bytes for job in jobs)
    with _bar(output.name, total) as on_progress:
        return write_backbone(files, output, on_progress)


def _check_new(paths: list[Path], *, force: bool) -> None:
    there = [path for path in paths if path.exists()]
    if there and not force:
        raise LinkcppError(
            f"{there[0]} is already there.", hint="Choose another name, or replace it with --force."
        )


@contextmanager
def _bar(name: str, total_bytes: int) -> Iterator[OnProgress]:
    try:
        with byte_bar(name, total_bytes) as on_progress:
            yield on_progress
    except KeyboardInterrupt:
        status_console().print("The same command goes on from here.")
        raise


def _report(written: list[WrittenFile]) -> None:
    out = console()
    for file in written:
        out.print(Text.assemble((str(file.path), "bold"), f"  {_size(file)}"))
        for text in describe(file.segments):
            out.print(f"  layers {text.replace(':', ', experts ')}")
        if file.reused_bytes:
            there = format_bytes(file.reused_bytes)
            out.print(f"  {there} were there from before and have the right hashes")
        out.print(f"  SHA-256 of every slab: {file.manifest.name}")
        for note in file.notes:
            out.print(Text.assemble(("• ", "yellow"), note))
    out.print(f"{format_bytes(written[-1].source_bytes)} of the model were read")


def _size(file: WrittenFile) -> str:
    size = format_bytes(file.file_bytes)
    if file.allocated_bytes < file.file_bytes // 2:
        size += f", of which {format_bytes(file.allocated_bytes)} on the disk"
    return size


def _verify(path: Path, *, as_json: bool) -> None:
    with _bar(path.name, listed_bytes(path)) as on_progress:
        found = verify_file(path, on_progress)
    if as_json:
        print_json({**found.model_dump(mode="json"), "is_sound": found.is_sound})
        if not found.is_sound:
            raise typer.Exit(2)
        return
    if not found.is_sound:
        count = len(found.damaged)
        named = list(found.damaged[:_MAX_NAMED])
        if count > len(named):
            named.append(f"{count - len(named)} more")
        what = [f"Damaged: {', '.join(named)}."] if named else []
        raise LinkcppError(
            f"{path} is not as it was written. {' '.join([*found.problems, *what])}",
            hint="Slice the model again with --force, or copy the file again.",
        )
    size = format_bytes(found.checked_bytes)
    told = f": {found.slab_count} hashes over {size} of {path.name} are right"
    console().print(Text.assemble(("sound", "green"), told))
