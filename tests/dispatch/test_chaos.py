"""Workers that are slow, vanish and come back at random, again and again: not a bit changes.

The regular run has 40 deaths and returns; ``--long`` has a thousand (some minutes).
"""

import contextlib
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from linkcpp.dispatch.control import NewWorker
from linkcpp.engine.records import EngineLocation
from tests.dispatch.test_exactness import SHORT, even_shares
from tests.support import models
from tests.support.lengths import repeated
from tests.support.swarm import (
    TOKEN,
    Running,
    as_json,
    running_device,
    running_llama_server,
    running_worker,
)

EVENTS = repeated(40)
TOKENS = 96


class Relay:
    """A link to a worker that can be slow, silent, or cut.

    ``delay_seconds`` is added to whatever the worker answers. While ``is_down`` nobody gets in.
    """

    def __init__(self, worker: Running) -> None:
        self._target = worker.ports[0]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._links: list[socket.socket] = []
        self.delay_seconds = 0.0
        self.is_down = False
        self.is_stalled = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def entry(self, name: str) -> NewWorker:
        return NewWorker(name=name, port=self._listener.getsockname()[1], token=TOKEN)

    def cut(self) -> None:
        self.is_down = True
        links, self._links = self._links, []
        for link in links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self.is_down:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._target))
                for link in (near, far):
                    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._links += [near, far]
                threading.Thread(target=self._carry, args=(near, far), daemon=True).start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        with near, far, contextlib.suppress(OSError):
            while True:
                for source in select.select([near, far], [], [])[0]:
                    data = source.recv(1 << 18)
                    if not data:
                        return
                    while self.is_stalled.is_set() and not self.is_down:
                        time.sleep(0.01)
                    if source is far and self.delay_seconds:
                        time.sleep(self.delay_seconds)
                    (far if source is near else near).sendall(data)


class Swarm:
    """Two full replicas behind relays, a device, a llama-server, and the wanted answer."""

    def __init__(self, engine: EngineLocation, folder: Path, stack: contextlib.ExitStack) -> None:
        model = models.qwen3moe()
        with running_llama_server(engine, model, folder, label="alone") as alone:
            self.wanted = as_json(alone.complete(SHORT, TOKENS))
        share = even_shares(model, 1)[0]
        self.workers = [
            stack.enter_context(running_worker(engine, model, share, folder, name=name))
            for name in "ab"
        ]
        self.relays = [Relay(worker) for worker in self.workers]
        for relay in self.relays:
            stack.callback(relay.close)
        entries = [relay.entry(name) for relay, name in zip(self.relays, "ab", strict=True)]
        # Both may be gone at once; how long a busy machine takes to link again is not the question.
        self.device = stack.enter_context(
            running_device(engine, model, entries, folder, patience_seconds=120)
        )
        self.server = stack.enter_context(
            running_llama_server(engine, model, folder, device_port=self.device.port)
        )

    def complete(self) -> str:
        return as_json(self.server.complete(SHORT, TOKENS))


@pytest.fixture
def swarm(stock_engine: EngineLocation, tmp_path: Path) -> Iterator[Swarm]:
    with contextlib.ExitStack() as stack:
        yield Swarm(stock_engine, tmp_path, stack)


def test_a_worker_ten_times_slower_is_used_less_and_changes_nothing(swarm: Swarm) -> None:
    assert swarm.complete() == swarm.wanted
    first = swarm.device.status()["workers"]
    # Ten times what an answer takes, its way included.
    swarm.relays[0].delay_seconds = max(0.01, 10 * first[0]["mean_wait_ms"] / 1000)
    for _ in range(20):
        before = swarm.device.status()["workers"]
        assert swarm.complete() == swarm.wanted
        after = swarm.device.status()["workers"]
        done = [b["pair_count"] - a["pair_count"] for a, b in zip(before, after, strict=True)]
        if done[0] * 2 < done[1]:
            return
    raise AssertionError(f"the slow worker still does {done[0]} pairs, the other one {done[1]}")


def test_workers_that_die_and_return_at_random_change_nothing(swarm: Swarm) -> None:
    """One of the two is cut off, or stopped, and comes back, while tokens flow."""
    chance = np.random.default_rng(EVENTS)
    done = threading.Event()

    def failures() -> int:
        return sum(worker["failure_count"] for worker in swarm.device.status()["workers"])

    def strike() -> None:
        # On a busy machine a link may not be back yet when it is cut again.
        for event in range(10 * EVENTS):
            if event >= EVENTS and failures() >= EVENTS // 4:
                break
            number = int(chance.integers(2))
            if chance.random() < 0.8:
                swarm.relays[number].cut()
                time.sleep(chance.uniform(0, 0.1))
                swarm.relays[number].is_down = False
            else:
                swarm.workers[number].process.send_signal(signal.SIGSTOP)
                time.sleep(chance.uniform(0, 0.5))
                swarm.workers[number].process.send_signal(signal.SIGCONT)
            time.sleep(chance.uniform(0, 0.3))
        done.set()

    thread = threading.Thread(target=strike)
    thread.start()
    answers = 0
    while not done.is_set():
        answer = swarm.complete()
        assert answer == swarm.wanted, swarm.device.running.log.read_text()
        answers += 1
    thread.join()
    assert answers
    assert swarm.device.status()["failed_pair_count"] == 0
    assert failures() >= EVENTS // 4
    # All of them are used again.
    swarm.device.wait_until("all(w['state'] == 'up' for w in s['workers'])")
    print(f"{EVENTS} events, {answers} answers of {TOKENS} tokens, all equal")
