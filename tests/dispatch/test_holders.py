"""Links are opened side by side: who is silent delays nobody."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from linkcpp.dispatch.holder import Holder, LinkState
from linkcpp.dispatch.holders import Holders
from linkcpp.dispatch.worker_holder import WorkerAddress
from linkcpp.engine.records import EngineLocation
from tests.dispatch.test_exactness import even_shares
from tests.support import models
from tests.support.swarm import running_worker, worker_entry

SILENT = 20


@contextlib.contextmanager
def silent_workers(count: int) -> Iterator[list[WorkerAddress]]:
    """Listen, and say nothing to whoever connects."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                     for _ in range(count)]  # fmt: skip
        yield [
            WorkerAddress(f"silent {number}", "token", port=listener.getsockname()[1])
            for number, listener in enumerate(listeners)
        ]


def until(holder: Holder, state: LinkState) -> None:
    deadline = time.monotonic() + 300
    while holder.state != state:
        assert time.monotonic() < deadline, holder.detail
        time.sleep(0.01)


def test_workers_that_are_silent_delay_nobody(stock_engine: EngineLocation, tmp_path: Path) -> None:
    model = models.qwen3moe()
    changed = threading.Event()
    with (
        running_worker(
            stock_engine, model, even_shares(model, 1)[0], tmp_path, name="good"
        ) as worker,
        silent_workers(SILENT) as silent,
    ):
        holders = Holders(None, changed.set)
        try:
            waiting = [holders.add(address) for address in silent[:8]]
            entry = worker_entry("good", worker)
            good = holders.add(entry.address())
            until(good, LinkState.UP)
            # Nobody was given up before it was its turn.
            assert {holder.detail for holder in waiting} == {"not connected yet"}
            # More than are opened at once: they take turns, and one that is removed is gone.
            later = [holders.add(address) for address in silent[8:]]
            holders.remove(later[-1].name)
            for holder in waiting:
                deadline = time.monotonic() + 300
                while holder.detail == "not connected yet":
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
            assert {holder.state for holder in waiting} == {LinkState.CONNECTING}
            while later[-1] in holders.all():
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            holders.close()
    assert changed.is_set()
