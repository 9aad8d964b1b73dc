"""What stands before every route of the hub: tokens, rate limits, bounds, request ids, the log.

Plain ASGI, so that a caller without a token reaches no parser of ours. What a role may do is for
the routes to say (``linkcpp.hub.roles``).
"""

import hashlib
import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from time import perf_counter
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from linkcpp.cluster.token import tokens_equal
from linkcpp.common.access import RateLimit, let_in, read_body, refuse, replay
from linkcpp.common.http_server import MAX_HEAD_BYTES
from linkcpp.common.metrics import METRICS_PATH
from linkcpp.common.request_log import TracedAnswer, address_of, request_line
from linkcpp.hub.directory import Directory
from linkcpp.hub.errors import HINT_JOIN, ApiError, revoked
from linkcpp.hub.identity import HubIdentity
from linkcpp.hub.metrics import HubMetrics
from linkcpp.hub.roles import OPEN_PATHS, Caller
from linkcpp.registry.records import Role
from linkcpp.registry.tickets import NodeClaims, TicketError, verify_node_token

BODY_DEADLINE_SECONDS: Final = 10.0

_MAX_BODY_BYTES: Final = 64 * 1024
_MAX_BODY_BYTES_OF: Final = {
    "/v1/join": 16 * 1024,
    "/v1/tokens": 4 * 1024,
    "/v1/heartbeat": 2**20,
    "/v1/gateways/heartbeat": 256 * 1024,
}
_LIMITED_PATHS: Final = ("/v1/join", "/v1/tokens")
# They come too often to be worth a line each.
_QUIET_PATHS: Final = ("/v1/heartbeat", "/v1/gateways/heartbeat", "/v1/health", "/metrics")
_PARTIAL: Final = 206
_MAX_TOKENS_REMEMBERED: Final = 50_000
_MAX_METHOD_CHARACTERS: Final = 16

_log = logging.getLogger(__name__)


class TokenCheck:
    """Reads bearer tokens; what was verified once is remembered, for a signature costs more."""

    def __init__(
        self, identity: HubIdentity, directory: Directory, clock: Callable[[], float]
    ) -> None:
        self._identity = identity
        self._verifier = identity.verifier
        self._directory = directory
        self._clock = clock
        self._claims: OrderedDict[bytes, NodeClaims] = OrderedDict()

    def caller(self, scope: Scope) -> Caller:
        """Say who calls.

        Raises:
            ApiError: the call has no token, or one that is not (or no longer) taken.
        """
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        header = values[0] if len(values) == 1 else b""
        token = _bearer(header)
        if scope["path"] == METRICS_PATH and tokens_equal(token, self._identity.metrics_token):
            return Caller("metrics", None)
        # Not by the header: there are many ways to write one around the same token.
        key = hashlib.sha256(token.encode()).digest()
        claims = self._remembered(key) or self._verified(token)
        self._check_machine(claims)
        self._claims[key] = claims
        if len(self._claims) > _MAX_TOKENS_REMEMBERED:
            self._claims.popitem(last=False)
        return Caller(claims.sub, claims.role)

    def _remembered(self, key: bytes) -> NodeClaims | None:
        claims = self._claims.get(key)
        if claims is not None and claims.exp <= self._clock():
            del self._claims[key]
            return None
        return claims

    def _verified(self, token: str) -> NodeClaims:
        try:
            return verify_node_token(self._verifier, token, now=self._clock())
        except TicketError as error:
            raise ApiError(
                401, error.code, f"This token is not taken: {error.reason}.", hint=HINT_JOIN
            ) from None

    def _check_machine(self, claims: NodeClaims) -> None:
        if claims.sub == self._identity.hub_id and claims.role is Role.ADMIN:
            return  # whoever can read the data folder is the hub
        machine = self._directory.machines.get(claims.sub)
        if machine is None or machine.revoked_at is not None:
            raise revoked()
        if claims.role is not machine.role or claims.joined != machine.joined_at:
            raise ApiError(401, "old_token", "This machine joined again since it got its token.")


class Access:
    """Serves a request or WebSocket whose caller is known, or one of the few that are open."""

    def __init__(
        self,
        app: ASGIApp,
        tokens: TokenCheck,
        metrics: HubMetrics,
        *,
        failures: RateLimit,
        open_calls: RateLimit,
    ) -> None:
        self._app = app
        self._tokens = tokens
        self._metrics = metrics
        self._failures = failures
        self._open_calls = open_calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one, count it, and write its line in the log."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        started = perf_counter()
        answer = TracedAnswer(scope, send)
        try:
            await self._serve(scope, receive, answer)
        finally:
            self._note(scope, answer.status or 500, perf_counter() - started)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._admit(scope)
            if scope["type"] == "http":
                receive = await self._with_body(scope, receive)
        except ApiError as error:
            await self._turn_away(scope, send, error)
            return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        _check_head(scope)
        if scope["path"] in _LIMITED_PATHS:
            self._check_rate(self._open_calls, scope)
        if scope["path"] not in OPEN_PATHS:
            scope["state"]["caller"] = self._tokens.caller(scope)
            let_in(scope)

    async def _with_body(self, scope: Scope, receive: Receive) -> Receive:
        path = scope["path"]
        max_bytes = _MAX_BODY_BYTES_OF.get(path, _MAX_BODY_BYTES)
        body = await read_body(scope, receive, max_bytes, BODY_DEADLINE_SECONDS)
        if not isinstance(body, bytes):
            status, error = body
            raise ApiError(status, error.code, error.message, hint=error.hint)
        if body and path not in OPEN_PATHS:
            self._tokens.caller(scope)  # it may have been revoked while its body came
        return replay(body, receive)

    async def _turn_away(self, scope: Scope, send: Send, error: ApiError) -> None:
        try:
            if error.status == 401:
                self._check_rate(self._failures, scope)
        except ApiError as too_many:
            error = too_many
        headers = error.headers()
        if error.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        await refuse(scope, send, error.status, error.body(), headers)

    def _check_rate(self, limit: RateLimit, scope: Scope) -> None:
        wait_seconds = limit.take(address_of(scope))
        if wait_seconds is not None:
            raise ApiError(
                429,
                "too_many_calls",
                "Too many such calls from this address.",
                hint=f"Wait {math.ceil(wait_seconds)} s.",
                retry_after_seconds=wait_seconds,
            )

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", None)
        method = scope.get("method", "WEBSOCKET")
        self._metrics.observe_request(method, route, status, seconds)
        path = scope["path"]
        # Whoever fetches a slice asks for hundreds of ranges, one after the other.
        is_quiet = (path in _QUIET_PATHS and status < 400) or status == _PARTIAL
        level = logging.DEBUG if is_quiet else logging.INFO
        if not _log.isEnabledFor(level):
            return
        known: Caller | None = scope["state"].get("caller")
        told = request_line(scope, status, seconds)
        told["caller"] = known.node_id if known else None
        _log.log(level, "%s", "request", extra=told)


def _check_head(scope: Scope) -> None:
    # The server bounds what it waits for; a long head that comes in one piece is refused here.
    method = scope.get("method", "")
    if len(method) > _MAX_METHOD_CHARACTERS:
        raise ApiError(405, "unknown_method", "There is no such method.")
    head_bytes = len(method) + len(scope["raw_path"]) + len(scope["query_string"])
    head_bytes += sum(len(name) + len(value) for name, value in scope["headers"])
    if head_bytes > MAX_HEAD_BYTES:
        raise ApiError(431, "too_large", f"The head is longer than {MAX_HEAD_BYTES} bytes.")


def _bearer(header: bytes) -> str:
    scheme, _, token = header.decode("latin-1").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        raise ApiError(401, "no_token", "This call needs a token.", hint=HINT_JOIN)
    return token
