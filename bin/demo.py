"""Three node agents on loopback serve one model through the ordinary commands of linkcpp.

Runs token, node, discover, plan, launch, status and stop as a user would, streams a completion from
the OpenAI API, and proves that it equals the one-process run token for token. Everything lives in a
temporary folder and is stopped at the end, also on Ctrl-C.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from demo_experts import demo_experts
from demo_parts import (
    NODES,
    PROGRAM_BYTES,
    Person,
    compare,
    label,
    megabytes,
    one_process,
    packaged_model,
    say_goodbye,
    screen,
    start_node,
    stream,
    title,
    tokens,
)
from rich.table import Table
from rich.text import Text

from linkcpp.common.errors import LinkcppError
from linkcpp.common.sockets import free_port
from linkcpp.common.units import format_bytes
from linkcpp.engine.check import choose_engine
from linkcpp.model.inventory import read_inventory
from linkcpp.node.limits import AGENT_BYTES

PROMPT = "Once upon a time, in a small village by the sea, there lived"


def main() -> int:
    """Run the demo; 0 when the split run equals the one-process run."""
    arguments = _arguments()
    # A terminal that is closed or a polite kill must clean up just as Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))
    try:
        with ExitStack() as stack:
            return (_demo_experts if arguments.experts else _demo)(arguments, stack)
    except KeyboardInterrupt:
        screen.print("\ninterrupted; everything is stopped")
        return 130
    except LinkcppError as error:
        screen.print(Text.assemble(("error: ", "red"), error.message))
        if error.hint:
            screen.print(Text.assemble(("hint: ", "bold"), error.hint))
        return 2


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a GGUF of your own (default: SmolLM2-135M)")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(
        "--experts", action="store_true", help="split single experts, and kill a node meanwhile"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="with --experts: keep the model made for it here",
    )
    arguments = parser.parse_args()
    if arguments.keep is not None and not arguments.experts:
        parser.error("--keep keeps the model that --experts makes: give both")
    return arguments


def _demo_experts(arguments: argparse.Namespace, stack: ExitStack) -> int:
    model = (arguments.model or packaged_model()).absolute()
    keep = arguments.keep.absolute() if arguments.keep else None
    return demo_experts(model, arguments.prompt, arguments.tokens, stack, keep=keep)


def _demo(arguments: argparse.Namespace, stack: ExitStack) -> int:
    started = time.monotonic()
    model = (arguments.model or packaged_model()).absolute()
    inventory = read_inventory(str(model))
    engine = choose_engine()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="linkcpp-demo-")))
    user = Person(folder / "you")

    title(
        f"1. Three nodes, as `linkcpp node` would run on three machines (engine: {label(engine)})"
    )
    user.run("token", "create")
    token_file = folder / "you" / "config" / "token"
    # Besides its third, a node needs what agent and rpc-server take, compute buffers and KV cache.
    memory = megabytes(int(inventory.file_bytes / 3 * 1.3) + AGENT_BYTES + 128 * 10**6)
    nodes = [start_node(name, folder, token_file, memory=memory, stack=stack) for name in NODES]
    by_url = [part for node in nodes for part in ("--node", node.url)]

    title("2. Who is there")
    user.run("discover", "--no-mdns", *by_url)

    title("3. Who holds what")
    plan = folder / "plan.json"
    # The coordinator offers little more than the input embeddings, so the nodes hold the layers.
    coordinator = megabytes(inventory.embedding_bytes + PROGRAM_BYTES + 16 * 10**6)
    user.run(
        "plan", "--model", str(model), "--mode", "layers", "--min-nodes", "3", "--no-mdns", *by_url,
        "--context", "1024", "--memory", coordinator, "-o", str(plan),
    )  # fmt: skip

    title("4. Up")
    stack.callback(user.run, "stop", "--all", check=False, quiet=True)
    port = free_port()
    user.run("launch", str(plan), "--port", str(port), "--name", "demo")

    title("5. An answer, word by word, from the OpenAI API")
    request = {"prompt": arguments.prompt, "max_tokens": arguments.tokens, "temperature": 0}
    stream(f"http://127.0.0.1:{port}/v1/completions", request)
    split = tokens(f"http://127.0.0.1:{port}", arguments.prompt, arguments.tokens)

    title("6. The same from one process")
    same = compare(split, one_process(engine, model, arguments.prompt, arguments.tokens, stack))

    title("7. What ran where")
    _where(json.loads(user.capture("status", "demo", "--json")))
    user.run("stop", "demo")
    say_goodbye(started)
    return 0 if same else 1


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
