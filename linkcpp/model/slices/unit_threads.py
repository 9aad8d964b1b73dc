"""Doing the units of a file in several threads.

Reading, hashing and writing release Python's global lock, so units are simply spread over threads:
while one thread hashes, another one reads or writes. A thread holds one piece of a slab in memory.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Final, Generic, TypeVar

THREADS: Final = 4
_PATIENCE_SECONDS: Final = 2.0

_R = TypeVar("_R")
# Does one unit, and calls its second argument often, which ends it when all was given up.
Work = Callable[[int, Callable[[], None]], _R]
# Makes what one thread works with.
Worker = Callable[[], AbstractContextManager[Work[_R]]]


class _Stopped(Exception):  # noqa: N818 - not an error
    """The work was given up; raised inside its threads only."""


class UnitThreads(Generic[_R]):
    """Threads that do the units in order; iterating gives the results as they come.

    Left early (an error, Ctrl-C) it does not wait long for a thread that is stuck in the network:
    that does nothing more once it notices.
    """

    def __init__(self, unit_count: int, worker: Worker[_R]) -> None:
        self._unit_count = unit_count
        self._worker = worker
        self._numbers = iter(range(unit_count))
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, daemon=True) for _ in range(min(THREADS, unit_count))
        ]
        self._results: queue.SimpleQueue[_Done[_R] | BaseException] = queue.SimpleQueue()

    def __enter__(self) -> Iterator[_R]:
        for thread in self._threads:
            thread.start()
        return self._collect()

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))

    def _collect(self) -> Iterator[_R]:
        for _ in range(self._unit_count):
            result = self._results.get()
            if isinstance(result, BaseException):
                raise result
            yield result.value

    def _run(self) -> None:
        try:
            with self._worker() as work:
                while (number := self._next()) is not None:
                    self._results.put(_Done(work(number, self._check_alive)))
        except _Stopped:
            pass
        except BaseException as error:
            self._results.put(error)

    def _next(self) -> int | None:
        with self._lock:
            return None if self._stopped.is_set() else next(self._numbers, None)

    def _check_alive(self) -> None:
        if self._stopped.is_set():
            raise _Stopped


class _Done(Generic[_R]):
    """A result, which may be anything but an error that was raised."""

    def __init__(self, value: _R) -> None:
        self.value = value
