"""Copying byte ranges into an unfinished file: hashed on the way, resumed, in several threads.

Reading, hashing and writing release Python's global lock, so units are simply spread over threads:
while one thread hashes, another one reads or writes. A thread holds one piece of a slab in memory.
"""

import contextlib
import errno
import hashlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from linkcpp.common.errors import LinkcppError
from linkcpp.common.units import format_bytes
from linkcpp.model.slices.journal import Journal
from linkcpp.model.slices.layout import CopyJob, CopyUnit
from linkcpp.model.source import PIECE_BYTES, ByteSource

THREADS: Final = 4
# Written to the disk in the background, so that the last sync has little left to do.
_SYNC_BYTES: Final = 32 * 2**20
_PATIENCE_SECONDS: Final = 2.0

Progress = Callable[[int], None]


class Copied(NamedTuple):
    """``digests`` has the SHA-256 of every slab in hex, unit by unit."""

    digests: list[list[str]]
    fetched_bytes: int
    reused_bytes: int


class _Result(NamedTuple):
    number: int
    digests: list[str]
    was_there: bool


class _Stopped(Exception):  # noqa: N818 - not an error
    """The copy was given up; raised inside its threads only."""


def copy_units(
    job: CopyJob,
    sources: Sequence[ByteSource],
    partial: Path,
    journal: Journal,
    on_progress: Progress,
) -> Copied:
    """Bring a file's content to ``partial``, using what an earlier attempt left there.

    ``on_progress`` gets the bytes that were just done, from any thread. The file is synced.

    Raises:
        LinkcppError: the source cannot be read, or the disk is full or broken.
    """
    with _opened(partial, job.file_bytes) as target:
        _check_space(partial, target, job)
        _write(partial, target, memoryview(job.header), 0)
        copier = _Copier(job, sources, partial, target, journal.done, on_progress)
        digests: list[list[str]] = [[] for _ in job.units]
        fetched = reused = 0
        with _Threads(copier, len(job.units)) as results:
            for result in results:
                size = job.units[result.number].size_bytes
                digests[result.number] = result.digests
                if result.was_there:
                    reused += size
                else:
                    fetched += size
                    _note(journal, result, partial)
        try:
            os.fsync(target)
        except OSError as error:
            _refuse_write(partial, error)
    return Copied(digests, fetched, reused)


def hash_slabs(
    pieces: Iterator[memoryview], slab_bytes: int, on_piece: Callable[[memoryview], None]
) -> list[str]:
    """Hash a stream of whole slabs, each for itself; ``on_piece`` sees every piece."""
    digests = []
    running, left = hashlib.sha256(), slab_bytes
    for piece in pieces:
        on_piece(piece)
        rest = piece
        while len(rest) >= left:
            running.update(rest[:left])
            rest = rest[left:]
            digests.append(running.hexdigest())
            running, left = hashlib.sha256(), slab_bytes
        running.update(rest)
        left -= len(rest)
    return digests


class _Copier(NamedTuple):
    """Does one unit; used by all threads."""

    job: CopyJob
    sources: Sequence[ByteSource]
    partial: Path
    target: int
    done: dict[int, list[str]]
    on_progress: Progress

    def copy(self, number: int, target: int, check_alive: Callable[[], None]) -> _Result:
        unit = self.job.units[number]
        noted = self.done.get(number)
        if noted is not None and noted == self._hash_present(unit, target, check_alive):
            self.on_progress(unit.size_bytes)
            return _Result(number, noted, was_there=True)
        at = unit.target_offset_bytes

        def write(piece: memoryview) -> None:
            nonlocal at
            check_alive()
            _write(self.partial, target, piece, at)
            at += len(piece)
            self.on_progress(len(piece))

        source = self.sources[unit.file]
        pieces = source.stream(unit.source_offset_bytes, unit.size_bytes)
        return _Result(number, hash_slabs(pieces, unit.slab_bytes, write), was_there=False)

    def _hash_present(
        self, unit: CopyUnit, target: int, check_alive: Callable[[], None]
    ) -> list[str]:
        def pieces() -> Iterator[memoryview]:
            buffer = memoryview(bytearray(min(PIECE_BYTES, unit.size_bytes)))
            at, end = unit.target_offset_bytes, unit.target_offset_bytes + unit.size_bytes
            while at < end:
                check_alive()
                count = os.preadv(target, [buffer[: end - at]], at)
                if not count:
                    return
                yield buffer[:count]
                at += count

        return hash_slabs(pieces(), unit.slab_bytes, lambda _: None)


class _Threads:
    """Threads that copy the units in order; iterating gives the results as they come.

    Left early (an error, Ctrl-C) it does not wait long for a thread that is stuck in the network:
    the threads have descriptors of their own, and write nothing more once they notice.
    """

    def __init__(self, copier: _Copier, unit_count: int) -> None:
        self._copier = copier
        self._unit_count = unit_count
        self._numbers = iter(range(unit_count))
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, daemon=True) for _ in range(min(THREADS, unit_count))
        ]
        self._results: queue.SimpleQueue[_Result | BaseException] = queue.SimpleQueue()
        self._unsynced_bytes = 0

    def __enter__(self) -> Iterator[_Result]:
        for thread in self._threads:
            thread.start()
        return self._collect()

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))

    def _collect(self) -> Iterator[_Result]:
        for _ in range(self._unit_count):
            result = self._results.get()
            if isinstance(result, BaseException):
                raise result
            yield result

    def _run(self) -> None:
        target = os.dup(self._copier.target)
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
        _refuse_write(path, error)
    try:
        try:
            # A size beyond the file system's limit shows here, before anything is copied.
            os.ftruncate(target, size_bytes)
        except OSError as error:
            _refuse_write(path, error)
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


def _note(journal: Journal, result: _Result, partial: Path) -> None:
    try:
        journal.note(result.number, result.digests)
    except OSError as error:
        _refuse_write(partial, error)


def _write(path: Path, target: int, data: memoryview, offset_bytes: int) -> None:
    try:
        while data:
            count = os.pwrite(target, data, offset_bytes)
            data = data[count:]
            offset_bytes += count
    except OSError as error:
        _refuse_write(path, error)


def _refuse_write(path: Path, error: OSError) -> NoReturn:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise LinkcppError(
            f"The disk of {path.parent} became full.",
            hint="Free some space, then run the same command again: it goes on from here.",
        ) from error
    if error.errno == errno.EFBIG:
        raise LinkcppError(
            f"The file system of {path.parent} does not take files of this size.",
            hint="Choose a folder on another file system, or slice fewer experts.",
        ) from error
    raise LinkcppError(
        f"Cannot write in {path.parent}: {error.strerror}.", hint="Choose another folder."
    ) from error
