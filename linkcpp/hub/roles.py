"""Which roles a call takes: said where a route is declared, and checked before anything else.

::

    @app.get("/v1/nodes", dependencies=[allow(Role.BACKBONE, Role.ADMIN)])

A route without it is refused when the application is made, so that none is open by mistake.
"""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from fastapi import Depends
from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.requests import HTTPConnection
from starlette.routing import BaseRoute

from linkcpp.hub.errors import ApiError
from linkcpp.registry.records import Role

HEALTH_PATH: Final = "/v1/health"
OPENAPI_PATH: Final = "/v1/openapi.json"
OPEN_PATHS: Final = frozenset((HEALTH_PATH, OPENAPI_PATH, "/v1/join", "/v1/tokens"))


class Caller(NamedTuple):
    """Who calls: a machine in its role, or whoever reads the metrics, which is not a role."""

    node_id: str
    role: Role | None


class Allowed:
    """Refuses callers of other roles."""

    def __init__(self, roles: tuple[Role, ...], *, metrics: bool = False) -> None:
        self.roles = roles
        self._metrics = metrics

    # Asynchronous, though it waits for nothing: FastAPI would start a thread for it otherwise.
    async def __call__(self, connection: HTTPConnection) -> Caller:
        """Return the caller."""
        return self.check(connection.state.caller)

    def check(self, caller: Caller) -> Caller:
        """Return the caller, if it may call.

        Raises:
            ApiError: it may not.
        """
        if caller.role in self.roles or (self._metrics and caller.role is None):
            return caller
        raise ApiError(
            403,
            "other_role",
            f"This call is for {' and '.join(self.roles)}; this machine joined as "
            f"{caller.role or 'reader of metrics'}.",
            hint="`linkcpp hub token create --role …` makes a join token for another role.",
        )


def allow(*roles: Role, metrics: bool = False) -> Any:
    """Return the dependency that lets only these roles in; its value is the ``Caller``."""
    return Depends(Allowed(roles, metrics=metrics))


def allowed_roles(route: BaseRoute) -> tuple[Role, ...] | None:
    """Return the roles that a route takes; ``None`` where it is open."""
    if not isinstance(route, APIRoute | APIWebSocketRoute):
        return None
    for dependency in route.dependant.dependencies:
        if isinstance(dependency.call, Allowed):
            return dependency.call.roles
    return None


def check_routes(routes: Iterable[BaseRoute]) -> None:
    """See that every route says who may call it.

    Raises:
        RuntimeError: one does not: a defect.
    """
    for route in routes:
        path = getattr(route, "path", "")
        if path not in OPEN_PATHS and allowed_roles(route) is None:
            raise RuntimeError(f"the route {path} does not say which roles may call it")
