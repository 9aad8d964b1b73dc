"""The slices that a node holds: fetched by itself or sent to it, within its owner's limit."""

import asyncio
import contextlib
import logging
import re
import shutil
from collections.abc import AsyncIterator, Coroutine, Iterable
from pathlib import Path
from typing import Any

from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import write_atomically
from linkcpp.common.text import printable
from linkcpp.model.slices.checked import is_as_checked, remove_checked
from linkcpp.model.slices.manifest import Manifest, manifest_path, read_manifest
from linkcpp.model.slices.verifying import checked_manifest
from linkcpp.node.limits import RefusedError
from linkcpp.node.records import SliceId, SliceRecord, SliceRequest, SliceState
from linkcpp.node.slice_fetch import Fetch, HubTokens, TooLargeError
from linkcpp.node.slice_files import file_pieces, manifest_segments, slice_id
from linkcpp.node.slice_quota import SliceQuota
from linkcpp.node.slice_receiver import Receiver
from linkcpp.node.stored_slice import (
    FILE_NAME,
    REQUEST_NAME,
    StoredSlice,
    allocated_bytes,
    begin_files,
    find_slice,
    finish_files,
)

_MAX_SLICES = 1024
_ID = re.compile(r"[0-9a-f]{32}")
_THERE_OR_FETCHED = (
    SliceState.READY,
    SliceState.CHECKING,
    SliceState.QUEUED,
    SliceState.FETCHING,
)

_log = logging.getLogger(__name__)


class SliceStore:
    """All slices of a node. Nothing is trusted before its hash was seen to be right.

    A slice whose file was changed since is read again before it is used; one that is gone or
    damaged counts as failed, so that whoever needs it has it fetched or sends it again.
    ``limit_bytes`` is what the owner gives to slices, ``None`` all that the disk has but a reserve.
    What was unfinished when an agent ended goes on: a fetch by itself, an upload when it is asked
    for. ``hub`` is set where this node joined one.
    """

    hub: HubTokens | None = None

    def __init__(self, folder: Path, *, limit_bytes: int | None, log_folder: Path) -> None:
        self._folder = folder
        self._log_folder = log_folder
        self._slices: dict[SliceId, StoredSlice] = {}
        self._quota = SliceQuota(folder, limit_bytes, self._slices)
        self._fetching = asyncio.Lock()
        self._tasks: dict[SliceId, asyncio.Task[None]] = {}
        self._is_closing = False

    def load(self) -> None:
        """Find what earlier agents left; needs a running event loop."""
        if not self._folder.is_dir():
            return
        for folder in sorted(self._folder.iterdir()):
            if _ID.fullmatch(folder.name) and folder.is_dir():
                item = self._looked_at(find_slice(folder))
                self._slices[item.slice_id] = item
                if item.state is SliceState.QUEUED:
                    self._start_fetch(item)

    def records(self) -> tuple[SliceRecord, ...]:
        """List the slices."""
        return tuple(self._looked_at(item).record() for item in self._slices.values())

    def offered_bytes(self) -> int:
        """How large one more slice may be; unused ones give way to it."""
        return self._quota.offered_bytes()

    def room_bytes(self) -> int:
        """How much of the disk the slices of a deployment may take; those nobody uses give way."""
        return self._quota.room_bytes()

    async def show(self, name: SliceId) -> SliceRecord:
        """Tell how one slice stands; ``received_bytes`` is where an upload goes on.

        Raises:
            RefusedError: it is unknown.
        """
        item = self.get(name)
        if item.state is SliceState.RECEIVING and not item.lock.locked():
            async with item.lock:
                await item.prepare()
        return item.record()

    def get(self, name: SliceId) -> StoredSlice:
        """Find a slice.

        Raises:
            RefusedError: it is unknown.
        """
        item = self._slices.get(name)
        if item is None:
            raise RefusedError(
                404,
                "unknown_slice",
                "This node has no such slice.",
                hint="Have it fetched (POST /v1/slices), or send it.",
            )
        return self._looked_at(item)

    async def manifest(self, name: SliceId) -> bytes:
        """Return the manifest of a slice that is whole, as JSON.

        Raises:
            RefusedError: it is unknown or not ready.
        """
        (item,) = self.ready((name,))
        return await asyncio.to_thread(manifest_path(item.path).read_bytes)

    def ready(self, names: Iterable[SliceId]) -> list[StoredSlice]:
        """Find slices that are whole.

        Raises:
            RefusedError: one is unknown or not ready.
        """
        found = [self.get(name) for name in names]
        for item in found:
            if item.state is not SliceState.READY:
                why = f": {item.detail}" if item.detail else ""
                raise RefusedError(
                    409,
                    "slice_not_ready",
                    f"The slice {item.slice_id} is {item.state}{why}.",
                    hint="Wait until it is ready, or send it again.",
                )
            item.touch()
        return found

    async def fetch(self, request: SliceRequest, peer: str) -> SliceRecord:
        """Have a slice fetched; also fine when it is there or on its way.

        Raises:
            RefusedError: there is no room, or it is being sent right now.
        """
        name = slice_id(request.model_digest, request.segments)
        item = self._known(name)
        if item is not None and item.state in _THERE_OR_FETCHED:
            item.touch()
            return item.record()
        async with self._changing(name, 1) as item:
            _log.info("%s has a slice fetched (%s)", peer, name)
            item.take_request(request)
            item.manifest = item.receiver = item.file_bytes = None
            item.received_bytes = allocated_bytes(item.target.partial)
            body = request.model_dump_json()
            await asyncio.to_thread(write_atomically, item.folder / REQUEST_NAME, body, mode=0o600)
            self._start_fetch(item)
        return item.record()

    async def begin_upload(self, name: SliceId, manifest: Manifest, peer: str) -> SliceRecord:
        """Take the manifest of a slice that is going to be sent.

        Raises:
            RefusedError: it is of another slice, there is no room, or the slice is on its way.
        """
        # Thousands of slabs: not in the event loop.
        pieces = await asyncio.to_thread(file_pieces, manifest)
        if slice_id(manifest.model.digest, manifest_segments(manifest)) != name:
            raise RefusedError(422, "another_slice", "This manifest is of another slice.")
        known = self._known(name)
        if known is not None and known.state is SliceState.READY:
            known.touch()
            return known.record()
        manifest = manifest.model_copy(update={"file_name": FILE_NAME})
        is_same = known is not None and known.manifest == manifest
        async with self._changing(name, 0 if is_same else manifest.file_bytes) as item:
            if item.manifest != manifest:
                _log.info("%s sends a slice (%s)", peer, name)
                await asyncio.to_thread(begin_files, item, manifest)
                item.take_manifest(manifest)
                item.request = None
                item.receiver = await asyncio.to_thread(Receiver, item.target.partial, pieces)
            item.state, item.detail = SliceState.RECEIVING, None
            await item.prepare()
        return item.record()

    async def upload(self, name: SliceId, offset: int, parts: AsyncIterator[bytes]) -> SliceRecord:
        """Take bytes of a slice from ``offset`` on; with the last ones it becomes ready.

        Raises:
            RefusedError: no manifest came before, the offset is not ``received_bytes``, or the
                bytes are not those of the manifest.
        """
        item = self.get(name)
        if item.state is SliceState.READY:
            return item.record()
        if item.state is not SliceState.RECEIVING:
            raise RefusedError(
                409,
                "no_manifest",
                f"The slice {name} is {item.state}.",
                hint="Put its manifest first.",
            )
        if item.lock.locked():
            raise _busy()
        async with item.lock:
            receiver = await item.prepare()
            if offset != receiver.received_bytes:
                raise RefusedError(
                    409,
                    "wrong_offset",
                    f"Byte {receiver.received_bytes} of the slice is next, not byte {offset}.",
                    hint="GET /v1/slices/{id} tells where to go on.",
                )
            try:
                await item.receive(receiver, parts)
            finally:
                item.received_bytes = receiver.received_bytes
            if receiver.is_whole:
                await self._finish_upload(item, receiver)
        return item.record()

    async def delete(self, name: SliceId) -> None:
        """Delete a slice, whatever its state; fine when it is gone.

        Raises:
            RefusedError: a worker uses it, or it is being sent right now.
        """
        item = self._slices.get(name)
        if item is None:
            return
        if item.user_count:
            raise RefusedError(
                409,
                "slice_in_use",
                "A worker of this node uses the slice.",
                hint="Stop the deployment first.",
            )
        if item.lock.locked():
            raise _busy()
        async with item.lock:
            item.state, item.detail = SliceState.FAILED, "it is being deleted"
            task = self._tasks.get(name)
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await asyncio.to_thread(shutil.rmtree, item.folder, ignore_errors=True)
            del self._slices[name]

    async def aclose(self) -> None:
        """End fetches and checks; they go on with the next agent."""
        self._is_closing = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _known(self, name: SliceId) -> StoredSlice | None:
        item = self._slices.get(name)
        return self._looked_at(item) if item is not None else None

    def _looked_at(self, item: StoredSlice) -> StoredSlice:
        """See whether a slice is what it was when it became ready."""
        if item.state is SliceState.READY and not is_as_checked(item.path):
            if item.path.exists():
                item.state = SliceState.CHECKING
                self._begin(item, self._check(item))
            else:
                _log.warning("the slice %s is gone from the disk", item.slice_id)
                item.lose("its file is gone from the disk")
        return item

    async def _check(self, item: StoredSlice) -> None:
        def go_on(_: int) -> None:
            if self._is_closing or item.state is not SliceState.CHECKING:
                raise LinkcppError("The check was given up.")

        try:
            manifest = await asyncio.to_thread(checked_manifest, item.path, go_on)
        except LinkcppError as error:
            if item.state is SliceState.CHECKING:
                _log.warning("a slice cannot be used: %s", error.message)
                await asyncio.to_thread(remove_checked, item.path)
                item.lose(printable(error.message, 500))
            return
        item.take_manifest(manifest)
        item.become_ready()

    @contextlib.asynccontextmanager
    async def _changing(self, name: SliceId, size_bytes: int) -> AsyncIterator[StoredSlice]:
        """Lock a slice, known or new, that is to become ``size_bytes`` large."""
        known = self._unchanging(name)
        there = max(known.file_bytes or 0, known.received_bytes) if known else 0
        await self._make_room(size_bytes - there, name)
        known = self._unchanging(name)
        if self._is_closing:
            raise RefusedError(409, "stopping", "This node agent is being stopped.")
        if known is None and len(self._slices) >= _MAX_SLICES:
            raise RefusedError(
                409, "too_many_slices", f"This node has {_MAX_SLICES} slices.", hint="Delete some."
            )
        item = known or StoredSlice(name, self._folder / name)
        self._slices[name] = item
        try:
            async with item.lock:
                yield item
        except BaseException:
            if known is None:
                del self._slices[name]
            raise

    def _unchanging(self, name: SliceId) -> StoredSlice | None:
        known = self._slices.get(name)
        if known is not None and (known.lock.locked() or name in self._tasks):
            raise _busy()
        return known

    async def _make_room(self, size_bytes: int, kept: SliceId) -> None:
        """Remove unused slices until so much more fits.

        Raises:
            RefusedError: it would not fit without all of them.
        """
        self._quota.check(size_bytes, kept)
        while (item := self._quota.first_to_go(size_bytes, kept)) is not None:
            _log.info("the slice %s was not used for long and makes room", item.slice_id)
            await self.delete(item.slice_id)

    def _start_fetch(self, item: StoredSlice) -> None:
        item.state, item.detail = SliceState.QUEUED, None
        self._begin(item, self._fetch(item))

    def _begin(self, item: StoredSlice, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks[item.slice_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(item.slice_id))

    async def _fetch(self, item: StoredSlice) -> None:
        # One after the other: each may take what the one before it has left.
        async with self._fetching:
            if item.request is None:
                raise RuntimeError("nothing tells what to fetch")
            item.state = SliceState.FETCHING
            try:
                try:
                    await self._run_fetch(item, item.request)
                except TooLargeError as error:
                    await self._make_room(error.file_bytes - item.received_bytes, item.slice_id)
                    await self._run_fetch(item, item.request)
                item.take_manifest(await asyncio.to_thread(read_manifest, item.path))
            except LinkcppError as error:
                item.state, item.detail = SliceState.FAILED, printable(str(error), 500)
                _log.warning("the slice %s was not fetched: %s", item.slice_id, error)
                return
            item.become_ready()
            await asyncio.to_thread((item.folder / REQUEST_NAME).unlink, missing_ok=True)

    async def _run_fetch(self, item: StoredSlice, request: SliceRequest) -> None:
        log_path = self._log_folder / f"{item.slice_id}.log"
        fetch = Fetch(request, item.path, log_path, self.hub)
        before = item.transferred_bytes
        async for news in fetch.run(self._quota.free_bytes() + item.received_bytes):
            item.file_bytes = news.file_bytes or item.file_bytes
            item.received_bytes = news.received_bytes or item.received_bytes
            item.transferred_bytes = before + news.transferred_bytes

    async def _finish_upload(self, item: StoredSlice, receiver: Receiver) -> None:
        try:
            await asyncio.to_thread(finish_files, item, receiver)
        except LinkcppError as error:
            item.lose(error.message)
            await asyncio.to_thread(item.target.partial.unlink, missing_ok=True)
            raise RefusedError(422, "not_that_slice", error.message, hint=error.hint) from error
        item.become_ready()


def _busy() -> RefusedError:
    return RefusedError(
        409,
        "slice_busy",
        "Somebody else sends or fetches this slice right now.",
        hint="Try again in a moment.",
    )
