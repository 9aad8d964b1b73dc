"""A share of the plan's experts on a node: found, sliced for, started, watched, given back."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from linkcpp.common.closing import AsyncClosing
from linkcpp.common.errors import LinkcppError
from linkcpp.dispatch.control import NewWorker as NewHolder
from linkcpp.launch.experts.delivery import Delivery
from linkcpp.launch.experts.events import WorkerFound
from linkcpp.launch.experts.member import Member
from linkcpp.launch.experts.records import WorkerPhase
from linkcpp.launch.finding import FoundNode
from linkcpp.launch.watch import RENEW_SECONDS, first_result
from linkcpp.link.choosing import PathKind
from linkcpp.link.endpoint import LinkEndpoint
from linkcpp.link.forward import Forward, Lease
from linkcpp.link.introduced import DialledEnd, new_key
from linkcpp.link.offers import OfferSource
from linkcpp.node.client import NodeClient, NodeError, NodeRefusedError
from linkcpp.node.records import (
    NewWorker,
    ServerState,
    WorkerId,
    WorkerRequest,
    lease_target,
    worker_target,
)
from linkcpp.registry.edges import EdgeOffer
from linkcpp.registry.tickets import EDGE_TICKET_SECONDS

GIVE_BACK_SECONDS = 5.0

_log = logging.getLogger(__name__)


class RemoteMember(Member):
    """A share on a node."""

    _last_worker: WorkerId | None = None

    async def _serve(self) -> str:
        node = await self._around.find(self._share)
        try:
            self._emit(WorkerFound(self._index, node.url, node.rtt_ms, node.client.way()))
            if problem := node.record.engine_problem:
                raise LinkcppError(
                    f"The engine of {node.record.name} cannot be used: {problem.message}",
                    hint=problem.hint,
                )
            self._move(WorkerPhase.SLICING)
            delivery = Delivery(self._index, self._share, node, self._around.files, self._emit)
            slice_id = await delivery.run()
            self._move(WorkerPhase.STARTING)
            own_key, public_key = new_key()
            request = WorkerRequest(
                deployment=self._around.deployment,
                slice_ids=(slice_id,),
                device=self._share.device,
                link_key=public_key,
            )
            async with self._worker(node.client, request) as new:
                return await self._use(node, new, own_key)
        finally:
            await node.client.aclose()

    @asynccontextmanager
    async def _worker(self, client: NodeClient, request: WorkerRequest) -> AsyncIterator[NewWorker]:
        if self._last_worker is not None:
            # It may have outlived a lost link, and takes memory that the next one needs.
            await client.delete_worker(self._last_worker)
        creation = asyncio.create_task(client.create_worker(request))
        try:
            new = await asyncio.shield(creation)
        except asyncio.CancelledError:
            # The node goes on creating it, so its id must be had to give it back.
            with contextlib.suppress(NodeError):
                await _give_back(client, (await creation).worker.worker_id)
            raise
        self._last_worker = new.worker.worker_id
        try:
            yield new
        finally:
            await _give_back(client, new.worker.worker_id)

    async def _use(self, node: FoundNode, new: NewWorker, own_key: str) -> str:
        worker_id, link = new.worker.worker_id, node.client.link
        ready = await node.client.wait_worker(worker_id)
        async with (
            await Forward.open(link, worker_target(worker_id)) as forward,
            _Edge(node.client, worker_id) as edge,
        ):
            # The program that computes links to the worker itself; over this link it does where
            # there is no way between the two alone.
            end = DialledEnd(
                link_id=worker_id,
                own_key=own_key,
                peer_key=new.link_key,
                direct_urls=link.direct_urls,
                offer=await edge.offer(),
                relayed_url=f"http://{forward.endpoint}",
            )
            holder = NewHolder(name=self._holder_name(), token=new.token, link=end)
            async with self._joined(holder, worker_id, ready.slab_bytes):
                renewing = asyncio.create_task(self._renew_edge(edge, holder.name, end))
                try:
                    return await self._watch(node, worker_id)
                finally:
                    renewing.cancel()
                    await asyncio.gather(renewing, return_exceptions=True)

    async def _renew_edge(self, edge: "_Edge", holder: str, end: DialledEnd) -> None:
        """Tell of a fresh offer before the ticket of the last one ends, for ever."""
        while True:
            await asyncio.sleep(EDGE_TICKET_SECONDS / 3)
            if (offer := await edge.offer()) is not None:
                with contextlib.suppress(LinkcppError):
                    end = end.model_copy(update={"offer": offer})
                    await self._around.dispatcher.change_link(holder, end)

    async def _watch(self, node: FoundNode, worker_id: WorkerId) -> str:
        """Keep the lease; returns why the worker, or the link to its node, is gone."""
        link = node.client.link
        lease = Lease.open(link, lease_target(worker_id))
        gone = asyncio.create_task(
            first_result(lease.wait_ended(), self._hang(), _link_ended(link))
        )
        try:
            while not gone.done():
                if (end := await self._renew(node, worker_id)) is not None:
                    return end
                await asyncio.wait({gone}, timeout=RENEW_SECONDS)
            return gone.result()
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            lease.close()

    async def _renew(self, node: FoundNode, worker_id: WorkerId) -> str | None:
        """Renew once; returns why the worker is gone, if it is."""
        asked_at = time.perf_counter()
        try:
            worker = await node.client.renew_worker(worker_id)
        except NodeRefusedError as error:
            return error.message
        except NodeError:
            # The link tells when the node is gone; a call that was not answered tells nothing.
            return None
        if worker.state in (ServerState.FAILED, ServerState.STOPPED):
            return f"its worker ended: {worker.detail or worker.state.value}"
        rtt_ms = (time.perf_counter() - asked_at) * 1000
        way, resident_bytes = node.client.way(), worker.resident_bytes
        self._emit(WorkerFound(self._index, node.url, rtt_ms, way, resident_bytes))
        return None


class _Edge(AsyncClosing):
    """An edge of the hub for a worker's own link, where its node is reached through a relay."""

    def __init__(self, client: NodeClient, worker_id: WorkerId) -> None:
        self._client = client
        self._worker_id = worker_id
        self._source: OfferSource | None = None

    async def offer(self) -> EdgeOffer | None:
        """Return a fresh offer; ``None`` where there is no hub, or a shorter way, or not now."""
        status = self._client.link.status()
        if self._source is None:
            if status.path is not PathKind.RELAY:
                return None
            self._source = self._client.link.another_edge()
        if self._source is None:
            return None
        try:
            offer = await self._source.offer(())
            await self._client.use_edge(self._worker_id, offer.edge_id)
        except LinkcppError as error:
            # The link to the node carries the worker's too.
            _log.info("no edge for a worker's link: %s", error.message)
            return None
        return offer

    async def aclose(self) -> None:
        """Give the edge back."""
        if self._source is not None:
            await self._source.close()


async def _link_ended(link: LinkEndpoint) -> str:
    return (await link.wait_failed()).message


async def _give_back(client: NodeClient, worker_id: WorkerId) -> None:
    """Stop a worker; on a node that does not answer it ends by its lease."""
    with contextlib.suppress(LinkcppError, TimeoutError):
        async with asyncio.timeout(GIVE_BACK_SECONDS):
            await client.delete_worker(worker_id)
