"""The OpenAPI description: FastAPI's own, and what it cannot know."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from linkcpp.hub.roles import OPEN_PATHS, allowed_roles

_SCHEMAS = "#/components/schemas/"
_BODIES = "x-linkcpp-schemas"


def body_of(record: type[BaseModel]) -> dict[str, Any]:
    """Describe the body of a route that reads it itself (``openapi_extra``)."""
    schema = record.model_json_schema(ref_template=_SCHEMAS + "{model}")
    definitions = schema.pop("$defs", {})
    reference = {"$ref": _SCHEMAS + record.__name__}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}},
        _BODIES: {**definitions, record.__name__: schema},
    }


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
            components["schemas"].update(operation.pop(_BODIES, {}))
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
