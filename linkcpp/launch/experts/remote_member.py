"""A share of the plan's experts on a node: found, sliced for, started, watched, given back."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from linkcpp.common.errors import LinkcppError
from linkcpp.dispatch.control import NewWorker as NewHolder
from linkcpp.launch.experts.delivery import Delivery
from linkcpp.launch.experts.events import WorkerFound
from linkcpp.launch.experts.member import Member
from linkcpp.launch.experts.records import WorkerPhase
from linkcpp.launch.finding import FoundNode
from linkcpp.launch.watch import RENEW_SECONDS, first_result
from linkcpp.link.endpoint import LinkEndpoint
from linkcpp.link.forward import Forward, Lease
from linkcpp.link.introduced import DialledEnd, new_key
from linkcpp.node.client import NodeClient, NodeError, NodeRefusedError
from linkcpp.node.records import (
    NewWorker,
    ServerState,
    WorkerId,
    WorkerRequest,
    lease_target,
    worker_target,
)

GIVE_BACK_SECONDS = 5.0


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
        async with await Forward.open(link, worker_target(worker_id)) as forward:
            # The program that computes links to the worker itself; over this link it does where
            # there is no way between the two alone.
            end = DialledEnd(
                link_id=worker_id,
                own_key=own_key,
                peer_key=new.link_key,
                direct_urls=link.direct_urls,
                relayed_url=f"http://{forward.endpoint}",
            )
            holder = NewHolder(name=self._holder_name(), token=new.token, link=end)
            async with self._joined(holder, worker_id, ready.slab_bytes):
                return await self._watch(node, worker_id)

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


async def _link_ended(link: LinkEndpoint) -> str:
    return (await link.wait_failed()).message


async def _give_back(client: NodeClient, worker_id: WorkerId) -> None:
    """Stop a worker; on a node that does not answer it ends by its lease."""
    with contextlib.suppress(LinkcppError, TimeoutError):
        async with asyncio.timeout(GIVE_BACK_SECONDS):
            await client.delete_worker(worker_id)
