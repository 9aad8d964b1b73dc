"""The hub's HTTP API: ``linkcpp.registry.records`` lists its calls."""

from typing import Annotated, Any

from fastapi import FastAPI, Request, WebSocket
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.types import ASGIApp

from linkcpp.common.access import RateLimit
from linkcpp.common.api_errors import new_api
from linkcpp.common.metrics import METRICS_PATH
from linkcpp.common.records import ErrorBody
from linkcpp.hub.access import Access, TokenCheck
from linkcpp.hub.errors import ApiError
from linkcpp.hub.heartbeats import HEARTBEAT_PATH, HEARTBEAT_ROLES, HeartbeatEndpoint
from linkcpp.hub.roles import (
    OPEN_PATHS,
    OPENAPI_PATH,
    Caller,
    allow,
    allowed_roles,
    check_routes,
)
from linkcpp.hub.routes import add_edge_routes, add_machine_routes, add_token_routes
from linkcpp.hub.service import Hub
from linkcpp.hub.weights.routes import add_weight_routes
from linkcpp.registry.records import Heartbeat, HeartbeatAnswer, Role
from linkcpp.registry.relay import RelayCloseCode

_SCHEMAS = "#/components/schemas/"
_DEFECT = ErrorBody(
    code="defect",
    message="Internal error in the hub.",
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
    app.openapi = lambda: _describe(app)  # type: ignore[method-assign]
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


def _describe(app: FastAPI) -> dict[str, Any]:
    """Write the description once: with the tokens, the roles, and the WebSocket."""
    if app.openapi_schema:
        return app.openapi_schema
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = schema["components"]
    components["securitySchemes"] = {
        "nodeToken": {"type": "http", "scheme": "bearer", "description": "Of POST /v1/tokens"}
    }
    schema["security"] = [{"nodeToken": []}]
    roles = {
        (method.lower(), route.path): allowed_roles(route)  # type: ignore[attr-defined]
        for route in app.routes
        for method in getattr(route, "methods", None) or ()
    }
    for path, item in schema["paths"].items():
        for method, operation in item.items():
            if path in OPEN_PATHS:
                operation["security"] = []
            else:
                operation["x-roles"] = [role.value for role in roles[method, path] or ()]
    schema["paths"]["/v1/events"] = {
        "get": {
            "tags": ["hub"],
            "summary": "WebSocket: what the hub pushes to a machine",
            "x-roles": ["node", "backbone"],
            "responses": {"101": {"description": "Text messages, each a HubEvent"}},
        }
    }
    schema["paths"][HEARTBEAT_PATH] = {"post": _describe_heartbeat(components["schemas"])}
    refused = {
        "description": "Refused, with the reason and the way out",
        "content": {"application/json": {"schema": {"$ref": _SCHEMAS + "ErrorBody"}}},
    }
    for item in schema["paths"].values():
        for operation in item.values():
            operation["responses"].pop("422", None)
            operation["responses"]["4XX"] = refused
    app.openapi_schema = schema
    return schema


def _describe_heartbeat(schemas: dict[str, Any]) -> dict[str, Any]:
    for record in (Heartbeat, HeartbeatAnswer):
        described = record.model_json_schema(ref_template=_SCHEMAS + "{model}")
        schemas.update(described.pop("$defs", {}))
        schemas[record.__name__] = described

    def content(record: type[BaseModel]) -> dict[str, Any]:
        return {"application/json": {"schema": {"$ref": _SCHEMAS + record.__name__}}}

    return {
        "tags": ["machines"],
        "summary": "Tell that this node is alive; durable when answered",
        "operationId": "heartbeat",
        "x-roles": [role.value for role in HEARTBEAT_ROLES],
        "requestBody": {"required": True, "content": content(Heartbeat)},
        "responses": {"200": {"description": "Noted", "content": content(HeartbeatAnswer)}},
    }
