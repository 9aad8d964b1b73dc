"""Bringing a share's slice to its node, once: it stays there for the next launch."""

import contextlib
from typing import NamedTuple

from linkcpp.common.errors import LinkcppError
from linkcpp.launch.experts.events import SliceSeen
from linkcpp.launch.experts.files import ExpertFiles
from linkcpp.launch.finding import FoundNode
from linkcpp.launch.watch import Emit
from linkcpp.node.client import NodeRefusedError
from linkcpp.node.records import SliceId, SliceRecord, SliceRequest, SliceState
from linkcpp.node.slice_files import slice_id
from linkcpp.planning.records import ExpertShare
from linkcpp.registry.hub_location import parse_hub_node_url
from linkcpp.registry.model_lookup import name_at_hub

_NOT_FETCHED = ("slice_failed", "slice_busy")


class Way(NamedTuple):
    """How a slice comes to a node: it fetches it from an address or its hub, or is sent it."""

    url: str | None = None
    hub_model: str | None = None

    @property
    def is_sent(self) -> bool:
        """Whether this machine sends it."""
        return self.url is None and self.hub_model is None


def ways_to(
    *, is_far: bool, hub_model: str | None, url: str | None, is_here: bool
) -> tuple[Way, ...]:
    """Say what to try, in order. Pure.

    A node behind a hub fetches from there, which spares this machine's uplink; a near one is sent
    what is here. ``is_here`` tells whether this machine has all experts.
    """
    at_hub = [Way(hub_model=hub_model)] if hub_model else []
    on_web = [Way(url=url)] if url else []
    sent = [Way()] if is_here else []
    return (*at_hub, *on_web, *sent) if is_far else (*on_web, *sent, *at_hub)


class Delivery:
    """One share's slice on its way to a node."""

    def __init__(
        self, share: int, wanted: ExpertShare, node: FoundNode, files: ExpertFiles, emit: Emit
    ) -> None:
        self._share = share
        self._segments = wanted.segments
        self._name = wanted.node_name
        self._client = node.client
        self._through = parse_hub_node_url(node.url)
        self._files = files
        self._emit = emit
        self._id = slice_id(files.digest, wanted.segments)

    async def run(self) -> SliceId:
        """See that the node has the slice; returns when it does.

        Raises:
            LinkcppError: it cannot be brought there; ``NodeError`` where the node is to blame.
        """
        if not await self._is_there():
            *others, last = await self._ways()
            for way in others:
                if await self._has_gone(way):
                    return self._id
            await self._go(last)
        return self._id

    async def _is_there(self) -> bool:
        try:
            record = await self._client.slice(self._id)
            if record.state is SliceState.CHECKING:
                await self._client.wait_slice(self._id, self._tell)
        except NodeRefusedError as error:
            if error.code not in ("unknown_slice", "slice_failed"):
                raise
            return False
        self._tell(record)
        if record.state not in (SliceState.CHECKING, SliceState.READY):
            return False
        # The same header does not make the same weights.
        true = await self._files.true_manifest(self._segments)
        if true is None:
            return True
        theirs = await self._client.slice_manifest(self._id)
        if theirs.tensors == true.tensors:
            return True
        await self._client.delete_slice(self._id)
        return False

    async def _ways(self) -> tuple[Way, ...]:
        files = self._files
        found = ways_to(
            is_far=self._through is not None,
            hub_model=await self._hub_model(),
            url=files.url,
            is_here=files.full_model is not None,
        )
        if not found:
            raise LinkcppError(
                f"{self._name} does not have its experts, and the model here is hollow.",
                hint="Name the whole model with --model, or plan from its address on the web.",
            )
        return found

    async def _hub_model(self) -> str | None:
        """Return what the node's hub calls the model, by all that is known here."""
        at_hub = self._files.hub_location
        if self._through is not None:
            hub_url, _ = self._through
            # A hub that does not answer now can still be the only one that has it.
            with contextlib.suppress(LinkcppError):
                if name := await name_at_hub(hub_url, self._files.digest):
                    return name
        return at_hub.name if at_hub is not None and self._files.full_model is None else None

    async def _has_gone(self, way: Way) -> bool:
        try:
            await self._go(way)
        except NodeRefusedError as error:
            if error.code not in _NOT_FETCHED:
                raise
            # What a node cannot fetch from elsewhere may still come another way.
            with contextlib.suppress(NodeRefusedError):
                await self._client.delete_slice(self._id)
            return False
        return True

    async def _go(self, way: Way) -> None:
        if way.is_sent:
            async with self._files.slice(self._segments, lambda _: None) as path:
                await self._client.send_slice(path, self._tell)
            return
        request = SliceRequest(
            url=way.url,
            hub_model=way.hub_model,
            model_digest=self._files.digest,
            segments=self._segments,
        )
        try:
            self._tell(await self._client.fetch_slice(request))
            await self._client.wait_slice(self._id, self._tell)
        except NodeRefusedError as error:
            if error.code != "slice_failed" or way.hub_model is None:
                raise
            raise self._not_from_hub(error) from error

    def _not_from_hub(self, error: NodeRefusedError) -> NodeRefusedError:
        at_hub = self._files.hub_location
        hub_url = at_hub.hub_url if at_hub else "URL"
        return NodeRefusedError(
            f"{self._name} did not get its experts from the hub: {error.message}",
            hint=f"See that it joined the hub that has the model (`linkcpp join {hub_url}` there), "
            "or launch with the whole model: --model FILE.",
            code=error.code,
        )

    def _tell(self, record: SliceRecord) -> None:
        self._emit(
            SliceSeen(
                self._share, record.file_bytes, record.received_bytes, record.transferred_bytes
            )
        )
