"""The hub's HTTP API: ``linkcpp.registry.records`` lists its calls."""

from typing import Annotated, Any

from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp

from linkcpp.common.access import RateLimit
from linkcpp.common.api_errors import new_api
from linkcpp.common.metrics import METRICS_PATH
from linkcpp.common.records import ErrorBody
from linkcpp.hub.access import Access, TokenCheck
from linkcpp.hub.edge_routes import add_edge_routes
from linkcpp.hub.errors import ApiError
from linkcpp.hub.heartbeats import HeartbeatEndpoint
from linkcpp.hub.machine_routes import add_machine_routes
from linkcpp.hub.openapi import describe
from linkcpp.hub.roles import OPENAPI_PATH, Caller, allow, check_routes
from linkcpp.hub.service import Hub
from linkcpp.hub.token_routes import add_token_routes
from linkcpp.hub.weights.routes import add_weight_routes
from linkcpp.registry.records import Role
from linkcpp.registry.relay import RelayCloseCode

_DEFECT = ErrorBody(
    code="defect",
    message="The hub met a defect of its own.",
    hint="Its log has the details.",
)


def create_app(
    hub: Hub, *, failures: RateLimit | None = None, open_calls: RateLimit | None = None
) -> ASGIApp:
    """Build the ASGI application of a hub.

    ``failures`` limits calls without the right token, ``open_calls`` those that need none.
    """
    app = new_api("linkcpp hub", defect=_DEFECT)
    add_machine_routes(app, hub)
    add_edge_routes(app, hub)
    add_token_routes(app, hub)
    add_weight_routes(app, hub.library, hub.downloads)
    _add_own_routes(app, hub)
    _add_errors(app)
    check_routes(app.routes)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    return Access(
        HeartbeatEndpoint(app, hub.registrar),
        TokenCheck(hub.identity, hub.directory, hub.clock),
        hub.metrics,
        failures=failures or RateLimit(),
        open_calls=open_calls or RateLimit(tries=30, seconds_per_try=0.5, max_addresses=65_536),
    )


def _add_own_routes(app: FastAPI, hub: Hub) -> None:
    @app.get(
        METRICS_PATH,
        tags=["hub"],
        summary="Metrics for Prometheus; also with the token in the data folder",
        response_class=Response,
        dependencies=[allow(Role.ADMIN, metrics=True)],
    )
    async def metrics() -> Response:
        return Response(hub.render_metrics(), media_type="text/plain; version=0.0.4")

    @app.get(OPENAPI_PATH, tags=["hub"], summary="The OpenAPI description of this API")
    async def openapi() -> dict[str, Any]:
        return app.openapi()

    @app.websocket("/v1/events")
    async def events(
        websocket: WebSocket,
        caller: Annotated[Caller, allow(Role.NODE, Role.BACKBONE)],
    ) -> None:
        await websocket.accept()
        if hub.directory.is_revoked(caller.node_id):  # just now
            await websocket.close(RelayCloseCode.REVOKED, "this machine was revoked")
            return
        await hub.events.serve(websocket, caller.node_id)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body().model_dump(), error.status, headers=error.headers())
