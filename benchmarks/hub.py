"""Heartbeats of many nodes at one hub, on SQLite and on PostgreSQL, in one run.

    python benchmarks/hub.py [--nodes 10000] [--interval 10] [--seconds 60] [--json]

Each node sends one heartbeat an interval at its own moment, over a connection of its own that
stays open, with its own token; every tenth heartbeat of a node brings its whole state anew. A
heartbeat is answered when it is durable. The load comes from a second process, which keeps to the
nodes' timetable whatever the hub does, so that a slow hub cannot slow down the load. Latency is
counted from the moment at which a heartbeat was due; the first interval is not counted.

Hub, load and PostgreSQL share this machine's cores; the CPU seconds of each are told.
"""

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import uvloop
from sqlalchemy import insert

from linkcpp.cluster.records import NodeDevice, NodeRecord
from linkcpp.hub.database import open_database
from linkcpp.hub.identity import load_hub_identity
from linkcpp.hub.schema import MACHINES
from linkcpp.model.slices.segments import Segment
from linkcpp.registry.keys import make_keys
from linkcpp.registry.records import Heartbeat, HeldUnits, NodeState, Role
from tests.support.postgresql import private_postgresql

STATE_EVERY = 10


def main() -> None:
    options = parse_options()
    if options.as_load:
        resource.setrlimit(resource.RLIMIT_NOFILE, (options.nodes + 200,) * 2)
        tokens = Path(options.as_load).read_text().split()
        print(json.dumps(uvloop.run(make_load(options, tokens))))
        return
    rows = [measure("SQLite", None, options)]
    with private_postgresql() as server:
        rows.append(measure("PostgreSQL", server.create_database("hub"), options))
    if options.json:
        print(
            json.dumps({"nodes": options.nodes, "interval_seconds": options.interval, "rows": rows})
        )
        return
    print(
        f"{options.nodes} nodes, a heartbeat every {options.interval:g} s, {os.cpu_count()} cores"
    )
    for row in rows:
        print(
            f"{row['database']:11} {row['per_second']:7.1f}/s  p50 {row['p50_ms']:6.1f} ms  "
            f"p99 {row['p99_ms']:6.1f} ms  longest {row['longest_ms']:6.1f} ms  "
            f"failed {row['failed']}  hub {row['hub_cpu']:.2f} cores, {row['hub_mb']:.0f} MB; "
            f"load {row['load_cpu']:.2f}; database {row['database_cpu']:.2f}"
        )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--interval", type=float, default=10.0, help="seconds between heartbeats")
    parser.add_argument("--seconds", type=float, default=60.0, help="measured time a database")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--as-load", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(name: str, database_url: str | None, options: argparse.Namespace) -> dict[str, Any]:
    """Run one hub with its nodes; return the numbers of one row."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "hub"
        tokens = enter_nodes(data, database_url, options.nodes)
        token_file = Path(folder) / "tokens"
        token_file.write_text("\n".join(tokens))
        with running_hub(data, database_url) as (url, hub):
            load = [sys.executable, __file__, "--as-load", str(token_file), "--url", url]
            for key in ("nodes", "interval", "seconds"):
                load += [f"--{key}", str(getattr(options, key))]
            process = subprocess.Popen(load, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            process.stdout.readline()  # the measured time begins
            before = time.monotonic(), cpu_seconds(hub), database_cpu_seconds()
            row = json.loads(process.stdout.readline())
            seconds = time.monotonic() - before[0]
            row["hub_cpu"] = (cpu_seconds(hub) - before[1]) / seconds
            row["database_cpu"] = (database_cpu_seconds() - before[2]) / seconds
            process.communicate()
            row["hub_mb"] = hub.memory_info().rss / 1e6
            return {"database": name, **row}


def enter_nodes(data: Path, database_url: str | None, count: int) -> list[str]:
    """Write nodes into the database as if they had joined; return their tokens."""
    engine = open_database(database_url, data)
    identity = load_hub_identity(data, create=True)
    now = time.time()
    keys = make_keys()
    ids = [str(uuid.uuid4()) for _ in range(count)]
    row: dict[str, Any] = {
        "role": "node",
        "signing_key": keys.signing_public,
        "edge_key": keys.edge_public,
    }
    row |= {"token_id": "", "joined_at": now}
    with engine.begin() as connection:
        rows = [row | {"node_id": node_id, "name": f"node-{node_id[:8]}"} for node_id in ids]
        connection.execute(insert(MACHINES), rows)
    engine.dispose()
    return [
        identity.issue(node_id, Role.NODE, now=now, lifetime_seconds=7200).token for node_id in ids
    ]


@contextmanager
def running_hub(data: Path, database_url: str | None) -> Iterator[tuple[str, psutil.Process]]:
    """Run `linkcpp hub` as users do."""
    command = [sys.executable, "-m", "linkcpp", "hub", "--data", str(data), "--port", "0"]
    environment = os.environ | ({"LINKCPP_DATABASE": database_url} if database_url else {})
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.communicate(timeout=60)


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def database_cpu_seconds() -> float:
    return sum(
        cpu_seconds(process)
        for process in psutil.process_iter(["name"])
        if process.info["name"] == "postgres"
    )


class Node(asyncio.Protocol):
    """One node's connection: HTTP by hand, for a client library would cost more than the hub."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        address: tuple[str, int],
        token: str,
        states: list[bytes],
    ) -> None:
        self._loop = loop
        self._address = address
        self._reconnecting: asyncio.Task[None] | None = None
        self._states = states
        self._head = (
            f"POST /v1/heartbeat HTTP/1.1\r\nHost: hub\r\nAuthorization: Bearer {token}\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()
        self._sequence = random.randrange(STATE_EVERY)
        self._received = b""
        self._due = 0.0
        self._is_waiting = False
        self.latencies: list[float] = []
        self.failures = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection."""
        self._transport = transport

    def beat(self, due: float) -> None:
        """Send a heartbeat; one that is still unanswered is counted as failed.

        A connection that the hub has closed, since it was idle for long while the others connected,
        is opened again, as every client does; that counts as part of the answer's time.
        """
        if self._is_waiting:
            self.failures += 1
            return
        if self._transport.is_closing():
            self._is_waiting, self._received = True, b""
            self._reconnecting = self._loop.create_task(self._reconnect(due))
            return
        self._send(due)

    async def _reconnect(self, due: float) -> None:
        host, port = self._address
        await self._loop.create_connection(lambda: self, host, port)
        self._send(due)

    def _send(self, due: float) -> None:
        self._sequence += 1
        if self._sequence % STATE_EVERY == 0:
            body = self._states[self._sequence % len(self._states)]
        else:
            body = b'{"sequence":%d}' % self._sequence
        self._due, self._is_waiting = due, True
        self._transport.write(self._head + b"%d\r\n\r\n%s" % (len(body), body))

    def data_received(self, data: bytes) -> None:
        """Read a part of an answer."""
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if len(body) < length:
            return
        self._received = b""
        self._is_waiting = False
        if head.startswith(b"HTTP/1.1 200"):
            self.latencies.append(self._loop.time() - self._due)
        else:
            self.failures += 1


async def make_load(options: argparse.Namespace, tokens: list[str]) -> dict[str, Any]:
    """Keep all nodes' timetables; return what was measured after the warm-up."""
    loop = asyncio.get_running_loop()
    host, port = options.url.removeprefix("http://").split(":")
    states = [heartbeat_with_state(number) for number in range(8)]
    nodes: list[Node] = []
    for start in range(0, len(tokens), 100):
        made = await asyncio.gather(
            *(
                loop.create_connection(
                    partial(Node, loop, (host, int(port)), token, states),
                    host,
                    int(port),
                )
                for token in tokens[start : start + 100]
            )
        )
        nodes += [protocol for _, protocol in made]
        for _, protocol in made:  # at once, for the hub drops connections that say nothing
            protocol.beat(loop.time())
    random.shuffle(nodes)
    begin = loop.time()
    # In the first round connections that fell idle are opened again.
    measured_from = begin + 2 * options.interval
    cpu_before = 0.0
    step = options.interval / len(nodes)
    count = int((2 * options.interval + options.seconds) / step)
    for number in range(count):
        due = begin + number * step
        if due >= measured_from and not cpu_before:
            print("begin", flush=True)
            cpu_before = time.process_time()
            for node in nodes:
                node.latencies.clear()
                node.failures = 0
        if (wait := due - loop.time()) > 0:
            await asyncio.sleep(wait)
        nodes[number % len(nodes)].beat(due)
    seconds = loop.time() - measured_from
    await asyncio.sleep(2.0)
    latencies = sorted(one * 1000 for node in nodes for one in node.latencies)
    return {
        "per_second": len(latencies) / seconds,
        "p50_ms": statistics.median(latencies),
        "p99_ms": latencies[int(len(latencies) * 0.99)],
        "longest_ms": latencies[-1],
        "failed": sum(node.failures for node in nodes),
        "load_cpu": (time.process_time() - cpu_before) / seconds,
    }


def heartbeat_with_state(number: int) -> bytes:
    device = NodeDevice(
        name="CPU",
        description="AMD Ryzen 7 5800X 8-Core Processor",
        is_cpu=True,
        total_bytes=32 * 10**9,
        free_bytes=20 * 10**9 + number,
        offered_bytes=16 * 10**9 + number,
        read_bytes_per_second=3.1e10,
    )
    record = NodeRecord(
        node_id=str(uuid.uuid4()),
        name="node",
        agent_version="0.1.0",
        platform="Linux x86_64",
        core_count=8,
        memory_limit_bytes=None,
        devices=(device,),
        engine=None,
        engine_problem=None,
    )
    segments = tuple(
        Segment(layer=layer, first=8 * number, last=8 * number + 7) for layer in range(48)
    )
    held = (HeldUnits(model_digest="0" * 64, segments=segments),)
    state = NodeState(record=record, direct_urls=("ws://10.0.0.5:8716/v1/edge",), held=held)
    return Heartbeat(sequence=number, state=state).model_dump_json().encode()


if __name__ == "__main__":
    main()
