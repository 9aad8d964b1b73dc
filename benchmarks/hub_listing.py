"""`GET /v1/nodes` of a hub with many nodes, and what it costs others who call meanwhile.

    python benchmarks/hub_listing.py [--nodes 10000] [--rounds 10] [--json]

On SQLite, with a whole state of each node. While the list is asked for again and again, a second
connection asks every 5 ms for the hub's health: what it waits is how long the hub's event loop is
held up. The client's own threads share the machine with the hub.
"""

import argparse
import http.client
import json
import os
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from hub import cpu_seconds, enter_nodes, heartbeat_with_state, running_hub
from sqlalchemy import insert, update

from linkcpp.hub.database import open_database
from linkcpp.hub.identity import load_hub_identity
from linkcpp.hub.schema import MACHINES
from linkcpp.registry.keys import make_keys
from linkcpp.registry.records import Role

_PROBE_SECONDS = 0.005


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "hub"
        enter_nodes(data, None, options.nodes)
        token = enter_states_and_coordinator(data)
        with running_hub(data, None) as (url, hub):
            row = measure(url.removeprefix("http://"), hub, token, options.rounds)
    if options.json:
        print(json.dumps({"nodes": options.nodes, **row}))
        return
    print(
        f"{options.nodes} nodes, {row['answer_mb']:.1f} MB: {row['list_ms']:.0f} ms a list, "
        f"{row['list_cpu_ms']:.0f} ms of processor; the hub has {row['before_mb']:.0f} MB before "
        f"and {row['peak_mb']:.0f} MB at most; other calls wait {row['busy_p50_ms']:.1f} ms (p50), "
        f"{row['busy_p99_ms']:.1f} (p99), {row['busy_longest_ms']:.1f} at most; while nobody lists "
        f"{row['idle_p50_ms']:.1f}, {row['idle_p99_ms']:.1f}, {row['idle_longest_ms']:.1f}; "
        f"load {os.getloadavg()[0]:.1f}"
    )


def enter_states_and_coordinator(data: Path) -> str:
    """Give every node a state, and let a coordinator in; returns its token."""
    engine, identity, keys = open_database(None, data), load_hub_identity(data), make_keys()
    now, node_id = time.time(), str(uuid.uuid4())
    row = {"node_id": node_id, "name": "coordinator", "role": "backbone", "joined_at": now}
    row |= {"signing_key": keys.signing_public, "edge_key": keys.edge_public, "token_id": ""}
    state = json.dumps(json.loads(heartbeat_with_state(1))["state"], separators=(",", ":"))
    with engine.begin() as connection:
        connection.execute(update(MACHINES).values(state=state, last_seen=now))
        connection.execute(insert(MACHINES).values(row))
    engine.dispose()
    return identity.issue(node_id, Role.BACKBONE, now=now, lifetime_seconds=7200).token


def measure(address: str, hub: psutil.Process, token: str, rounds: int) -> dict[str, Any]:
    """List again and again; return the numbers."""
    took: list[float] = []
    sizes: set[int] = set()

    def list_nodes() -> None:
        for _ in range(rounds):
            began = time.perf_counter()
            sizes.add(len(get(address, "/v1/nodes", token)))
            took.append((time.perf_counter() - began) * 1000)

    idle = waits_meanwhile(address, lambda: time.sleep(3))
    before_mb, before_seconds = hub.memory_info().rss / 1e6, cpu_seconds(hub)
    busy = waits_meanwhile(address, list_nodes)
    return {
        "answer_mb": max(sizes) / 1e6,
        "list_ms": statistics.median(took),
        "list_cpu_ms": (cpu_seconds(hub) - before_seconds) * 1000 / rounds,
        "before_mb": before_mb,
        "peak_mb": peak_mb(hub),
        **{f"idle_{name}": value for name, value in idle.items()},
        **{f"busy_{name}": value for name, value in busy.items()},
    }


def waits_meanwhile(address: str, work: Callable[[], None]) -> dict[str, float]:
    """Return how long calls for the hub's health took while ``work`` ran, in milliseconds."""
    waits: list[float] = []
    stop = threading.Event()

    def probe() -> None:
        connection = http.client.HTTPConnection(address)
        while not stop.wait(_PROBE_SECONDS):
            began = time.perf_counter()
            connection.request("GET", "/v1/health")
            connection.getresponse().read()
            waits.append((time.perf_counter() - began) * 1000)
        connection.close()

    probing = threading.Thread(target=probe)
    probing.start()
    try:
        work()
    finally:
        stop.set()
        probing.join()
    waits.sort()
    p99 = waits[int(len(waits) * 0.99)]
    return {"p50_ms": statistics.median(waits), "p99_ms": p99, "longest_ms": waits[-1]}


def get(address: str, path: str, token: str) -> bytes:
    connection = http.client.HTTPConnection(address)
    connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    if answer.status != http.client.OK:
        raise SystemExit(body.decode())
    return body


def peak_mb(process: psutil.Process) -> float:
    """The most memory that a process had, as Linux counts it."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    (peak,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    main()
