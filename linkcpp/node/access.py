"""What stands before every route of the agent: the token, and bounds on what a caller may cost."""

import logging
import math
import re

from starlette.types import ASGIApp, Receive, Scope, Send

from linkcpp.cluster.token import tokens_equal
from linkcpp.common.access import RateLimit, let_in, read_body, refuse, replay
from linkcpp.common.callers import is_this_machine
from linkcpp.common.metrics import METRICS_PATH
from linkcpp.common.records import ErrorBody

HEALTH_PATH = "/v1/health"
# Who a request is of that came over a link, in the scope's state: no request can put it there.
LINK_USER = "linkcpp.link_user"
_OPEN = {("http", HEALTH_PATH)}
MAX_BODY_BYTES = 64 * 1024
BODY_DEADLINE_SECONDS = 10.0
MAX_MANIFEST_BYTES = 16 * 2**20
MANIFEST_DEADLINE_SECONDS = 120.0

_STREAMED = re.compile(r"/v1/echo|/v1/slices/[0-9a-f]{32}")
_MANIFEST = re.compile(r"/v1/slices/[0-9a-f]{32}/manifest")


_log = logging.getLogger(__name__)


def _is_own_scrape(scope: Scope) -> bool:
    """Whether a program on this machine asks for the metrics, which hold nothing secret."""
    is_metrics = scope["type"] == "http" and scope["path"] == METRICS_PATH
    return is_metrics and is_this_machine(_peer(scope), scope["headers"])


def _peer(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else ""


def is_routine(scope: Scope, status: int) -> bool:
    """Whether a request comes too often for a line in the log, or from anybody who likes."""
    method, path = scope.get("method"), scope["path"]
    if (scope["type"], path) in _OPEN or status in (401, 429):
        return True  # whom the agent turns away it says itself, at a bounded rate
    if status >= 400 or scope["type"] == "websocket":
        return False
    is_part = method in ("POST", "PUT") and _STREAMED.fullmatch(path) is not None
    return method == "GET" or is_part or path.endswith("/renew")


class AccessControl:
    """Lets in who comes over a link, and who shows the token on this machine.

    Proof of life is open to all. The address of links, which have a handshake, is not a route here.

    Bodies are read here, whole and bounded in size and time, before a route sees them; only the
    echo, which counts bytes without keeping them, and the upload of a slice, which puts them on the
    disk, read their own.
    """

    def __init__(self, app: ASGIApp, token: str, failures: RateLimit) -> None:
        self._app = app
        self._token = token
        self._failures = failures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or WebSocket."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        is_open = (scope["type"], scope["path"]) in _OPEN or _is_own_scrape(scope)
        if not is_open and not self._is_authorized(scope):
            await self._turn_away(scope, send)
            return
        if not is_open:
            let_in(scope)
        if scope["type"] == "websocket" or _STREAMED.fullmatch(scope["path"]):
            await self._app(scope, receive, send)
            return
        is_manifest = _MANIFEST.fullmatch(scope["path"]) is not None
        most = MAX_MANIFEST_BYTES if is_manifest else MAX_BODY_BYTES
        seconds = MANIFEST_DEADLINE_SECONDS if is_manifest else BODY_DEADLINE_SECONDS
        body = await read_body(scope, receive, most, seconds)
        if isinstance(body, bytes):
            await self._app(scope, replay(body, receive), send)
        else:
            await refuse(scope, send, *body)

    def _is_authorized(self, scope: Scope) -> bool:
        if LINK_USER in scope.get("state", {}):
            return True
        # A token that came over a network was seen by everybody on the way.
        if not is_this_machine(_peer(scope), scope["headers"]):
            return False
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(values) != 1:
            return False
        scheme, _, shown = values[0].decode("latin-1").partition(" ")
        return tokens_equal(shown.strip(), self._token) and scheme.lower() == "bearer"

    async def _turn_away(self, scope: Scope, send: Send) -> None:
        host = _peer(scope) or "unknown"
        wait_seconds = self._failures.take(host)
        if wait_seconds is None:
            _log.warning("%s was turned away: no token, or another one", host)
            body = ErrorBody(
                code="wrong_token",
                message="This call needs a link, or on this machine the cluster token.",
                hint="Use linkcpp's own commands; `linkcpp token set` stores the token.",
            )
            await refuse(scope, send, 401, body, {"WWW-Authenticate": "Bearer"})
            return
        body = ErrorBody(
            code="too_many_failures",
            message="Too many calls from this address without the right token.",
            hint="Wait a little; `linkcpp token set` stores the right one.",
        )
        await refuse(scope, send, 429, body, {"Retry-After": str(math.ceil(wait_seconds))})
