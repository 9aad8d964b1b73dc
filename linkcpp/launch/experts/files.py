"""The files that mode ``experts`` needs here: the hollow backbone, and slices on their way out.

They lie in the cache folder, in one folder for each state of a model: a header may be the same
where weights are not, so size and time of the model's files are part of its name.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from linkcpp.common.cache import clean_cache, hold_folder, read_kept, write_kept
from linkcpp.common.errors import LinkcppError
from linkcpp.common.paths import cache_folder
from linkcpp.launch.experts.opened import opened_model
from linkcpp.model.parts import is_url
from linkcpp.model.slices.checked import note_checked, remove_checked
from linkcpp.model.slices.manifest import Manifest, manifest_path
from linkcpp.model.slices.segments import Segment
from linkcpp.model.slices.verifying import DamagedError, checked_manifest
from linkcpp.model.slices.writing import backbone_jobs, backbone_paths
from linkcpp.node.records import SliceId
from linkcpp.node.slice_files import slice_id
from linkcpp.registry.hub_location import HubLocation, parse_hub_location
from linkcpp.registry.model_lookup import is_elsewhere
from linkcpp.worker.slabs import GgufSlabs
from linkcpp.worker.store import min_cache_bytes

Report = Callable[[int], None]
_Result = TypeVar("_Result")

log = logging.getLogger("linkcpp.launch")


class _GivenUpError(Exception):
    """The deployment is being stopped; raised inside copying threads only."""


class Backbone(NamedTuple):
    """A hollow model: its first file, its whole length, and what of it is not holes."""

    path: Path
    file_bytes: int
    copied_bytes: int


class ExpertFiles:
    """The model of a deployment as a source of backbone and slices.

    ``full_model`` is the file on this machine that has all experts, ``url`` the address at which
    the model lies on the web, ``hub_location`` where it is at a hub; each may be missing.
    ``min_fallback_bytes`` of memory are needed to compute experts from ``full_model``.
    """

    def __init__(self, location: str, planned_source: str) -> None:
        self._location = location
        with opened_model(location) as opened:
            files = opened.files
            self.digest = files.digest
            self._is_hollow = opened.is_hollow
            name = hashlib.sha256(json.dumps([self.digest, opened.state]).encode()).hexdigest()[:32]
            self._first_file = files.sources[0].name
            self._own_paths = [Path(source.name) for source in files.sources]
            self._file_bytes = files.file_bytes
            part_count = len(files.sources)
        self.folder = cache_folder() / "experts" / name
        # For as long as this object, and so the deployment, lives: others clean up meanwhile.
        self._held = hold_folder(self.folder)
        self._backbone_paths = backbone_paths(self.folder / "backbone.gguf", part_count)
        self.url = next((text for text in (location, planned_source) if is_url(text)), None)
        places = (parse_hub_location(text) for text in (location, planned_source))
        self.hub_location: HubLocation | None = next(filter(None, places), None)
        is_here = not self._is_hollow and not is_elsewhere(location)
        self.full_model = Path(self._first_file) if is_here else None
        self.min_fallback_bytes = self._min_fallback_bytes()
        self._backbone: Backbone | None = None
        self._promised: dict[SliceId, Manifest | None] = {}
        self._locks: dict[SliceId, asyncio.Lock] = {}

    def _min_fallback_bytes(self) -> int | None:
        if self.full_model is None:
            return None
        slabs = GgufSlabs(self.full_model)
        try:
            return min_cache_bytes(slabs.tensors)
        finally:
            slabs.close()

    @property
    def only_hub_url(self) -> str | None:
        """The hub that has the weights, where this machine has none."""
        at_hub = parse_hub_location(self._location)
        return at_hub.hub_url if at_hub is not None else None

    @property
    def has_experts(self) -> bool:
        """Whether slices can be cut here."""
        return not self._is_hollow

    async def backbone(self, on_progress: Callable[[Backbone, int], None]) -> Backbone:
        """Return the hollow model, made now if there is none yet, or what there is is damaged.

        ``on_progress`` gets it and the bytes that are done.

        Raises:
            LinkcppError: the model cannot be read, or the file not be written; the model is hollow
                itself, and damaged.
        """
        if self._is_hollow:
            await _in_thread(self._check_own)
            return Backbone(Path(self._first_file), self._file_bytes, 0)
        if self._backbone is None or not await _in_thread(self._has_backbone):
            loop = asyncio.get_running_loop()

            def tell(wanted: Backbone, done_bytes: int) -> None:
                loop.call_soon_threadsafe(on_progress, wanted, done_bytes)

            self._backbone = await _in_thread(partial(self._write_backbone, tell))
        return self._backbone

    def _check_own(self, check: Report) -> None:
        for path in self._own_paths:
            # Whoever took the file without its manifest has nothing to hold it to.
            if manifest_path(path).exists():
                checked_manifest(path, check)

    def _write_backbone(
        self, on_progress: Callable[[Backbone, int], None], check: Report
    ) -> Backbone:
        with opened_model(self._location) as opened:
            copied = sum(job.copied_bytes for job in backbone_jobs(opened.files))
            wanted = Backbone(self._backbone_paths[0], opened.files.file_bytes, copied)
            if not self._has_backbone(check):
                clean_cache(self.folder.parent)
                done = _Sum(check)
                opened.write_backbone(
                    self.folder / "backbone.gguf",
                    lambda size: on_progress(wanted, done.add(size)),
                )
                for path in self._backbone_paths:
                    note_checked(path)
            return wanted

    def _has_backbone(self, check: Report) -> bool:
        return all(self._is_sound(path, check) for path in self._backbone_paths)

    def _is_sound(self, path: Path, check: Report) -> bool:
        """Whether a file of the cache can be used; else it is made again in its place."""
        try:
            return checked_manifest(path, check).model.digest == self.digest
        except DamagedError as error:
            log.warning("%s It is made again.", error.message)
        except LinkcppError:
            pass  # there is none, or not all of it
        return False

    async def true_manifest(self, segments: tuple[Segment, ...]) -> Manifest | None:
        """Return the hashes that a slice must have; ``None`` where nobody can tell.

        Raises:
            LinkcppError: the model cannot be read, or its hub not be asked.
        """
        if self.full_model is not None:
            kept = read_kept(self._promise_path(segments))
            if kept is None:
                async with self.slice(segments, lambda _: None):
                    pass
                kept = read_kept(self._promise_path(segments))
            return Manifest.model_validate_json(kept) if kept else None
        name = slice_id(self.digest, segments)
        if self.hub_location is not None and name not in self._promised:
            self._promised[name] = await asyncio.to_thread(self._ask_promised, segments)
        return self._promised.get(name)

    def _ask_promised(self, segments: tuple[Segment, ...]) -> Manifest | None:
        with opened_model(self._location) as opened:
            return opened.promised_manifest(segments)

    @contextlib.asynccontextmanager
    async def slice(self, segments: tuple[Segment, ...], report: Report) -> AsyncIterator[Path]:
        """Cut a slice for as long as the block runs; its hashes stay. One at a time of a kind.

        ``report`` gets the bytes that were just done, from any thread.

        Raises:
            LinkcppError: the model cannot be read, or the slice not be written.
        """
        path = self._slice_path(segments)
        lock = self._locks.setdefault(slice_id(self.digest, segments), asyncio.Lock())
        async with lock:
            await self._see_to(segments, path, report)
            promise = await asyncio.to_thread(manifest_path(path).read_bytes)
            await asyncio.to_thread(write_kept, self._promise_path(segments), promise)
            try:
                yield path
            finally:
                remove_checked(path)

    async def kept_slice(self, segments: tuple[Segment, ...], report: Report) -> Path:
        """Cut a slice for a worker on this machine, which stays; raises as ``slice``."""
        path = self.folder / "own" / f"{slice_id(self.digest, segments)}.gguf"
        await self._see_to(segments, path, report)
        return path

    async def _see_to(self, segments: tuple[Segment, ...], path: Path, report: Report) -> None:
        """Have a slice that is sound: the one that is there, or a new one."""

        def write(check: Report) -> None:
            if self._is_sound(path, check):
                return

            def tell(size_bytes: int) -> None:
                check(size_bytes)
                report(size_bytes)

            with opened_model(self._location) as opened:
                opened.write_slice(segments, path, tell)
                note_checked(path)

        await _in_thread(write)

    def _slice_path(self, segments: tuple[Segment, ...]) -> Path:
        return self.folder / f"{slice_id(self.digest, segments)}.gguf"

    def _promise_path(self, segments: tuple[Segment, ...]) -> Path:
        return self.folder / f"{slice_id(self.digest, segments)}.hashes"


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
