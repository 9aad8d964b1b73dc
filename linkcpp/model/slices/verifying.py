"""Checking a slice or backbone against its manifest."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from linkcpp.common.errors import LinkcppError
from linkcpp.common.records import Record
from linkcpp.model.header import read_header
from linkcpp.model.slices.checked import checked_state, is_as_checked, note_checked
from linkcpp.model.slices.hashing import Progress, hash_pieces
from linkcpp.model.slices.layout import read_slice
from linkcpp.model.slices.manifest import FileKind, Manifest, Slab, listed_slabs, read_manifest
from linkcpp.model.slices.unit_threads import THREADS
from linkcpp.model.source import FileSource

_BATCH = 64


class DamagedError(LinkcppError):
    """A file is there, but is not what its manifest describes."""


class Verification(Record):
    """What a check found. ``problems`` are sentences, ``damaged`` names what has other bytes."""

    path: Path
    kind: FileKind
    slab_count: int
    checked_bytes: int
    damaged: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        """Whether everything is as it was written."""
        return not self.damaged and not self.problems

    @property
    def summary(self) -> str:
        """What is wrong, in a clause."""
        if not self.damaged:
            return "; ".join(self.problems).rstrip(".")
        others = f" and {len(self.damaged) - 1} more" if len(self.damaged) > 1 else ""
        return f"{self.damaged[0]}{others} changed since the file was written"


def checked_manifest(path: Path, on_progress: Progress) -> Manifest:
    """Return the manifest of a slice or backbone that is to be used, and is as it tells.

    The file is read only where it or its manifest changed since it was last seen to be sound.

    Raises:
        DamagedError: its bytes are others.
        LinkcppError: the file or its manifest cannot be read.
    """
    if not is_as_checked(path):
        state = checked_state(path)
        found = verify_file(path, on_progress)
        if found.is_sound and state is not None and checked_state(path) == state:
            note_checked(path, state)
        if not found.is_sound:
            raise DamagedError(
                f"{path} is damaged: {found.summary}.",
                hint="Copy it again, or slice the model again.",
            )
    return read_manifest(path)


def verify_file(path: Path, on_progress: Progress) -> Verification:
    """Hash a slice or backbone again and compare it with the manifest next to it.

    Raises:
        LinkcppError: the file or its manifest cannot be read.
    """
    manifest = read_manifest(path)
    slabs = list(listed_slabs(manifest))
    damaged: list[str] = []
    checked = 0
    with closing(FileSource(path)) as source, ThreadPoolExecutor(THREADS) as threads:
        problems = list(_disagreements(manifest, source))
        whole = []
        for slab in slabs:
            if 0 <= slab.offset_bytes <= source.size_bytes - slab.size_bytes:
                whole.append(slab)
            else:
                damaged.append(slab.label)

        def check(slab: Slab) -> bool:
            parts = source.stream(slab.offset_bytes, slab.size_bytes)
            found = hash_pieces(parts, [slab.size_bytes], lambda part: on_progress(len(part)))
            return list(found) == [slab.sha256]

        for start in range(0, len(whole), _BATCH):
            batch = whole[start : start + _BATCH]
            for slab, is_same in zip(batch, threads.map(check, batch), strict=True):
                checked += slab.size_bytes
                if not is_same:
                    damaged.append(slab.label)
        if not damaged and not problems:
            # The hashes say that the header is the one written; this says that it means the same.
            problems += _meaning(manifest, source)
    return Verification(
        path=path,
        kind=manifest.kind,
        slab_count=len(slabs),
        checked_bytes=checked,
        damaged=tuple(damaged),
        problems=tuple(problems),
    )


def listed_bytes(path: Path) -> int:
    """How many bytes ``verify_file`` will hash."""
    return sum(slab.size_bytes for slab in listed_slabs(read_manifest(path)))


def _disagreements(manifest: Manifest, source: FileSource) -> Iterator[str]:
    if source.size_bytes != manifest.file_bytes:
        yield f"It has {source.size_bytes} bytes; {manifest.file_bytes} were written."
    for tensor in manifest.tensors:
        count = sum(last - first + 1 for first, last in tensor.experts)
        if count != len(tensor.sha256):
            yield f"Its manifest has {len(tensor.sha256)} hashes, not {count}, for {tensor.name}."


def _meaning(manifest: Manifest, source: FileSource) -> Iterator[str]:
    header = read_header(source)
    if manifest.kind is FileKind.BACKBONE:
        return
    described = read_slice(source.name, header)
    if described is None:
        yield "It is not a slice."
        return
    here = {
        (entry.tensor.name, entry.ranges, entry.offset_bytes, entry.tensor.slab_bytes)
        for entry in described[1]
    }
    listed = {
        (entry.name, entry.experts, entry.offset_bytes, entry.slab_bytes)
        for entry in manifest.tensors
    }
    if here != listed:
        yield "Its header and its manifest do not describe the same slabs."
