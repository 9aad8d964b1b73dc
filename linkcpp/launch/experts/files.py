"""The files that mode ``experts`` needs here: the hollow backbone, and slices on their way out.

They lie in the cache folder, in one folder for each state of a model: a header may be the same
where weights are not, so size and time of the model's files are part of its name.
"""

import asyncio
import contextlib
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from linkcpp.common.errors import LinkcppError
from linkcpp.common.paths import cache_folder
from linkcpp.model.parts import is_url, open_model
from linkcpp.model.slices.hollow import has_no_experts
from linkcpp.model.slices.manifest import FileKind, Manifest, manifest_path, read_manifest
from linkcpp.model.slices.segments import Segment, merge_segments
from linkcpp.model.slices.writing import (
    backbone_jobs,
    backbone_paths,
    open_whole_model,
    write_backbone,
    write_slice,
)
from linkcpp.node.records import SliceId
from linkcpp.node.slice_files import slice_id
from linkcpp.worker.slabs import GgufSlabs
from linkcpp.worker.store import least_cache_bytes

Report = Callable[[int], None]
_Result = TypeVar("_Result")


class _GivenUpError(Exception):
    """The deployment is being stopped; raised inside copying threads only."""


class Backbone(NamedTuple):
    """A hollow model: its first file, its whole length, and what of it are no holes."""

    path: Path
    file_bytes: int
    copied_bytes: int


class ExpertFiles:
    """The model of a deployment as a source of backbone and slices.

    ``full_model`` is the file on this machine that has all experts, ``url`` the address at which
    the model lies on the web; either may be missing, and with a hollow file both are.
    ``least_fallback_bytes`` of memory are needed to compute experts from ``full_model``.
    """

    def __init__(self, location: str, planned_source: str) -> None:
        self._location = location
        with open_whole_model(location) as files:
            is_hollow = not is_url(location) and has_no_experts(files)
            self.digest = files.digest
            self._is_hollow = is_hollow
            facts = [(source.name, source.size_bytes, source.version) for source in files.sources]
            name = hashlib.sha256(json.dumps([self.digest, facts]).encode()).hexdigest()[:32]
            self._first_file = files.sources[0].name
            self._file_bytes = files.file_bytes
        self.folder = cache_folder() / "experts" / name
        self.url = next((text for text in (location, planned_source) if is_url(text)), None)
        self.full_model = None if is_hollow or is_url(location) else Path(self._first_file)
        self.least_fallback_bytes = self._least_fallback_bytes()
        self._locks: dict[SliceId, asyncio.Lock] = {}

    def _least_fallback_bytes(self) -> int | None:
        if self.full_model is None:
            return None
        slabs = GgufSlabs(self.full_model)
        try:
            return least_cache_bytes(slabs.tensors)
        finally:
            slabs.close()

    @property
    def has_experts(self) -> bool:
        """Whether slices can be cut here."""
        return not self._is_hollow

    async def backbone(self, on_progress: Callable[[Backbone, int], None]) -> Backbone:
        """Return the hollow model, made now if there is none yet.

        ``on_progress`` gets it and the bytes that are done.

        Raises:
            LinkcppError: the model cannot be read, or the file not be written.
        """
        if self._is_hollow:
            return Backbone(Path(self._first_file), self._file_bytes, 0)
        loop = asyncio.get_running_loop()

        def write(report: Report) -> Backbone:
            with open_whole_model(self._location) as files:
                copied = sum(job.copied_bytes for job in backbone_jobs(files))
                paths = backbone_paths(self.folder / "backbone.gguf", len(files.sources))
                wanted = Backbone(paths[0], files.file_bytes, copied)
                if self._is_there(paths):
                    return wanted
                done = _Sum(report)

                def tell(size_bytes: int) -> None:
                    loop.call_soon_threadsafe(on_progress, wanted, done.add(size_bytes))

                write_backbone(files, paths[0].with_name("backbone.gguf"), tell)
                return wanted

        return await _in_thread(write)

    def _is_there(self, paths: list[Path]) -> bool:
        try:
            manifests = [read_manifest(path) for path in paths]
            sizes = [path.stat().st_size for path in paths]
        except (LinkcppError, OSError):
            return False
        return all(
            manifest.kind is FileKind.BACKBONE
            and manifest.model.digest == self.digest
            and manifest.file_bytes == size
            for manifest, size in zip(manifests, sizes, strict=True)
        )

    def known_manifest(self, segments: tuple[Segment, ...]) -> Manifest | None:
        """Return the manifest of a slice that was cut here before."""
        try:
            return read_manifest(self._slice_path(segments))
        except LinkcppError:
            return None

    @contextlib.asynccontextmanager
    async def slice(self, segments: tuple[Segment, ...], report: Report) -> AsyncIterator[Path]:
        """Cut a slice for as long as the block runs; its manifest stays. One at a time of a kind.

        ``report`` gets the bytes that were just done, from any thread.

        Raises:
            LinkcppError: the model cannot be read, or the slice not be written.
        """
        path = self._slice_path(segments)
        lock = self._locks.setdefault(slice_id(self.digest, segments), asyncio.Lock())
        async with lock:
            if not path.exists():
                await self._cut(segments, path, report)
            try:
                yield path
            finally:
                path.unlink(missing_ok=True)

    async def kept_slice(self, segments: tuple[Segment, ...], report: Report) -> Path:
        """Cut a slice for a worker on this machine, which stays; raises as ``slice``."""
        path = self.folder / "own" / f"{slice_id(self.digest, segments)}.gguf"
        if not (path.exists() and manifest_path(path).exists()):
            await self._cut(segments, path, report)
        return path

    async def _cut(self, segments: tuple[Segment, ...], path: Path, report: Report) -> None:
        def write(check: Report) -> None:
            def tell(size_bytes: int) -> None:
                check(size_bytes)
                report(size_bytes)

            with open_whole_model(self._location) as files:
                write_slice(files, merge_segments(segments), path, tell)

        await _in_thread(write)

    def _slice_path(self, segments: tuple[Segment, ...]) -> Path:
        return self.folder / f"{slice_id(self.digest, segments)}.gguf"


class _Sum:
    def __init__(self, check: Report) -> None:
        self._check = check
        self._lock = threading.Lock()
        self._total = 0

    def add(self, size_bytes: int) -> int:
        """Count bytes, unless it is time to give up; returns their sum."""
        self._check(size_bytes)
        with self._lock:
            self._total += size_bytes
            return self._total


async def _in_thread(work: Callable[[Report], _Result]) -> _Result:
    """Run blocking work that calls its argument often; a cancelled caller ends it by that."""
    is_given_up = threading.Event()

    def check(_: int) -> None:
        if is_given_up.is_set():
            raise _GivenUpError

    running = asyncio.ensure_future(asyncio.to_thread(work, check))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        is_given_up.set()
        with contextlib.suppress(_GivenUpError, LinkcppError):
            await running
        raise


def is_whole_model(location: str) -> bool:
    """Whether a file on this machine has all its experts."""
    with open_model(location) as files:
        return not has_no_experts(files)
