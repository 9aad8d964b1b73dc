"""What stands before the routes of every service: bounds on what a caller may cost.

Plain ASGI, so that a stranger reaches no parser of ours and no body is read for one.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from time import monotonic
from typing import Any

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from linkcpp.common.callers import network_of
from linkcpp.common.records import ErrorBody

# Under this name the server leaves in a request's state how it is told.
LET_IN = "let_in"


def peer_of(call: HTTPConnection) -> str:
    """Name the caller for the log."""
    return call.client.host if call.client else "somebody"


class RateLimit:
    """Counts calls by address: a bucket of tries that fills up again with time.

    Of calls with a token only failures are counted, and only failures are turned away: a token
    carries 256 bits, so that guessing is hopeless at any rate, and a lock-out would let a stranger
    behind the coordinator's address translation keep the coordinator out. What is limited is the
    work and the log lines. The number of addresses remembered is bounded; IPv6 counts by its /64,
    which one host owns.
    """

    def __init__(
        self,
        *,
        tries: int = 10,
        seconds_per_try: float = 3.0,
        max_addresses: int = 1024,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._tries = tries
        self._seconds_per_try = seconds_per_try
        self._most = max_addresses
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, host: str) -> float | None:
        """Count a call; return how many seconds to wait where there were too many."""
        key = network_of(host)
        now = self._clock()
        left, when = self._buckets.pop(key, (float(self._tries), now))
        left = min(self._tries, left + (now - when) / self._seconds_per_try)
        is_over = left < 1
        self._buckets[key] = (left if is_over else left - 1, now)
        while len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        return (1 - left) * self._seconds_per_try if is_over else None


def let_in(scope: Scope) -> None:
    """Tell the server that a request showed a token: its connection is no stranger's now."""
    tell = scope.get("state", {}).get(LET_IN)
    if tell is not None:
        tell()


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


async def read_body(
    scope: Scope, receive: Receive, max_bytes: int, deadline_seconds: float
) -> bytes | tuple[int, ErrorBody]:
    """Read a body of at most ``max_bytes``, or return the status and error to refuse it with."""
    announced = dict(scope["headers"]).get(b"content-length", b"0")
    too_large = (
        413,
        ErrorBody(code="too_large", message=f"The body is longer than {max_bytes} bytes."),
    )
    if announced.isdigit() and len(announced) > len(str(max_bytes)):
        return too_large
    body = bytearray()
    try:
        async with asyncio.timeout(deadline_seconds):
            while True:
                message = await receive()
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    return too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        return 408, ErrorBody(
            code="too_slow", message=f"The body took longer than {deadline_seconds:g} seconds."
        )


def replay(body: bytes, receive: Receive) -> Receive:
    """Give a body that was read already to an application, then what comes after it."""
    parts: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return parts.pop() if parts else await receive()

    return next_message
