"""Bringing a share's slice to its node, once: it stays there for the next launch."""

import contextlib

from linkcpp.common.errors import LinkcppError
from linkcpp.launch.experts.events import SliceSeen
from linkcpp.launch.experts.files import ExpertFiles
from linkcpp.launch.watch import Emit
from linkcpp.model.slices.manifest import Manifest
from linkcpp.node.client import NodeClient, NodeRefusedError
from linkcpp.node.records import SliceId, SliceRecord, SliceRequest, SliceState
from linkcpp.node.slice_files import slice_id
from linkcpp.planning.records import ExpertShare


class Delivery:
    """One share's slice on its way to the node behind ``client``."""

    def __init__(
        self, share: int, wanted: ExpertShare, client: NodeClient, files: ExpertFiles, emit: Emit
    ) -> None:
        self._share = share
        self._segments = wanted.segments
        self._name = wanted.node_name
        self._client = client
        self._files = files
        self._emit = emit
        self._id = slice_id(files.digest, wanted.segments)

    async def run(self) -> SliceId:
        """See that the node has the slice; returns when it does.

        Raises:
            LinkcppError: it cannot be brought there; ``NodeError`` where the node is to blame.
        """
        if not await self._is_there():
            if self._files.url is not None:
                await self._have_it_fetched(self._files.url)
            else:
                await self._send()
        return self._id

    async def _is_there(self) -> bool:
        try:
            record = await self._client.slice(self._id)
        except NodeRefusedError as error:
            if error.code != "unknown_slice":
                raise
            return False
        self._tell(record)
        if record.state is not SliceState.READY:
            return False
        if self._files.full_model is None:
            return True
        # The same header does not make the same weights.
        theirs = await self._client.slice_manifest(self._id)
        if theirs.tensors == (await self._own_manifest()).tensors:
            return True
        await self._client.delete_slice(self._id)
        return False

    async def _own_manifest(self) -> Manifest:
        known = self._files.known_manifest(self._segments)
        if known is not None:
            return known
        async with self._files.slice(self._segments, lambda _: None):
            pass
        known = self._files.known_manifest(self._segments)
        assert known is not None  # noqa: S101 - it was just written
        return known

    async def _have_it_fetched(self, url: str) -> None:
        request = SliceRequest(url=url, model_digest=self._files.digest, segments=self._segments)
        try:
            self._tell(await self._client.fetch_slice(request))
            await self._client.wait_slice(self._id, self._tell)
        except NodeRefusedError as error:
            if self._files.full_model is None or error.code not in ("slice_failed", "slice_busy"):
                raise
            # A node without a way to the web still has one to this machine.
            with contextlib.suppress(NodeRefusedError):
                await self._client.delete_slice(self._id)
            await self._send()

    async def _send(self) -> None:
        if not self._files.has_experts:
            raise LinkcppError(
                f"{self._name} does not have its experts, and the model here is hollow.",
                hint="Name the whole model with --model, or plan from its address on the web.",
            )
        async with self._files.slice(self._segments, lambda _: None) as path:
            await self._client.send_slice(path, self._tell)

    def _tell(self, record: SliceRecord) -> None:
        self._emit(
            SliceSeen(
                self._share, record.file_bytes, record.received_bytes, record.transferred_bytes
            )
        )
