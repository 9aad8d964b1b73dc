"""Single experts on three nodes: each holds a part of every layer, and one dies meanwhile.

A dense model becomes a mixture of eight experts that computes the same. The coordinator keeps a
hollow backbone, each node gets only its slice; every expert has two holders. A node is killed with
SIGKILL while the words stream, and they go on: the very stream is compared with one process.
"""

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from demo_parts import (
    NODES,
    PROGRAM_BYTES,
    Node,
    Person,
    compare,
    label,
    megabytes,
    one_process,
    say_goodbye,
    screen,
    start_node,
    title,
    tokens_of,
)
from moeify import moeify
from rich.table import Table

from linkcpp.cli.output import working
from linkcpp.common.resources import resource_folder
from linkcpp.common.sockets import free_port
from linkcpp.common.units import format_bytes
from linkcpp.engine.check import choose_engine
from linkcpp.model.inventory import read_inventory
from linkcpp.node.limits import AGENT_BYTES

EXPERT_COUNT = 8
VICTIM = 1


def demo_experts(
    dense: Path, prompt: str, count: int, stack: ExitStack, *, keep: Path | None = None
) -> int:
    """Run the demo; 0 when the split run equals the one-process run.

    ``keep`` is a folder for the model of experts, which is deleted in the end without one.
    """
    started = time.monotonic()
    engine = choose_engine()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="linkcpp-demo-")))
    user = Person(folder / "you")
    url = f"http://127.0.0.1:{free_port()}"

    title(f"1. {dense.name} as a mixture of {EXPERT_COUNT} experts (engine: {label(engine)})")
    model = (keep or folder) / f"{dense.stem}-{EXPERT_COUNT}-experts.gguf"
    model.parent.mkdir(parents=True, exist_ok=True)
    moeify(dense, model, EXPERT_COUNT)
    screen.print(f"{format_bytes(model.stat().st_size)}, the same function, by moving bytes")

    title("2. Three nodes, as `linkcpp node` would run on three machines")
    user.run("token", "create")
    nodes = [_start(name, folder, model, stack) for name in NODES]
    by_url = [part for node in nodes for part in ("--node", node.url)]

    user.run("discover", "--no-mdns", *by_url)

    title("3. Who computes which experts: two holders for each")
    plan = folder / "plan.json"
    user.run(
        "plan", "--model", str(model), "--mode", "experts", "--replicas", "2", "--no-mdns", *by_url,
        "--context", "1024", "--memory", _backbone_memory(model), "-o", str(plan),
    )  # fmt: skip

    title("4. Up: a hollow backbone here, a slice on every node")
    stack.callback(user.run, "stop", "--all", check=False, quiet=True)
    port = url.rpartition(":")[2]
    # Without it, what no node computes would be computed here: this demo must not need that.
    with _coordinators_cores() as count_of_cores:
        user.run(
            "launch", str(plan), "--port", port, "--name", "demo", "--fallback-memory", "0",
            "--templates", _templates(folder, threads=count_of_cores),
        )  # fmt: skip
    before = _experts(user)
    _show_slices(before, model)

    title(f"5. Word by word, and {nodes[VICTIM].name} is killed (SIGKILL) in their midst")
    split = _stream_and_kill(url, prompt, count, nodes[VICTIM])
    time.sleep(3)  # the state is written every two seconds
    after = _experts(user)

    title("6. The same from one process")
    same = compare(split, one_process(engine, model, prompt, count, stack))

    title("7. Who computed what")
    failed = _show_work(after)
    user.run("status", "demo")

    title(f"8. {nodes[VICTIM].name} comes back")
    _start(nodes[VICTIM].name, folder, model, stack, port=int(nodes[VICTIM].url.rpartition(":")[2]))
    _wait_for_return(user, nodes[VICTIM].name)
    user.run("stop", "demo")
    say_goodbye(started, kept=model if keep else None)
    return 0 if same and not failed else 1


def _start(name: str, folder: Path, model: Path, stack: ExitStack, *, port: int = 0) -> Node:
    token_file = folder / "you" / "config" / "token"
    # Room for three quarters of the experts, beside the programs and buffers of a worker.
    memory = megabytes(int(0.8 * _expert_bytes(model)) + AGENT_BYTES + 380 * 10**6)
    cores = _cores()
    with _only([cores[NODES.index(name) % len(cores)]] if cores else []):
        return start_node(name, folder, token_file, memory=memory, stack=stack, port=port)


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@contextlib.contextmanager
def _only(cores: list[int]) -> Iterator[None]:
    """Start programs on some cores only, as if they were on a machine of their own.

    Else the threads of one "machine" wait for those of another, many times a token.
    """
    before = _cores()
    if before:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        if before:
            os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _coordinators_cores() -> Iterator[int]:
    cores = _cores()
    upper = cores[len(cores) // 2 :]
    with _only(upper):
        yield max(len(upper), 1)


def _templates(folder: Path, *, threads: int) -> str:
    """Make a template of llama-server's command line that says how many threads it may have."""
    own = folder / "templates"
    own.mkdir()
    name = "llama-server.args.j2"
    shipped = (resource_folder("templates") / name).read_text().rstrip()
    (own / name).write_text(f"{shipped}\n--threads\n{threads}\n")
    return str(own)


def _backbone_memory(model: Path) -> str:
    """Room for all but the experts, which the nodes must hold then."""
    return megabytes(model.stat().st_size - _expert_bytes(model) + PROGRAM_BYTES + 340 * 10**6)


def _expert_bytes(model: Path) -> int:
    layers = read_inventory(str(model)).layers
    return sum(layer.expert_count * layer.expert_bytes for layer in layers)


def _experts(user: Person) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(user.capture("status", "demo", "--json"))["state"]["experts"]
    return found


def _show_slices(experts: dict[str, Any], model: Path) -> None:
    path = Path(experts["backbone_path"])
    on_disk = path.stat().st_blocks * 512
    screen.print(
        f"hollow backbone: {path.stat().st_size:,} bytes long, {on_disk:,} bytes on the disk"
    )
    for worker in experts["workers"]:
        screen.print(
            f"{worker['node_name']}: {worker['transferred_bytes']:,} bytes came over the network "
            f"for {worker['slab_bytes'] or 0:,} bytes of experts "
            f"(the model has {model.stat().st_size:,})"
        )


def _stream_and_kill(url: str, prompt: str, count: int, victim: Node) -> list[Any]:
    """Print words as they come; return the tokens of this very stream."""
    screen.print(prompt, style="bold", end="")
    found: list[Any] = []
    for answer in _answers(url, prompt, count):
        found += tokens_of(answer)
        screen.print(answer.get("content", ""), end="")
        if len(found) >= count // 3 and victim.process.poll() is None:
            victim.process.send_signal(signal.SIGKILL)
            victim.process.wait()
            screen.print(f"⟨{victim.name} killed⟩", style="red", end="")
    screen.print()
    return found


def _answers(url: str, prompt: str, count: int) -> Iterator[dict[str, Any]]:
    body = {
        "prompt": prompt, "n_predict": count, "temperature": 0, "n_probs": 8,
        "cache_prompt": False, "stream": True,
    }  # fmt: skip
    with httpx.stream("POST", f"{url}/completion", json=body, timeout=300) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def _show_work(experts: dict[str, Any]) -> int:
    table = Table("worker", "pairs", "bytes", "wait", "compute", "failures")
    for worker in experts["workers"]:
        total = worker["total"]
        requests = max(total["request_count"], 1)
        table.add_row(
            worker["node_name"],
            f"{total['pair_count']:,}",
            format_bytes(total["sent_bytes"] + total["received_bytes"]),
            f"{total['wait_ms'] / requests:.2f} ms",
            f"{total['compute_ms'] / requests:.2f} ms",
            str(total["failure_count"]),
        )
    screen.print(table)
    seen = experts["dispatch"]
    failed: int = seen["failed_call_count"]
    screen.print(
        f"{seen['pair_count']:,} (token, expert) pairs; {seen['rerouted_pair_count']} were asked "
        f"for again elsewhere, {failed} calls failed"
    )
    return failed


def _wait_for_return(user: Person, name: str) -> None:
    deadline = time.monotonic() + 120
    with working(f"waiting until {name} computes again"):
        while time.monotonic() < deadline:
            state = json.loads(user.capture("status", "demo", "--json"))["state"]
            sentence = f"{name} is back and computes again"
            if any(notice["text"] == sentence for notice in state["notices"]):
                break
            time.sleep(0.5)
    screen.print(sentence)
