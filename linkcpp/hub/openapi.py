"""The OpenAPI description: FastAPI's own, and what it cannot know."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from linkcpp.hub.heartbeats import HEARTBEAT_PATH, HEARTBEAT_ROLES
from linkcpp.hub.roles import OPEN_PATHS, allowed_roles
from linkcpp.registry.records import Heartbeat, HeartbeatAnswer

_SCHEMAS = "#/components/schemas/"


def describe(app: FastAPI) -> dict[str, Any]:
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
