"""Bringing one unit of a file to its place: used where it is there already, else read and written.

Where somebody promised what the pieces are, every piece is held to its hash as it comes. A wrong
one is read again, then from the next place; what was right is not read twice.
"""

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from linkcpp.common.errors import LinkcppError, write_hint
from linkcpp.model.slices.hashing import Progress, hash_pieces
from linkcpp.model.slices.layout import CopyJob, CopyUnit
from linkcpp.model.slices.manifest import Slab
from linkcpp.model.source import PIECE_BYTES, ByteSource

_ATTEMPTS: Final = 2


class DiskError(LinkcppError):
    """The file cannot be written."""


class Place(NamedTuple):
    """Where the bytes of a unit can be read."""

    source: ByteSource
    offset_bytes: int


class Supply(NamedTuple):
    """For each unit of a job the places that have it, best first, and what its pieces must be.

    Without ``promised`` whatever comes is taken.
    """

    places: Sequence[tuple[Place, ...]]
    promised: Sequence[tuple[Slab, ...]] | None = None


class CopiedUnit(NamedTuple):
    """A unit that is in its place; ``digests`` has the SHA-256 of every piece in hex."""

    number: int
    digests: list[str]
    reused_bytes: int


class UnitCopier(NamedTuple):
    """Copies units, in whatever threads; ``noted`` has the hashes that a journal tells.

    ``is_resumed`` says that the file may have pieces which no journal tells.
    """

    job: CopyJob
    supply: Supply
    path: Path
    noted: Mapping[int, list[str]]
    is_resumed: bool
    on_progress: Progress

    def copy(self, number: int, target: int, check_alive: Callable[[], None]) -> CopiedUnit:
        """Bring one unit into the file behind the descriptor ``target``.

        Raises:
            LinkcppError: it is not to be had, or the disk is full or broken.
        """
        unit = self.job.units[number]

        def write_at(offset_bytes: int) -> Callable[[memoryview], None]:
            def write(part: memoryview) -> None:
                nonlocal offset_bytes
                check_alive()
                write_part(self.path, target, part, offset_bytes)
                offset_bytes += len(part)

            return write

        def hash_present() -> list[str]:
            parts = _present(unit, target, check_alive)
            return list(hash_pieces(parts, unit.piece_sizes, lambda _: None))

        if self.supply.promised is None:
            return self._take(number, hash_present, write_at)
        return self._take_promised(
            number, hash_present if _has_data(unit, target) else list, write_at
        )

    def _take(
        self,
        number: int,
        hash_present: Callable[[], list[str]],
        write_at: Callable[[int], Callable[[memoryview], None]],
    ) -> CopiedUnit:
        unit = self.job.units[number]
        noted = self.noted.get(number)
        if noted is not None and noted == hash_present():
            self.on_progress(unit.size_bytes)
            return CopiedUnit(number, noted, unit.size_bytes)
        write = write_at(unit.target_offset_bytes)

        def take(part: memoryview) -> None:
            write(part)
            self.on_progress(len(part))

        source, offset_bytes = self.supply.places[number][0]
        parts = source.stream(offset_bytes, unit.size_bytes)
        return CopiedUnit(number, list(hash_pieces(parts, unit.piece_sizes, take)), 0)

    def _take_promised(
        self,
        number: int,
        hash_present: Callable[[], list[str]],
        write_at: Callable[[int], Callable[[memoryview], None]],
    ) -> CopiedUnit:
        unit = self.job.units[number]
        assert self.supply.promised is not None  # noqa: S101 - the caller looked
        wanted = [piece.sha256 for piece in self.supply.promised[number]]
        found = hash_present() if self.is_resumed else []
        missing = set(range(len(wanted)))
        missing -= {at for at, digest in enumerate(found) if digest == wanted[at]}
        reused = unit.size_bytes - sum(unit.piece_sizes[at] for at in missing)
        self.on_progress(reused)
        troubles: list[LinkcppError | str] = []
        for place in self.supply.places[number]:
            for _ in range(_ATTEMPTS if missing else 0):
                try:
                    self._fetch(unit, place, wanted, missing, write_at)
                except DiskError:
                    raise
                except LinkcppError as error:
                    troubles.append(error)
                    break
            else:
                troubles.append(f"{place.source.name} sent other bytes, twice")
        if missing:
            raise _not_to_be_had(self.supply.promised[number][min(missing)], troubles)
        return CopiedUnit(number, wanted, reused)

    def _fetch(
        self,
        unit: CopyUnit,
        place: Place,
        wanted: list[str],
        missing: set[int],
        write_at: Callable[[int], Callable[[memoryview], None]],
    ) -> None:
        """Read what is ``missing``, and take out of it what was right."""
        for first, end in _runs(missing):
            sizes = unit.piece_sizes[first:end]
            start = sum(unit.piece_sizes[:first])
            parts = place.source.stream(place.offset_bytes + start, sum(sizes))
            write = write_at(unit.target_offset_bytes + start)
            # To its end, or the connection could not be used again.
            for at, digest in enumerate(hash_pieces(parts, sizes, write), first):
                if digest == wanted[at]:
                    missing.discard(at)
                    self.on_progress(unit.piece_sizes[at])


def write_part(path: Path, target: int, data: memoryview, offset_bytes: int) -> None:
    """Write all of ``data``; ``path`` names the file in errors.

    Raises:
        DiskError: the disk is full or broken.
    """
    try:
        while data:
            count = os.pwrite(target, data, offset_bytes)
            data = data[count:]
            offset_bytes += count
    except OSError as error:
        refuse_write(path, error)


def refuse_write(path: Path, error: OSError) -> NoReturn:
    """Say why a file cannot be written.

    Raises:
        DiskError: always.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise DiskError(
            f"The disk of {path.parent} became full.",
            hint="Free some space, then run the same command again: it goes on from here.",
        ) from error
    if error.errno == errno.EFBIG:
        raise DiskError(
            f"The file system of {path.parent} does not take files of this size.",
            hint="Choose a folder on another file system, or slice fewer experts.",
        ) from error
    raise DiskError(
        f"Cannot write in {path.parent}: {error.strerror}.",
        hint=write_hint(error, "choose another folder"),
    ) from error


def _present(unit: CopyUnit, target: int, check_alive: Callable[[], None]) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(PIECE_BYTES, unit.size_bytes)))
    at, end = unit.target_offset_bytes, unit.target_offset_bytes + unit.size_bytes
    while at < end:
        check_alive()
        count = os.preadv(target, [buffer[: end - at]], at)
        if not count:
            return
        yield buffer[:count]
        at += count


def _has_data(unit: CopyUnit, target: int) -> bool:
    """Whether the file has more than a hole there, as far as the file system tells."""
    try:
        found = os.lseek(target, unit.target_offset_bytes, os.SEEK_DATA)
    except OSError as error:
        return error.errno != errno.ENXIO
    return found < unit.target_offset_bytes + unit.size_bytes


def _runs(numbers: set[int]) -> list[tuple[int, int]]:
    """Join neighbours: ``{0, 1, 4}`` becomes ``[(0, 2), (4, 5)]``."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


def _not_to_be_had(piece: Slab, troubles: list[LinkcppError | str]) -> LinkcppError:
    failures = [trouble for trouble in troubles if isinstance(trouble, LinkcppError)]
    if len(failures) == len(troubles) == 1:
        return failures[0]
    told = [t.message.rstrip(".") if isinstance(t, LinkcppError) else t for t in troubles]
    return LinkcppError(
        f"{piece.label} is not to be had as the manifest describes it: {'; '.join(told)}.",
        hint="Have the hub's owner compare the model with its manifest (`linkcpp hub models`), "
        "or take the model from another address.",
    )
