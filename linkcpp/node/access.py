"""What stands before every route of the agent: the token, and bounds on what a caller may cost.

Plain ASGI, so that a caller without the token reaches no parser of ours and no body is read for it.
"""

import asyncio
import ipaddress
import logging
import math
import re
from collections import OrderedDict
from collections.abc import Callable
from time import monotonic
from typing import Any

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from linkcpp.cluster.token import tokens_equal
from linkcpp.common.records import ErrorBody

HEALTH_PATH = "/v1/health"
MAX_BODY_BYTES = 64 * 1024
BODY_DEADLINE_SECONDS = 10.0
MAX_MANIFEST_BYTES = 16 * 2**20
MANIFEST_DEADLINE_SECONDS = 120.0

_STREAMED = re.compile(r"/v1/echo|/v1/slices/[0-9a-f]{32}")
_MANIFEST = re.compile(r"/v1/slices/[0-9a-f]{32}/manifest")

_log = logging.getLogger(__name__)


def peer_of(call: HTTPConnection) -> str:
    """Name the caller for the log."""
    return call.client.host if call.client else "somebody"


class FailureLimit:
    """Counts failed authentications by address: a bucket of tries that fills up again with time.

    Only failures are counted and only failures are turned away: a token carries 256 bits, so that
    guessing is hopeless at any rate, and a lock-out would let a stranger behind the coordinator's
    address translation keep the coordinator out. What is limited is the work and the log lines.
    The number of addresses remembered is bounded; IPv6 counts by its /64, which one host owns.
    """

    def __init__(
        self,
        *,
        tries: int = 10,
        seconds_per_try: float = 3.0,
        most_addresses: int = 1024,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._tries = tries
        self._seconds_per_try = seconds_per_try
        self._most = most_addresses
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def fail(self, host: str) -> float | None:
        """Count a failure; return how many seconds to wait where there were too many."""
        key = _network(host)
        now = self._clock()
        left, when = self._buckets.pop(key, (float(self._tries), now))
        left = min(self._tries, left + (now - when) / self._seconds_per_try)
        is_over = left < 1
        self._buckets[key] = (left if is_over else left - 1, now)
        while len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        return (1 - left) * self._seconds_per_try if is_over else None


class AccessControl:
    """Lets in who shows the cluster token; health and proof of life are open to all.

    Bodies are read here, whole and bounded in size and time, before a route sees them; only the
    echo, which counts bytes without keeping them, and the upload of a slice, which puts them on the
    disk, read their own.
    """

    def __init__(self, app: ASGIApp, token: str, failures: FailureLimit) -> None:
        self._app = app
        self._token = token
        self._failures = failures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or WebSocket."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        is_open = scope["type"] == "http" and scope["path"] == HEALTH_PATH
        if not is_open and not self._is_authorized(scope):
            await self._turn_away(scope, send)
            return
        if scope["type"] == "websocket" or _STREAMED.fullmatch(scope["path"]):
            await self._app(scope, receive, send)
            return
        is_manifest = _MANIFEST.fullmatch(scope["path"]) is not None
        most = MAX_MANIFEST_BYTES if is_manifest else MAX_BODY_BYTES
        seconds = MANIFEST_DEADLINE_SECONDS if is_manifest else BODY_DEADLINE_SECONDS
        body = await _read_body(scope, receive, most, seconds)
        if isinstance(body, bytes):
            await self._app(scope, _replay(body, receive), send)
        else:
            await refuse(scope, send, *body)

    def _is_authorized(self, scope: Scope) -> bool:
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(values) != 1:
            return False
        scheme, _, shown = values[0].decode("latin-1").partition(" ")
        return tokens_equal(shown.strip(), self._token) and scheme.lower() == "bearer"

    async def _turn_away(self, scope: Scope, send: Send) -> None:
        host = scope["client"][0] if scope.get("client") else "unknown"
        wait_seconds = self._failures.fail(host)
        if wait_seconds is None:
            _log.warning("%s was turned away: no token, or another one", host)
            body = ErrorBody(
                code="wrong_token",
                message="This call needs the cluster token.",
                hint="`linkcpp token --show` on a machine that has it, `linkcpp token set` here.",
            )
            await refuse(scope, send, 401, body, {"WWW-Authenticate": "Bearer"})
            return
        body = ErrorBody(
            code="too_many_failures",
            message="Too many calls from this address without the right token.",
            hint="Wait a little; `linkcpp token set` stores the right one.",
        )
        await refuse(scope, send, 429, body, {"Retry-After": str(math.ceil(wait_seconds))})


async def refuse(
    scope: Scope,
    send: Send,
    status: int,
    body: ErrorBody,
    headers: dict[str, str] | None = None,
) -> None:
    """Answer with an error; a WebSocket is refused before it is accepted.

    The connection ends with it: what is left of an unread body need not be taken in.
    """
    response = JSONResponse(
        body.model_dump(), status, headers={"Connection": "close", **(headers or {})}
    )
    prefix = "websocket." if scope["type"] == "websocket" else ""

    async def send_response(message: Message) -> None:
        await send({**message, "type": prefix + message["type"]})

    async def receive_nothing() -> Message:
        return {"type": "http.disconnect"}

    await response({**scope, "type": "http"}, receive_nothing, send_response)


async def _read_body(
    scope: Scope, receive: Receive, most_bytes: int, deadline_seconds: float
) -> bytes | tuple[int, ErrorBody]:
    announced = dict(scope["headers"]).get(b"content-length", b"0")
    too_large = (
        413,
        ErrorBody(code="too_large", message=f"The body is longer than {most_bytes} bytes."),
    )
    if announced.isdigit() and len(announced) > len(str(most_bytes)):
        return too_large
    body = bytearray()
    try:
        async with asyncio.timeout(deadline_seconds):
            while True:
                message = await receive()
                body += message.get("body", b"")
                if len(body) > most_bytes:
                    return too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        return 408, ErrorBody(
            code="too_slow", message=f"The body took longer than {deadline_seconds:g} seconds."
        )


def _replay(body: bytes, receive: Receive) -> Receive:
    parts: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return parts.pop() if parts else await receive()

    return next_message


def _network(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((address, 64), strict=False))
    return str(address)
