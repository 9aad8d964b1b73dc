"""The node agent's HTTP API: ``linkcpp.node.records`` lists its calls."""

import asyncio
from typing import Annotated, Any, Protocol

from fastapi import FastAPI, Path, Query, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from linkcpp import __version__
from linkcpp.cluster.identity import Identity
from linkcpp.cluster.records import Health, NodeRecord
from linkcpp.common.access import RateLimit, peer_of
from linkcpp.common.api_errors import new_api
from linkcpp.common.metrics import METRICS_PATH, metrics_response
from linkcpp.common.records import ErrorBody
from linkcpp.common.request_log import RequestLog
from linkcpp.link.acceptor import LinkAcceptor
from linkcpp.node.access import AccessControl, is_routine
from linkcpp.node.limits import RefusedError
from linkcpp.node.metrics import node_metrics
from linkcpp.node.records import (
    EchoAnswer,
    ServerId,
    ServerList,
    ServerRecord,
    ServerRequest,
)
from linkcpp.node.servers import ServerManager
from linkcpp.node.slice_routes import add_slice_routes
from linkcpp.node.slice_store import SliceStore
from linkcpp.node.worker_routes import add_worker_routes
from linkcpp.node.workers import WorkerManager

MAX_ECHO_BYTES = 64 * 2**20
ECHO_DEADLINE_SECONDS = 60.0
MAX_LOG_LINES = 10_000

_DEFECT = ErrorBody(
    code="defect",
    message="Internal error in the node agent.",
    hint="Its log on that machine has the details.",
)
_PATH_ID = Path(pattern=r"^[0-9a-f]{32}$", description="The id that POST /v1/servers answered")
_Id = Annotated[str, _PATH_ID]


class Agent(Protocol):
    """What the API needs of the agent behind it."""

    token: str
    identity: Identity
    servers: ServerManager
    slices: SliceStore
    workers: WorkerManager
    links: LinkAcceptor

    async def describe(self) -> NodeRecord:
        """Tell what this machine has and offers now."""
        ...


def create_app(agent: Agent) -> ASGIApp:
    """Build the ASGI application of an agent."""
    app = new_api("linkcpp node agent", defect=_DEFECT)
    _add_node_routes(app, agent)
    _add_server_routes(app, agent.servers)
    add_slice_routes(app, agent.slices)
    add_worker_routes(app, agent.workers, lambda: agent.links)
    _add_errors(app)
    app.openapi = lambda: _describe(app)  # type: ignore[method-assign]
    app.add_middleware(AccessControl, token=agent.token, failures=RateLimit())
    return RequestLog(app, is_routine)


def _add_node_routes(app: FastAPI, agent: Agent) -> None:
    @app.get("/v1/health", tags=["node"], summary="Proof of life; the only call without a token")
    async def health() -> Health:
        who = agent.identity
        return Health(agent_version=__version__, node_id=who.node_id, name=who.name)

    @app.get("/v1/node", tags=["node"], summary="What this machine has and offers")
    async def node() -> NodeRecord:
        return await agent.describe()

    @app.post(
        "/v1/echo",
        tags=["node"],
        summary="Take bytes and count them, for measuring the link",
        openapi_extra={"requestBody": {"content": {"application/octet-stream": {}}}},
    )
    async def echo(request: Request) -> EchoAnswer:
        received = 0
        try:
            async with asyncio.timeout(ECHO_DEADLINE_SECONDS):
                async for piece in request.stream():
                    received += len(piece)
                    if received > MAX_ECHO_BYTES:
                        raise RefusedError(
                            413, "too_large", f"An echo takes at most {MAX_ECHO_BYTES} bytes."
                        )
        except TimeoutError:
            raise RefusedError(
                408, "too_slow", f"An echo ends after {ECHO_DEADLINE_SECONDS:g} seconds."
            ) from None
        return EchoAnswer(received_bytes=received)

    @app.get(
        METRICS_PATH,
        tags=["node"],
        summary="Prometheus metrics; on this machine no token is needed",
        response_class=PlainTextResponse,
    )
    async def metrics() -> Response:
        return metrics_response(
            node_metrics(
                await agent.describe(),
                agent.servers.records(),
                agent.workers.records(),
                agent.slices.records(),
                agent.links.status(),
            )
        )

    @app.get("/v1/openapi.json", tags=["node"], summary="The OpenAPI description of this API")
    async def openapi() -> dict[str, Any]:
        return app.openapi()


def _add_server_routes(app: FastAPI, servers: ServerManager) -> None:
    @app.post("/v1/servers", status_code=201, tags=["servers"], summary="Run an rpc-server")
    async def create(request: ServerRequest, call: Request) -> ServerRecord:
        return await servers.create(request, peer_of(call))

    @app.get("/v1/servers", tags=["servers"], summary="All rpc-servers of this node")
    async def list_all() -> ServerList:
        return ServerList(servers=servers.records())

    @app.get("/v1/servers/{server_id}", tags=["servers"], summary="One rpc-server")
    async def show(server_id: _Id) -> ServerRecord:
        return servers.get(ServerId(server_id)).record()

    @app.post("/v1/servers/{server_id}/renew", tags=["servers"], summary="Start its lease again")
    async def renew(server_id: _Id) -> ServerRecord:
        return servers.renew(ServerId(server_id))

    @app.delete(
        "/v1/servers/{server_id}",
        status_code=204,
        tags=["servers"],
        summary="Stop it; also fine when it is gone",
    )
    async def delete(server_id: _Id, call: Request) -> Response:
        await servers.delete(ServerId(server_id), peer_of(call))
        return Response(status_code=204)

    @app.get(
        "/v1/servers/{server_id}/logs",
        response_class=PlainTextResponse,
        tags=["servers"],
        summary="The last lines that it printed",
    )
    async def logs(
        server_id: _Id, tail: Annotated[int, Query(ge=1, le=MAX_LOG_LINES)] = 200
    ) -> str:
        return await asyncio.to_thread(servers.logs, ServerId(server_id), tail)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RefusedError)
    async def on_refusal(_: Request, error: RefusedError) -> JSONResponse:
        return JSONResponse(error.body().model_dump(), error.status)


def _describe(app: FastAPI) -> dict[str, Any]:
    """Write the OpenAPI description, with the token, which FastAPI leaves out."""
    if app.openapi_schema:
        return app.openapi_schema
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schema["components"]["securitySchemes"] = {
        "clusterToken": {"type": "http", "scheme": "bearer", "description": "The cluster token"}
    }
    schema["security"] = [{"clusterToken": []}]
    schema["paths"]["/v1/health"]["get"]["security"] = []
    refused = {
        "description": "Refused, with the reason and the way out",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}},
    }
    for item in schema["paths"].values():
        for operation in item.values():
            operation["responses"]["4XX"] = refused
    app.openapi_schema = schema
    return schema
