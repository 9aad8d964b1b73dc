"""Messages of the node agent's HTTP API, version 1.

| call | body | answer |
| --- | --- | --- |
| ``GET /v1/health`` | | ``linkcpp.cluster.records.Health`` (no token) |
| ``GET /v1/node`` | | ``linkcpp.cluster.records.NodeRecord`` |
| ``POST /v1/servers`` | ``ServerRequest`` | 201 ``ServerRecord`` |
| ``GET /v1/servers`` | | ``ServerList`` |
| ``GET /v1/servers/{id}`` | | ``ServerRecord`` |
| ``POST /v1/servers/{id}/renew`` | | ``ServerRecord`` (the lease starts again) |
| ``DELETE /v1/servers/{id}`` | | 204, also when it is already gone |
| ``GET /v1/servers/{id}/logs?tail=N`` | | text |
| ``POST /v1/echo`` | bytes | ``EchoAnswer``, for measuring the link |
| ``GET /v1/openapi.json`` | | the OpenAPI description of all this |
| ``POST /v1/slices`` | ``SliceRequest`` | 202 ``SliceRecord``: the node fetches it by itself |
| ``PUT /v1/slices/{id}/manifest`` | ``linkcpp.model.slices.manifest.Manifest`` | ``SliceRecord`` |
| ``PUT /v1/slices/{id}?offset=N`` | bytes of the file from N on | ``SliceRecord`` |
| ``GET /v1/slices`` | | ``SliceList`` |
| ``GET /v1/slices/{id}`` | | ``SliceRecord`` |
| ``GET /v1/slices/{id}/manifest`` | | the manifest of a slice that is whole |
| ``DELETE /v1/slices/{id}`` | | 204, also when it is already gone |
| ``POST /v1/workers`` | ``WorkerRequest`` | 201 ``NewWorker``, with the worker's token |
| ``POST /v1/workers/{id}/edge`` | ``WorkerEdge`` | 204, also before the hub's offer has come |
| ``GET /v1/workers`` | | ``WorkerList`` |
| ``GET /v1/workers/{id}`` | | ``WorkerRecord`` |
| ``POST /v1/workers/{id}/renew`` | | ``WorkerRecord`` (the lease starts again) |
| ``DELETE /v1/workers/{id}`` | | 204, also when it is already gone |
| ``GET /v1/workers/{id}/logs?tail=N`` | | text |

Authentication: none over a link, ``Authorization: Bearer <cluster token>`` on loopback. Errors:
``ErrorBody`` with a 4xx status.
The agent listens on ``linkcpp.cluster.config.DEFAULT_AGENT_PORT`` unless told otherwise.

Links. Other machines call this API over a link (``linkcpp.link``), whose handshake has proved who
they are; they need no token. With the token it answers only to programs on this machine, so the
token is never on a network. A stream of a link names its target: ``api`` is this API,
``server/ID`` an rpc-server and ``worker/ID`` an expert worker. llama-server opens many short RPC
connections one after the other (about 170 while loading a 30-layer model), a stream for each; those
to one rpc-server wait for each other, since it serves one client. ``docs/wire.md`` has the rules.

Slices. An id follows from the model and the segments (``linkcpp.node.slice_files.slice_id``), so
the same slice has the same id on every node. A node gets a slice in one of two ways. It fetches it:
``POST /v1/slices`` names the model's URL, and the node asks that server for the header and the
wanted slabs only; or it names a model of the hub that the node joined, whose hashes all slabs are
then held to. Or it is sent it: first the manifest, then the file's bytes from
``received_bytes`` on, in as many calls as one likes; every slab is hashed as it comes, and one with
another hash is refused and dropped. Both go on after an interruption, also one of the agent.

Workers. ``POST /v1/workers`` answers at once; the worker is ready when its slabs are in the memory
of its rpc-server. Its streams carry compute frames, the first of which has the worker's own token;
up to eight may be open to one worker.
"""

from enum import StrEnum
from typing import NewType, Self

from pydantic import Field, model_validator

from linkcpp.common.records import Record, WireRecord
from linkcpp.model.slices.segments import Segment
from linkcpp.registry.models import ModelName

ServerId = NewType("ServerId", str)
SliceId = NewType("SliceId", str)
WorkerId = NewType("WorkerId", str)

MAX_SEGMENTS = 512

API_TARGET = "api"
SERVER_TARGET = "server"
WORKER_TARGET = "worker"
LEASE_TARGET = "lease"


def server_target(server_id: ServerId) -> str:
    """Name an rpc-server for a stream."""
    return f"{SERVER_TARGET}/{server_id}"


def lease_target(worker_id: WorkerId) -> str:
    """Name the stream that keeps a worker, and ends with it."""
    return f"{LEASE_TARGET}/{worker_id}"


def worker_target(worker_id: WorkerId) -> str:
    """Name an expert worker for a stream."""
    return f"{WORKER_TARGET}/{worker_id}"


class ServerRequest(Record):
    """Ask a node to run a stock rpc-server for a deployment.

    ``memory_bytes`` is the most that the deployment may allocate on the device: the agent refuses
    the request where that exceeds what it offers, and refuses allocations beyond it afterwards.
    The server ends when ``lease_seconds`` pass without a renewal and without a stream.
    """

    deployment: str = Field(min_length=1, max_length=128)
    device: str = Field(min_length=1, max_length=64)
    memory_bytes: int = Field(gt=0, le=2**50)
    threads: int | None = Field(default=None, ge=1, le=1024)
    lease_seconds: float = Field(default=20.0, gt=0, le=3600, allow_inf_nan=False)


class ServerState(StrEnum):
    """The life of an rpc-server."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


class ServerRecord(WireRecord):
    """An rpc-server as its agent sees it.

    ``allocated_bytes`` is what the current client holds in buffers; ``tensor_bytes`` counts the
    weights written into them, so a coordinator can prove that a node holds what it should.
    ``resident_bytes`` is what its processes have of the main memory.
    """

    server_id: ServerId
    deployment: str
    device: str
    memory_bytes: int
    state: ServerState
    detail: str | None
    allocated_bytes: int
    tensor_bytes: int
    is_used: bool
    resident_bytes: int = 0


class ServerList(WireRecord):
    """All rpc-servers of a node."""

    servers: tuple[ServerRecord, ...]


class SliceRequest(Record):
    """Ask a node to fetch experts of a model on the web, or of the hub that the node joined.

    With ``hub_model`` (what the hub calls it) every slab is held to the hub's hashes, and comes
    from ``url`` first where there is one, else from the hub or from where the hub says that the
    model lies. ``model_digest`` is that of ``ModelInventory``; a model with another one is refused.
    What the address holds of secrets (user, query) is shown to nobody.
    """

    url: str | None = Field(
        default=None, pattern=r"^https?://[^\s\x00-\x1f\x7f]+$", max_length=4096
    )
    hub_model: ModelName | None = None
    model_digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    segments: tuple[Segment, ...] = Field(min_length=1, max_length=MAX_SEGMENTS)

    @model_validator(mode="after")
    def _names_a_place(self) -> Self:
        if self.url is None and self.hub_model is None:
            raise ValueError("names neither an address nor a model of the hub")
        return self


class SliceState(StrEnum):
    """The life of a slice on a node; a failed one goes on when it is asked for again.

    A slice whose file changed on the disk is checked against its hashes before it is ready again.
    """

    QUEUED = "queued"
    FETCHING = "fetching"
    RECEIVING = "receiving"
    CHECKING = "checking"
    READY = "ready"
    FAILED = "failed"


class SliceRecord(WireRecord):
    """A slice as its node sees it.

    ``file_bytes`` is its whole size, ``None`` until the model's header was read.
    ``received_bytes`` of it are there. ``transferred_bytes`` came over the network for it since the
    agent started, headers included. ``slab_bytes`` is what its experts take in memory, once it is
    ready.
    """

    slice_id: SliceId
    model_digest: str
    segments: tuple[Segment, ...]
    state: SliceState
    detail: str | None
    file_bytes: int | None
    received_bytes: int
    transferred_bytes: int
    slab_bytes: int | None


class SliceList(WireRecord):
    """All slices of a node, and the bytes that it has left for further ones."""

    slices: tuple[SliceRecord, ...]
    offered_bytes: int


class WorkerRequest(Record):
    """Ask a node to run an expert worker over slices that it has.

    ``memory_bytes`` is the most that the worker may allocate on the device: the slabs of all its
    slices, and at least ``WORKER_SCRATCH_BYTES`` to work with. ``None`` takes just that. The worker
    ends when ``lease_seconds`` pass without a renewal and without a stream, counted from when it is
    ready. ``link_key`` is the public key (base64url) of the program that will link to it.
    """

    deployment: str = Field(min_length=1, max_length=128)
    slice_ids: tuple[SliceId, ...] = Field(min_length=1, max_length=64)
    device: str = Field(min_length=1, max_length=64)
    memory_bytes: int | None = Field(default=None, gt=0, le=2**50)
    threads: int | None = Field(default=None, ge=1, le=1024)
    lease_seconds: float = Field(default=20.0, gt=0, le=3600, allow_inf_nan=False)
    link_key: str = Field(max_length=64)


WORKER_SCRATCH_BYTES = 64 * 2**20


class WorkerRecord(WireRecord):
    """An expert worker as its agent sees it; ``slab_bytes`` is what its experts take.

    ``resident_bytes`` is what its processes have of the main memory.
    """

    worker_id: WorkerId
    deployment: str
    slice_ids: tuple[SliceId, ...]
    model_digest: str
    segments: tuple[Segment, ...]
    device: str
    memory_bytes: int
    slab_bytes: int
    state: ServerState
    detail: str | None
    stream_count: int
    resident_bytes: int = 0


class NewWorker(WireRecord):
    """A worker that was just asked for. Only this answer ever tells its token.

    Its link has the worker's id; ``link_key`` is its public key (base64url) there.
    """

    worker: WorkerRecord
    token: str
    link_key: str


class WorkerEdge(Record):
    """An edge of a hub for the worker's own link: the worker takes part in it by itself."""

    edge_id: str = Field(pattern=r"^[0-9a-f]{32}$")


class WorkerList(WireRecord):
    """All expert workers of a node."""

    workers: tuple[WorkerRecord, ...]


class EchoAnswer(WireRecord):
    """How many bytes an echo took in."""

    received_bytes: int
