"""Status and control of a running virtual device, over HTTP on loopback with a bearer token."""

import hmac

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from linkcpp.common.access import let_in
from linkcpp.common.errors import LinkcppError
from linkcpp.common.records import WireRecord
from linkcpp.dispatch.admission import EXPERTS_A_LAYER
from linkcpp.dispatch.checks import AdmissionStatus, RowCheck, admission_status
from linkcpp.dispatch.device import VirtualDevice
from linkcpp.dispatch.holder import Holder
from linkcpp.dispatch.server_holder import ServerAddress
from linkcpp.dispatch.swarm import Swarm
from linkcpp.dispatch.worker_holder import WorkerAddress
from linkcpp.engine.records import EngineLocation
from linkcpp.engine.rpc_server import LOOPBACK
from linkcpp.link.introduced import DialledEnd
from linkcpp.model.slices.segments import Segment
from linkcpp.planning.routing_counts import RoutingCounts

MAX_CHECKED_EXPERTS = 64


class WorkerStatus(WireRecord):
    """One worker. Times are means over all its answers; bytes count both directions' payloads.

    ``loaded_bytes`` of experts were put into an rpc-server that is driven from here.
    ``admission`` sums up the checks of its rows; ``None`` where it was not checked yet. ``way`` is
    which way the link to another machine takes, and why.
    """

    name: str
    state: str
    detail: str
    segments: tuple[Segment, ...]
    pair_count: int
    request_count: int
    sent_bytes: int
    received_bytes: int
    failure_count: int
    loaded_bytes: int = 0
    mean_wait_ms: float
    mean_compute_ms: float
    admission: AdmissionStatus | None = None
    way: str | None = None


class FallbackStatus(WireRecord):
    """The local fallback: ``loaded_count`` experts were read from the model so far."""

    pair_count: int
    loaded_count: int
    failure: str | None


class FailedCall(WireRecord):
    """The experts that nobody could compute in one call, or whose rows are in doubt."""

    layer: int
    experts: tuple[int, ...]
    are_in_doubt: bool = False


class DispatchStatus(WireRecord):
    """What the virtual device did since it started.

    ``missing_expert_count`` units (layer, expert) are with no worker that is up. Rows of
    ``failed_pair_count`` pairs were NaN, since nobody could compute them; ``failures`` are the last
    such calls. ``early_count`` results were told before the backing server had computed them too;
    ``differing_sum_count`` were compared with it and not equal, so that it is waited for since.
    ``spot_check_count`` times the rows of one expert in a step, ``spot_pair_count`` in all, were
    computed by somebody else too; ``spot_skipped_count`` times nobody could or had the time.
    ``difference_count`` times the rows differed, of which ``differences`` tell.
    """

    workers: tuple[WorkerStatus, ...]
    fallback: FallbackStatus | None
    missing_expert_count: int
    graph_count: int
    compiled_count: int
    client_count: int
    dropped_bytes: int
    early_count: int
    differing_sum_count: int
    call_count: int
    pair_count: int
    rerouted_pair_count: int
    failed_pair_count: int
    failed_call_count: int
    failures: tuple[FailedCall, ...]
    late_count: int
    nonsense_count: int
    read_seconds: float
    swarm_seconds: float
    spot_check_rate: float = 0.0
    spot_check_count: int = 0
    spot_pair_count: int = 0
    spot_skipped_count: int = 0
    difference_count: int = 0
    differences: tuple[str, ...] = ()


class NewWorker(WireRecord):
    """A worker to link to from now on: at a port of this machine, or over a link."""

    name: str
    token: str
    host: str = LOOPBACK
    port: int = Field(default=0, ge=0, le=65535)
    link: DialledEnd | None = None

    def address(self) -> WorkerAddress:
        """Say how it is reached."""
        return WorkerAddress(self.name, self.token, self.host, self.port, self.link)


class NewServer(WireRecord):
    """An rpc-server of this machine to give experts to; ``slabs`` is a file or URL with them.

    Its build is the one that the dispatching process was told of.
    """

    name: str
    port: int = Field(ge=1, le=65535)
    slabs: str
    segments: tuple[Segment, ...]

    def address(self, engine: EngineLocation) -> ServerAddress:
        """Say how it is reached."""
        return ServerAddress(self.name, self.port, engine, self.slabs, self.segments)


class CheckRequest(WireRecord):
    """A worker's rows are to be compared, for some of its experts of a layer."""

    layer: int
    expert_count: int = Field(default=EXPERTS_A_LAYER, ge=1, le=MAX_CHECKED_EXPERTS)


def worker_status(holder: Holder) -> WorkerStatus:
    """Describe a worker as it is now."""
    requests = max(holder.request_count, 1)
    return WorkerStatus(
        name=holder.name,
        state=str(holder.state),
        detail=holder.detail,
        segments=holder.welcome.segments if holder.welcome else (),
        pair_count=holder.pair_count,
        request_count=holder.request_count,
        sent_bytes=holder.sent_bytes,
        received_bytes=holder.received_bytes,
        failure_count=holder.failure_count,
        loaded_bytes=holder.loaded_bytes,
        mean_wait_ms=1000 * holder.waited_seconds / requests,
        mean_compute_ms=1000 * holder.worker_seconds / requests,
        admission=admission_status(tuple(holder.checks.values())),
        way=holder.way(),
    )


def dispatch_status(device: VirtualDevice, swarm: Swarm) -> DispatchStatus:
    """Describe everything as it is now."""
    counters, fallback, spot_checks = swarm.counters, swarm.fallback, swarm.spot_checks
    return DispatchStatus(
        workers=tuple(worker_status(holder) for holder in swarm.holders.all()),
        fallback=FallbackStatus(
            pair_count=fallback.pair_count,
            loaded_count=fallback.loaded_count,
            failure=fallback.failure,
        )
        if fallback
        else None,
        missing_expert_count=swarm.missing_experts(),
        graph_count=device.counters.graph_count,
        compiled_count=device.counters.compiled_count,
        client_count=device.client_count,
        dropped_bytes=device.counters.dropped_bytes,
        early_count=device.counters.early_count,
        differing_sum_count=device.counters.differing_sum_count,
        call_count=counters.call_count,
        pair_count=counters.pair_count,
        rerouted_pair_count=counters.rerouted_pair_count,
        failed_pair_count=swarm.failures.pair_count,
        failed_call_count=swarm.failures.call_count,
        failures=tuple(FailedCall(**failed._asdict()) for failed in tuple(swarm.failures.recent)),
        late_count=counters.late_count,
        nonsense_count=counters.nonsense_count,
        read_seconds=device.counters.read_seconds,
        swarm_seconds=device.counters.swarm_seconds,
        spot_check_rate=spot_checks.rate,
        spot_check_count=spot_checks.counters.check_count,
        spot_pair_count=spot_checks.counters.pair_count,
        spot_skipped_count=spot_checks.counters.skipped_count,
        difference_count=spot_checks.counters.difference_count,
        differences=spot_checks.sentences,
    )


def build_control(
    device: VirtualDevice, swarm: Swarm, engine: EngineLocation, token: str
) -> FastAPI:
    """Make the HTTP application: GET /status, POST /workers, POST /servers, DELETE /workers/NAME.

    PUT /workers/NAME/link tells of other ways to a worker. POST /workers/NAME/check compares rows
    of a worker with a reference. GET /routing-counts tells how often each expert was chosen, as
    ``linkcpp plan --hot`` reads it.
    """

    def authorize(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "The token is missing or wrong.")
        let_in(request.scope)

    app = FastAPI(dependencies=[Depends(authorize)], openapi_url=None)

    @app.exception_handler(LinkcppError)
    async def refuse(_: Request, error: LinkcppError) -> JSONResponse:
        return JSONResponse({"message": error.message, "hint": error.hint}, 409)

    @app.get("/status")
    def status() -> DispatchStatus:
        return dispatch_status(device, swarm)

    @app.get("/routing-counts")
    def routing_counts() -> RoutingCounts:
        return swarm.tally.counts()

    @app.post("/workers")
    def add(worker: NewWorker) -> WorkerStatus:
        return worker_status(swarm.holders.add(worker.address()))

    @app.put("/workers/{name}/link")
    def change_link(name: str, link: DialledEnd) -> None:
        swarm.holders.change_link(name, link)

    @app.post("/servers")
    def add_server(server: NewServer) -> WorkerStatus:
        return worker_status(swarm.holders.add(server.address(engine)))

    @app.delete("/workers/{name}")
    def remove(name: str) -> None:
        swarm.holders.remove(name)

    @app.post("/workers/{name}/check")
    def check(name: str, request: CheckRequest) -> RowCheck:
        return swarm.check(name, request.layer, request.expert_count)

    return app
