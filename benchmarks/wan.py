"""What a token costs through a relay at a distance: one round trip a layer, and no second one.

A hub with its gateway, two nodes that joined it without an open port, and a coordinator, all on one
machine; a relay in front of the hub delays every byte. One run measures each distance:

    python benchmarks/wan.py [--tokens 60] [--rtts 0 20 80] [--json]

Claim: time a token <= layers x RTT x 1.1 + the time a token takes at RTT 0. The relay's timers are
late by up to a millisecond each, so the RTT is what a raw TCP echo through the same relay takes.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from processes import cpu_seconds
from rich.console import Console
from rich.table import Table

from linkcpp.common.sockets import free_port
from tests.launch.swarm import single_thread_templates, wait_until
from tests.support.engines import prebuilt_engine
from tests.support.models import qwen3moe
from tests.support.slow_relay import SlowRelay, slow_relay

LAYERS = 4
ROW_BYTES = 2048
NAMES = ("attic", "cellar")


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(65536):
        writer.write(piece)
        await writer.drain()
    writer.close()


class Distance:
    """The delaying relay in a thread of its own; ``rtt_ms`` between coordinator and nodes."""

    def __init__(self, hub_port: int) -> None:
        self.port = 0
        self._hub_port = hub_port
        self._loop = asyncio.new_event_loop()
        self._relays: tuple[SlowRelay, ...] = ()
        self._ready = threading.Event()
        threading.Thread(
            target=lambda: self._loop.run_until_complete(self._run()), daemon=True
        ).start()
        self._ready.wait()

    async def _run(self) -> None:
        echo = await asyncio.start_server(_echo, "127.0.0.1", 0)
        echo_port = echo.sockets[0].getsockname()[1]
        async with slow_relay(self._hub_port) as relay, slow_relay(echo_port) as mirror:
            self._relays, self.port = (relay, mirror), relay.port
            self._ready.set()
            await asyncio.Event().wait()

    def set(self, rtt_ms: float) -> float:
        """Be that far; return what a raw echo of a row takes, in milliseconds.

        Both ends pass the relay, so half of it is on either side, and the echo counts twice.
        """
        for relay in self._relays:
            relay.rtt_seconds = rtt_ms / 2 / 1000
        row = bytes(ROW_BYTES)
        with socket.create_connection(("127.0.0.1", self._relays[1].port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            took = []
            for _ in range(40):
                began = time.perf_counter()
                connection.sendall(row)
                left = len(row)
                while left:
                    left -= len(connection.recv(left))
                took.append((time.perf_counter() - began) * 1000)
        return 2 * statistics.median(took)


def command_of(name: str, *words: str) -> list[str]:
    """Write a verb's command, on one core, as on a machine of its own.

    Else the threads of one machine wait for those of another.
    """
    cores = sorted(os.sched_getaffinity(0))
    core = str(cores[(name == "cellar") % len(cores)])
    settle = [] if name == "hub" else ["taskset", "-c", core]
    return [*settle, sys.executable, "-m", "linkcpp.cli.main", *words]


class Place:
    """The processes of the benchmark."""

    def __init__(self, folder: Path) -> None:
        engine = prebuilt_engine()
        assert engine.llama_server is not None
        self.folder = folder
        self.engine_folder = str(engine.llama_server.parent)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.templates = single_thread_templates(folder)

    def _environment(self, name: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("LINKCPP_")}
        return kept | {
            "LINKCPP_HOME": str(self.folder / name),
            "LINKCPP_ENGINE": self.engine_folder,
        }

    def run(self, name: str, *words: str) -> str:
        """Run a verb on one of the machines to its end."""
        command = command_of(name, *words)
        done = subprocess.run(
            command,
            env=self._environment(name),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{words}: {done.stdout}{done.stderr}")
        return done.stdout

    def start(self, name: str, *words: str) -> None:
        """Start a verb that serves, and wait until it does."""
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command_of(name, *words),
                env=self._environment(name),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.running[name] = process
        wait_until(lambda: "Ctrl-C stops it" in log.read_text(), process)

    def close(self) -> None:
        """End all of them."""
        with contextlib.suppress(SystemExit):
            self.run("coordinator", "stop", "--all")
        for process in reversed(self.running.values()):
            process.terminate()
            process.wait(30)


@contextlib.contextmanager
def place() -> Iterator[tuple[Place, Distance, str]]:
    """Bring everything up; yields the API's URL with it."""
    with tempfile.TemporaryDirectory(prefix="linkcpp-wan-") as folder:
        made = Place(Path(folder))
        try:
            port = free_port()
            made.start("hub", "hub", "--gateway", "--port", str(port))
            distance = Distance(port)
            url = f"http://127.0.0.1:{distance.port}"
            for name in NAMES:
                token = made.run("hub", "hub", "token", "create", "--role", "node").split()[0]
                made.start(name, "join", url, "--token", token, "--name", name, "--no-listen")
            token = made.run("hub", "hub", "token", "create", "--role", "backbone").split()[0]
            made.run("coordinator", "join", url, "--token", token)
            yield made, distance, launch(made, url)
        finally:
            made.close()


def launch(made: Place, hub_url: str) -> str:
    """Plan the experts over both nodes and launch."""
    plan = str(made.folder / "p.json")
    words: tuple[str, ...] = (
        "plan",
        "--model",
        str(qwen3moe()),
        "--mode",
        "experts",
        "--context",
        "1024",
    )
    made.run(
        "coordinator",
        *words,
        "--no-mdns",
        "--hub",
        hub_url,
        "--memory",
        "526MB",
        "--reserve",
        "0",
        "-o",
        plan,
    )
    words = ("launch", plan, "--name", "wan", "--port", "0", "--no-mdns", "--json")
    out = made.run("coordinator", *words, "--templates", made.templates, "--fallback-memory", "0")
    return str(json.loads(out)["api_url"])


def token_ms(url: str, count: int) -> float:
    """Return what a decoded token takes, as llama-server measured it."""
    body = {
        "prompt": "The three most useful things in a kitchen are",
        "n_predict": count,
        "temperature": 0,
        "cache_prompt": False,
        "ignore_eos": True,
    }
    answer = httpx.post(f"{url}/completion", json=body, timeout=600)
    answer.raise_for_status()
    return float(answer.json()["timings"]["predicted_per_token_ms"])


def measure(tokens: int, rtts_ms: list[float]) -> list[dict[str, Any]]:
    """Measure a token at every distance, the median of three answers."""
    found: list[dict[str, Any]] = []
    with place() as (made, distance, url):
        token_ms(url, 8)
        base_ms = 0.0
        for rtt_ms in rtts_ms:
            raw_ms = distance.set(rtt_ms)
            token_ms(url, 8)
            before = cpu_seconds(made.folder)
            took = statistics.median(token_ms(url, tokens) for _ in range(3))
            after = cpu_seconds(made.folder)
            base_ms = base_ms or took
            limit_ms = LAYERS * raw_ms * 1.1 + base_ms if rtt_ms else base_ms
            cpu_ms = {
                name: round((after[name] - before.get(name, 0.0)) / (3 * tokens) * 1e3, 2)
                for name in after
            }
            found.append(
                {
                    "asked_rtt_ms": rtt_ms,
                    "rtt_ms": round(raw_ms, 2),
                    "token_ms": round(took, 2),
                    "limit_ms": round(limit_ms, 2),
                    "round_trips_a_layer": round((took - base_ms) / LAYERS / raw_ms, 3)
                    if rtt_ms
                    else None,
                    "cpu_ms_a_token": cpu_ms,
                }
            )
    return found


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--rtts", type=float, nargs="+", default=[0.0, 20.0, 80.0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.tokens, options.rtts)
    if options.json:
        print(json.dumps(found))
        return
    table = Table("RTT ms", "token ms", "layers x RTT x 1.1 + compute", "round trips a layer")
    for row in found:
        cells = (row["rtt_ms"], row["token_ms"], row["limit_ms"], row["round_trips_a_layer"])
        table.add_row(*(str(cell) for cell in cells))
    out = Console()
    out.print(table)
    out.print("processor ms a token at the first distance:", found[0]["cpu_ms_a_token"])


if __name__ == "__main__":
    main()
