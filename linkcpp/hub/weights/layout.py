"""A file that does not exist: ranges of other files and bytes in memory, one after the other. Pure.

A slice is its header and ranges of the model; a hollow file is sent as its ranges without the
holes. So any range of either can be read without anything being written.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from linkcpp.model.slices.layout import CopyJob


class Extent(NamedTuple):
    """Consecutive bytes, in file number ``file`` from ``offset_bytes`` on.

    Where ``file`` is ``None`` they are ``content``, or zeros without one.
    """

    size_bytes: int
    file: int | None
    offset_bytes: int
    content: bytes | None = None

    def part(self, start: int, size_bytes: int) -> "Extent":
        """Some of the bytes."""
        content = None if self.content is None else self.content[start : start + size_bytes]
        return Extent(size_bytes, self.file, self.offset_bytes + start, content)


class Layout:
    """Extents in a row."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        self._extents = _joined(extents)
        self._starts = []
        self.size_bytes = 0
        for extent in self._extents:
            self._starts.append(self.size_bytes)
            self.size_bytes += extent.size_bytes

    def pieces(self, start: int, end: int, max_bytes: int) -> Iterator[list[Extent]]:
        """Cut the bytes ``start`` to ``end`` (not included) into pieces of ``max_bytes``."""
        piece: list[Extent] = []
        room = max_bytes
        for extent in self._between(start, end):
            at = 0
            while at < extent.size_bytes:
                taken = min(room, extent.size_bytes - at)
                piece.append(extent.part(at, taken))
                at += taken
                room -= taken
                if not room:
                    yield piece
                    piece, room = [], max_bytes
        if piece:
            yield piece

    def files(self, start: int, end: int) -> set[int]:
        """The numbers of the files that bytes ``start`` to ``end`` come from."""
        return {extent.file for extent in self._between(start, end) if extent.file is not None}

    def _between(self, start: int, end: int) -> Iterator[Extent]:
        number = bisect_right(self._starts, start) - 1
        while start < end:
            extent = self._extents[number]
            skip = start - self._starts[number]
            taken = min(extent.size_bytes - skip, end - start)
            yield extent.part(skip, taken)
            start += taken
            number += 1


def slice_layout(job: CopyJob) -> Layout:
    """Lay out a slice as ``linkcpp slice`` writes it."""

    def extents() -> Iterator[Extent]:
        yield Extent(len(job.header), None, 0, job.header)
        at = len(job.header)
        for unit in job.units:
            yield Extent(unit.target_offset_bytes - at, None, 0)
            yield Extent(unit.size_bytes, unit.file, unit.source_offset_bytes)
            at = unit.target_offset_bytes + unit.size_bytes
        yield Extent(job.file_bytes - at, None, 0)

    return Layout(extents())


def backbone_layout(job: CopyJob) -> Layout:
    """Lay out the bytes of a hollow file without its holes."""
    return Layout(Extent(u.size_bytes, u.file, u.source_offset_bytes) for u in job.units)


def _joined(extents: Iterable[Extent]) -> list[Extent]:
    joined: list[Extent] = []
    for extent in extents:
        if not extent.size_bytes:
            continue
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.file is not None
            and last.file == extent.file
            and last.offset_bytes + last.size_bytes == extent.offset_bytes
        ):
            joined[-1] = last._replace(size_bytes=last.size_bytes + extent.size_bytes)
        else:
            joined.append(extent)
    return joined
