"""One slice on a node: what is known of it, and its folder on the disk.

The folder has ``slice.gguf`` and its manifest. Until it is whole it has ``request.json`` where the
agent fetches it (then it goes on by itself after a restart), else the manifest and what has come.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

from pydantic import ValidationError

from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import write_atomically
from linkcpp.common.units import format_bytes
from linkcpp.model.header import read_header
from linkcpp.model.slices.checked import note_checked
from linkcpp.model.slices.layout import read_slice
from linkcpp.model.slices.manifest import Manifest, manifest_path, read_manifest
from linkcpp.model.slices.segments import Segment, merge_segments
from linkcpp.model.slices.target import Target, take_name
from linkcpp.model.source import FileSource
from linkcpp.node.records import SliceId, SliceRecord, SliceRequest, SliceState
from linkcpp.node.slice_files import file_pieces, manifest_segments, slab_bytes, slice_id
from linkcpp.node.slice_receiver import Receiver

FILE_NAME = "slice.gguf"
REQUEST_NAME = "request.json"
_BATCH_BYTES = 2**20

_log = logging.getLogger(__name__)


class StoredSlice:
    """One slice: a folder with its file, and meanwhile with what it is made from."""

    def __init__(self, name: SliceId, folder: Path) -> None:
        self.slice_id = name
        self.folder = folder
        self.target = Target(folder / FILE_NAME)
        self.model_digest = ""
        self.segments: tuple[Segment, ...] = ()
        self.state = SliceState.FAILED
        self.detail: str | None = None
        self.request: SliceRequest | None = None
        self.manifest: Manifest | None = None
        self.receiver: Receiver | None = None
        self.file_bytes: int | None = None
        self.received_bytes = 0
        self.transferred_bytes = 0
        self.lock = asyncio.Lock()
        self.user_count = 0

    @property
    def path(self) -> Path:
        """The finished file."""
        return self.target.path

    @property
    def slab_bytes(self) -> int | None:
        """What its experts take in memory, once it is ready."""
        is_ready = self.state is SliceState.READY and self.manifest is not None
        return slab_bytes(self.manifest) if is_ready and self.manifest else None

    @property
    def last_used(self) -> float:
        """When a worker or a deployment last wanted it, in seconds since 1970."""
        try:
            return self.folder.stat().st_mtime
        except OSError:
            return time.time()

    def touch(self) -> None:
        """Note that it is wanted."""
        with contextlib.suppress(OSError):
            os.utime(self.folder)

    def take_manifest(self, manifest: Manifest) -> None:
        """Be the slice that a manifest describes."""
        self.manifest = manifest
        self.model_digest = manifest.model.digest
        self.segments = manifest_segments(manifest)
        self.file_bytes = manifest.file_bytes

    def lose(self, detail: str) -> None:
        """Be a slice of which nothing is there, for this reason."""
        self.state, self.detail = SliceState.FAILED, detail
        self.manifest = self.receiver = self.file_bytes = None
        self.received_bytes = 0

    def take_request(self, request: SliceRequest) -> None:
        """Be the slice that is to be fetched."""
        self.request = request
        self.model_digest = request.model_digest
        self.segments = merge_segments(request.segments)

    async def prepare(self) -> Receiver:
        """Go on where an upload stood: open what has come so far of the slice that is sent."""
        if self.receiver is None:
            if self.manifest is None:
                raise RuntimeError("a slice that is received has a manifest")
            pieces = file_pieces(self.manifest)
            self.receiver = await asyncio.to_thread(Receiver, self.target.partial, pieces)
        self.received_bytes = self.receiver.received_bytes
        return self.receiver

    async def receive(self, receiver: Receiver, parts: AsyncIterator[bytes]) -> None:
        """Have bytes of the slice checked and written, as they come.

        Raises:
            RefusedError: as ``Receiver.take``.
        """
        batch = bytearray()
        async for part in parts:
            self.transferred_bytes += len(part)
            batch += part
            if len(batch) >= _BATCH_BYTES:
                await asyncio.to_thread(receiver.take, batch)
                self.received_bytes = receiver.received_bytes
                batch = bytearray()
        await asyncio.to_thread(receiver.take, batch)

    def become_ready(self) -> None:
        """Be a slice that is whole and checked."""
        self.state, self.detail = SliceState.READY, None
        self.received_bytes = self.file_bytes or 0
        self.receiver = self.request = None
        _log.info("the slice %s is ready (%s)", self.slice_id, format_bytes(self.received_bytes))

    def record(self) -> SliceRecord:
        """Tell how it stands."""
        return SliceRecord(
            slice_id=self.slice_id,
            model_digest=self.model_digest,
            segments=self.segments,
            state=self.state,
            detail=self.detail,
            file_bytes=self.file_bytes,
            received_bytes=self.received_bytes,
            transferred_bytes=self.transferred_bytes,
            slab_bytes=self.slab_bytes,
        )


def find_slice(folder: Path) -> StoredSlice:
    """Read what is in a folder of an earlier agent."""
    item = StoredSlice(SliceId(folder.name), folder)
    request = folder / REQUEST_NAME
    item.received_bytes = allocated_bytes(item.target.partial)
    try:
        if item.path.exists():
            item.take_manifest(read_manifest(item.path))
            if item.path.stat().st_size == item.file_bytes:
                request.unlink(missing_ok=True)
                item.state = SliceState.READY
                item.received_bytes = item.file_bytes
                return item
        if request.exists():
            item.take_request(SliceRequest.model_validate_json(request.read_bytes()))
            item.manifest = item.file_bytes = None
            item.state = SliceState.QUEUED
        else:
            item.take_manifest(read_manifest(item.path))
            item.state = SliceState.RECEIVING
    except (OSError, LinkcppError, ValidationError) as error:
        item.detail = f"what is left of it on the disk is of no use: {error}"
    return item


def allocated_bytes(path: Path) -> int:
    """Return the room that a file takes on the disk; 0 where there is none."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def begin_files(item: StoredSlice, manifest: Manifest) -> None:
    """Prepare the folder for a slice that is going to be sent.

    Raises:
        LinkcppError: it cannot be written.
    """
    item.folder.mkdir(parents=True, exist_ok=True)
    for old in (item.folder / REQUEST_NAME, item.target.journal, item.target.partial):
        old.unlink(missing_ok=True)
    write_atomically(manifest_path(item.path), manifest.model_dump_json() + "\n")


def finish_files(item: StoredSlice, receiver: Receiver) -> None:
    """Make a file the slice, if its header says that it is that.

    Raises:
        LinkcppError: it is another slice, or none.
    """
    receiver.sync()
    with FileSource(item.target.partial) as source:
        header = read_header(source)
        described = read_slice("The file that was sent", header)
    if described is None:
        raise LinkcppError("The file that was sent is not a slice.")
    digest = str(header.metadata.get("linkcpp.slice.source_digest"))
    if slice_id(digest, described[0]) != item.slice_id:
        raise LinkcppError("The file that was sent has other experts than its manifest tells.")
    if item.manifest is not None:
        # Somebody may have emptied the folder meanwhile.
        write_atomically(manifest_path(item.path), item.manifest.model_dump_json() + "\n")
    take_name(item.target)
    note_checked(item.path)
