"""Copying byte ranges into an unfinished file: hashed on the way, resumed, in several threads."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import OWNERS_MODE
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
from linkcpp.model.slices.unit_threads import UnitThreads, Work, Worker

# Written to the disk in the background, so that the last sync has little left to do.
_SYNC_BYTES: Final = 32 * 2**20


class Copied(NamedTuple):
    """``digests`` has the SHA-256 of every piece in hex, unit by unit."""

    digests: list[list[str]]
    fetched_bytes: int
    reused_bytes: int


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
        with UnitThreads(len(job.units), _worker(copier, target)) as results:
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


def _worker(copier: UnitCopier, target: int) -> Worker[CopiedUnit]:
    syncer = _Syncer()

    @contextlib.contextmanager
    def descriptor_of_its_own() -> Iterator[Work[CopiedUnit]]:
        # A thread that is stuck in the network outlives the copy that was given up.
        own = os.dup(target)

        def copy(number: int, check_alive: Callable[[], None]) -> CopiedUnit:
            result = copier.copy(number, own, check_alive)
            syncer.add(own, copier.job.units[number].size_bytes)
            return result

        try:
            yield copy
        finally:
            os.close(own)

    return descriptor_of_its_own


class _Syncer:
    """Syncs a file after every so many bytes, by whichever thread gets there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unsynced_bytes = 0

    def add(self, target: int, written_bytes: int) -> None:
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
        target = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWNERS_MODE)
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
