"""The client of a node agent's HTTP API, for coordinators and tools."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from linkcpp.cluster.records import LinkSpeed, NodeRecord
from linkcpp.common.errors import LinkcppError
from linkcpp.common.text import printable
from linkcpp.link.status import link_way
from linkcpp.link.transport import TransportLostError
from linkcpp.model.slices.manifest import Manifest, read_manifest
from linkcpp.node.connection import (
    NodeConnection,
    NodeError,
    NodeRefusedError,
    NodeUnreachableError,
    OtherNodeError,
    WrongTokenError,
)
from linkcpp.node.records import (
    EchoAnswer,
    NewWorker,
    ServerId,
    ServerList,
    ServerRecord,
    ServerRequest,
    ServerState,
    SliceId,
    SliceList,
    SliceRecord,
    SliceRequest,
    SliceState,
    WorkerEdge,
    WorkerId,
    WorkerList,
    WorkerRecord,
    WorkerRequest,
)
from linkcpp.node.slice_files import manifest_segments, slice_id

__all__ = [
    "NodeClient",
    "NodeError",
    "NodeRefusedError",
    "NodeUnreachableError",
    "OtherNodeError",
    "WrongTokenError",
]

LINK_SECONDS = 1.5

_POLL_SECONDS = 0.2
_RTT_PINGS = 8
_ECHO_BYTES = (2**18, 2**20, 2**22)
_ECHO_LONG_ENOUGH_SECONDS = 0.05
_PART_BYTES = 16 * 2**20
_BYTES = "application/octet-stream"


class NodeClient(NodeConnection):
    """One node's API, for use as an asynchronous context manager; ``NodeConnection`` has more."""

    def way(self) -> str:
        """Say in words which way the link takes now, and why."""
        return link_way(self.link.status())

    async def node(self) -> NodeRecord:
        """Ask what the node has and offers.

        Raises:
            OtherNodeError: it tells of another machine than the one that has proved itself.
        """
        record = self._node.parse(NodeRecord, await self._call("GET", "/v1/node"))
        self._hold_to(record.node_id)
        return record

    async def create_server(self, request: ServerRequest) -> ServerRecord:
        """Have the node run an rpc-server; returns when it is ready.

        Raises:
            NodeRefusedError: ``insufficient_memory`` (with the numbers), ``unknown_device``,
                ``engine_problem``, ``server_failed``.
        """
        body = request.model_dump_json().encode()
        answer = await self._call("POST", "/v1/servers", body, timeout_seconds=60.0)
        return self._node.parse(ServerRecord, answer)

    async def servers(self) -> tuple[ServerRecord, ...]:
        """List all rpc-servers of the node."""
        return self._node.parse(ServerList, await self._call("GET", "/v1/servers")).servers

    async def server(self, server_id: ServerId) -> ServerRecord:
        """Ask for one rpc-server (``unknown_server`` where it is gone)."""
        return self._node.parse(ServerRecord, await self._call("GET", f"/v1/servers/{server_id}"))

    async def renew(self, server_id: ServerId) -> ServerRecord:
        """Start the server's lease again."""
        answer = await self._call("POST", f"/v1/servers/{server_id}/renew")
        return self._node.parse(ServerRecord, answer)

    async def delete(self, server_id: ServerId) -> None:
        """Stop the server; also fine when it is gone already."""
        await self._call("DELETE", f"/v1/servers/{server_id}", timeout_seconds=30.0)

    async def logs(self, server_id: ServerId, *, tail: int = 200) -> str:
        """Fetch the last lines that the server printed."""
        answer = await self._call("GET", f"/v1/servers/{server_id}/logs?tail={int(tail)}")
        return answer.decode(errors="replace")

    async def measure_link(self, *, deadline_seconds: float = LINK_SECONDS) -> LinkSpeed:
        """Measure the round trip and the throughput to the node.

        The round trip is the best of several, the throughput that of the largest echo that was
        sent: sizes grow until one takes long enough to tell. Measure one node at a time: several
        would divide this machine's own connection between them.
        """
        rtt_ms: float | None = None
        rate: float | None = None
        # A slow or lossy link, or a peer that stalls: what was measured until then counts.
        with contextlib.suppress(NodeError, TransportLostError, TimeoutError):
            async with asyncio.timeout(deadline_seconds):
                rtt_ms = await self.measure_rtt()
                for size in _ECHO_BYTES:
                    start = time.perf_counter()
                    await self.echo(bytes(size))
                    took = time.perf_counter() - start
                    rate = size / max(took - rtt_ms / 1000, 1e-6)
                    if took > _ECHO_LONG_ENOUGH_SECONDS:
                        break
        if rtt_ms is None:
            raise self._node.unreachable(TimeoutError())
        return LinkSpeed(rtt_ms=rtt_ms, bytes_per_second=rate)

    async def measure_rtt(self) -> float:
        """Return the shortest of several round trips, in milliseconds.

        Raises:
            TransportLostError: no path carries the link now.
        """
        return min([await self.link.ping() for _ in range(_RTT_PINGS)])

    async def echo(self, content: bytes) -> int:
        """Send bytes that the node counts and drops; return how many it took."""
        answer = await self._call(
            "POST", "/v1/echo", content, content_type=_BYTES, timeout_seconds=60.0
        )
        return self._node.parse(EchoAnswer, answer).received_bytes

    async def slices(self) -> SliceList:
        """List the slices of the node, and ask how much room it has for more."""
        return self._node.parse(SliceList, await self._call("GET", "/v1/slices"))

    async def slice(self, slice_id: SliceId) -> SliceRecord:
        """Ask for one slice, and how far it is (``unknown_slice`` where there is none)."""
        answer = await self._call("GET", f"/v1/slices/{slice_id}", timeout_seconds=60.0)
        return self._node.parse(SliceRecord, answer)

    async def fetch_slice(self, request: SliceRequest) -> SliceRecord:
        """Have the node fetch a slice by itself; ``slice`` or ``wait_slice`` tells how far it is.

        Raises:
            NodeRefusedError: ``insufficient_storage``, ``slice_busy``.
        """
        body = request.model_dump_json().encode()
        return self._node.parse(SliceRecord, await self._call("POST", "/v1/slices", body))

    async def wait_slice(
        self, slice_id: SliceId, on_progress: Callable[[SliceRecord], None] | None = None
    ) -> SliceRecord:
        """Wait until a slice that the node fetches or checks is ready.

        Raises:
            NodeRefusedError: ``slice_failed``, with the reason; ``unknown_slice``.
        """
        while True:
            record = await self.slice(slice_id)
            if on_progress is not None:
                on_progress(record)
            if record.state is SliceState.READY:
                return record
            if record.state is SliceState.FAILED:
                raise NodeRefusedError(
                    f"{self.url}: The slice is not there: {printable(record.detail or '', 500)}",
                    hint="Ask for it again: it goes on from where it was.",
                    code="slice_failed",
                )
            await asyncio.sleep(_POLL_SECONDS)

    async def send_slice(
        self, path: Path, on_progress: Callable[[SliceRecord], None] | None = None
    ) -> SliceRecord:
        """Send a slice file, its manifest next to it, going on where an earlier attempt ended.

        Raises:
            NodeRefusedError: ``insufficient_storage``, ``wrong_hash``, ``not_that_slice``, ….
            LinkcppError: the file or its manifest cannot be read.
        """
        manifest = await asyncio.to_thread(read_manifest, path)
        name = slice_id(manifest.model.digest, manifest_segments(manifest))
        answer = await self._call(
            "PUT",
            f"/v1/slices/{name}/manifest",
            manifest.model_dump_json().encode(),
            timeout_seconds=120.0,
        )
        record = self._node.parse(SliceRecord, answer)
        while record.state is SliceState.RECEIVING:
            if on_progress is not None:
                on_progress(record)
            offset = record.received_bytes
            part = await asyncio.to_thread(_read_part, path, offset)
            answer = await self._call(
                "PUT",
                f"/v1/slices/{name}?offset={offset}",
                part,
                content_type=_BYTES,
                timeout_seconds=300.0,
            )
            record = self._node.parse(SliceRecord, answer)
        if on_progress is not None:
            on_progress(record)
        return record

    async def slice_manifest(self, slice_id: SliceId) -> Manifest:
        """Fetch the hashes of a slice that is whole, to compare them with one's own."""
        answer = await self._call("GET", f"/v1/slices/{slice_id}/manifest", timeout_seconds=60.0)
        return self._node.parse(Manifest, answer)

    async def delete_slice(self, slice_id: SliceId) -> None:
        """Delete a slice; also fine when it is gone already (``slice_in_use`` by a worker)."""
        await self._call("DELETE", f"/v1/slices/{slice_id}", timeout_seconds=30.0)

    async def create_worker(self, request: WorkerRequest) -> NewWorker:
        """Have the node run an expert worker; ``wait_worker`` returns when it is ready.

        Raises:
            NodeRefusedError: ``unknown_slice``, ``slice_not_ready``, ``several_models``,
                ``too_little_memory``, ``insufficient_memory``, ``unknown_device``,
                ``engine_problem``.
        """
        body = request.model_dump_json().encode()
        answer = await self._call("POST", "/v1/workers", body, timeout_seconds=60.0)
        return self._node.parse(NewWorker, answer)

    async def use_edge(self, worker_id: WorkerId, edge_id: str) -> None:
        """Let a worker's own link take an edge of a hub.

        Raises:
            NodeRefusedError: ``unknown_worker``, ``too_many_edges``.
        """
        body = WorkerEdge(edge_id=edge_id).model_dump_json().encode()
        await self._call("POST", f"/v1/workers/{worker_id}/edge", body)

    async def workers(self) -> tuple[WorkerRecord, ...]:
        """List all expert workers of the node."""
        return self._node.parse(WorkerList, await self._call("GET", "/v1/workers")).workers

    async def worker(self, worker_id: WorkerId) -> WorkerRecord:
        """Ask for one worker (``unknown_worker`` where it is gone)."""
        return self._node.parse(WorkerRecord, await self._call("GET", f"/v1/workers/{worker_id}"))

    async def wait_worker(self, worker_id: WorkerId) -> WorkerRecord:
        """Wait until a worker has loaded its slabs and serves.

        Raises:
            NodeRefusedError: ``worker_failed`` or ``worker_stopped``, with the reason.
        """
        while True:
            record = await self.worker(worker_id)
            if record.state is ServerState.READY:
                return record
            if record.state is not ServerState.STARTING:
                raise NodeRefusedError(
                    f"{self.url}: The expert worker {record.state}: "
                    f"{printable(record.detail or 'no reason given', 500)}",
                    code=f"worker_{record.state}",
                )
            await asyncio.sleep(_POLL_SECONDS)

    async def renew_worker(self, worker_id: WorkerId) -> WorkerRecord:
        """Start the worker's lease again."""
        answer = await self._call("POST", f"/v1/workers/{worker_id}/renew")
        return self._node.parse(WorkerRecord, answer)

    async def delete_worker(self, worker_id: WorkerId) -> None:
        """Stop the worker; also fine when it is gone already."""
        await self._call("DELETE", f"/v1/workers/{worker_id}", timeout_seconds=30.0)

    async def worker_logs(self, worker_id: WorkerId, *, tail: int = 200) -> str:
        """Fetch the last lines that the worker and its rpc-server printed."""
        answer = await self._call("GET", f"/v1/workers/{worker_id}/logs?tail={int(tail)}")
        return answer.decode(errors="replace")


def _read_part(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            part = file.read(_PART_BYTES)
    except OSError as error:
        raise LinkcppError(f"Cannot read {path}: {error.strerror}.") from error
    if not part:
        raise LinkcppError(
            f"{path} is shorter than its manifest tells.", hint="Slice the model again."
        )
    return part
