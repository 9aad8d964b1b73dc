"""Copying byte ranges into an unfinished file: hashed on the way, resumed, in several threads.

Reading, hashing and writing release Python's global lock, so units are simply spread over threads:
while one thread hashes, another one reads or writes. A thread holds one piece of a slab in memory.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from linkcpp.common.errors import LinkcppError
from linkcpp.common.units import format_bytes
from linkcpp.model.slices.hashing import Progress
from linkcpp.model.slices.journal import Journal
from linkcpp.model.slices.layout import CopyJob
from linkcpp.model.slices.unit_copier import (
    CopiedUnit,
    Supply,
    UnitCopier,
    refuse_write,
    write_part,
)

THREADS: Final = 4
# Written to the disk in the background, so that the last sync has little left to do.
_SYNC_BYTES: Final = 32 * 2**20
_PATIENCE_SECONDS: Final = 2.0


class Copied(NamedTuple):
    """``digests`` has the SHA-256 of every piece in hex, unit by unit."""

    digests: list[list[str]]
    fetched_bytes: int
    reused_bytes: int


class _Stopped(Exception):  # noqa: N818 - not an error
    """The copy was given up; raised inside its threads only."""


def copy_units(
    job: CopyJob, supply: Supply, partial: Path, journal: Journal, on_progress: Progress
) -> Copied:
    """Bring a file's content to ``partial``, using what an earlier attempt left there.

    ``on_progress`` gets the bytes that were just done, from any thread. The file is synced.

    Raises:
        LinkcppError: the source cannot be read, or the disk is full or broken.
    """
    is_resumed = partial.exists()
    with _opened(partial, job.file_bytes) as target:
        _check_space(partial, target, job)
        write_part(partial, target, memoryview(job.header), 0)
        copier = UnitCopier(job, supply, partial, journal.done, is_resumed, on_progress)
        digests: list[list[str]] = [[] for _ in job.units]
        reused = 0
        with _Threads(copier, target) as results:
            for result in results:
                digests[result.number] = result.digests
                reused += result.reused_bytes
                if result.reused_bytes < job.units[result.number].size_bytes:
                    _note(journal, result, partial)
        try:
            os.fsync(target)
        except OSError as error:
            refuse_write(partial, error)
    return Copied(digests, job.copied_bytes - reused, reused)


class _Threads:
    """Threads that copy the units in order; iterating gives the results as they come.

    Left early (an error, Ctrl-C) it does not wait long for a thread that is stuck in the network:
    the threads have descriptors of their own, and write nothing more once they notice.
    """

    def __init__(self, copier: UnitCopier, target: int) -> None:
        self._copier = copier
        self._target = target
        self._unit_count = unit_count = len(copier.job.units)
        self._numbers = iter(range(unit_count))
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, daemon=True) for _ in range(min(THREADS, unit_count))
        ]
        self._results: queue.SimpleQueue[CopiedUnit | BaseException] = queue.SimpleQueue()
        self._unsynced_bytes = 0

    def __enter__(self) -> Iterator[CopiedUnit]:
        for thread in self._threads:
            thread.start()
        return self._collect()

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))

    def _collect(self) -> Iterator[CopiedUnit]:
        for _ in range(self._unit_count):
            result = self._results.get()
            if isinstance(result, BaseException):
                raise result
            yield result

    def _run(self) -> None:
        target = os.dup(self._target)
        try:
            while (number := self._next()) is not None:
                result = self._copier.copy(number, target, self._check_alive)
                self._results.put(result)
                self._sync_sometimes(target, self._copier.job.units[number].size_bytes)
        except _Stopped:
            pass
        except BaseException as error:
            self._results.put(error)
        finally:
            os.close(target)

    def _next(self) -> int | None:
        with self._lock:
            return None if self._stopped.is_set() else next(self._numbers, None)

    def _check_alive(self) -> None:
        if self._stopped.is_set():
            raise _Stopped

    def _sync_sometimes(self, target: int, written_bytes: int) -> None:
        with self._lock:
            self._unsynced_bytes += written_bytes
            if self._unsynced_bytes < _SYNC_BYTES:
                return
            self._unsynced_bytes = 0
        with contextlib.suppress(OSError):  # the last sync tells
            os.fsync(target)


@contextlib.contextmanager
def _opened(path: Path, size_bytes: int) -> Iterator[int]:
    try:
        target = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        refuse_write(path, error)
    try:
        try:
            # A size beyond the file system's limit shows here, before anything is copied.
            os.ftruncate(target, size_bytes)
        except OSError as error:
            refuse_write(path, error)
        yield target
    finally:
        os.close(target)


def _check_space(path: Path, target: int, job: CopyJob) -> None:
    there = os.fstat(target).st_blocks * 512
    system = os.fstatvfs(target)
    free = system.f_bavail * system.f_frsize
    missing = len(job.header) + job.copied_bytes - there
    if missing > free:
        raise LinkcppError(
            f"{path.parent} has {format_bytes(free)} free, but {format_bytes(missing)} are needed.",
            hint="Free some space, choose another folder, or slice fewer experts.",
        )


def _note(journal: Journal, result: CopiedUnit, partial: Path) -> None:
    try:
        journal.note(result.number, result.digests)
    except OSError as error:
        refuse_write(partial, error)
