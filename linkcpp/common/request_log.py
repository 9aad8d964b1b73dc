"""What stands around an application whose requests are to be found in the log: an id and a line."""

import logging
from collections.abc import Callable
from time import perf_counter
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from linkcpp.common.access import refuse
from linkcpp.common.callers import caller
from linkcpp.common.logs import REQUEST_LOGGER
from linkcpp.common.records import ErrorBody
from linkcpp.common.request_ids import REQUEST_ID_HEADER, choose_request_id, continue_request
from linkcpp.common.text import printable

_ANSWERS: Final = ("http.response.start", "websocket.http.response.start", "websocket.accept")
_RAW_HEADER: Final = REQUEST_ID_HEADER.lower().encode()
_SWITCHED: Final = 101
# As nginx says where the client went away before there was an answer.
_CLIENT_GONE: Final = 499
# What a server answers where an application closes a WebSocket instead of accepting it.
_NOT_ACCEPTED: Final = 403
_DENIAL: Final = "websocket.http.response"
_REFUSED_STATUS: Final = "refused_status"

_log = logging.getLogger(REQUEST_LOGGER)


def request_id_of(scope: Scope) -> str:
    """Return the id of a request, which is chosen when it is asked for the first time."""
    state = scope.setdefault("state", {})
    if "request_id" not in state:
        state["request_id"] = choose_request_id(scope["headers"])
    return str(state["request_id"])


def note_refusal(scope: Scope, status: int) -> None:
    """Note that the server answered a request by itself: what the application says goes nowhere."""
    scope.setdefault("state", {})[_REFUSED_STATUS] = status


class TracedAnswer:
    """Sends an answer with the request's id, and keeps its ``status`` (0: none yet)."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._status = 0
        self.request_id = request_id_of(scope)
        continue_request(self.request_id)

    @property
    def status(self) -> int:
        """What the client was answered."""
        return int(self._scope["state"].get(_REFUSED_STATUS, self._status))

    async def __call__(self, message: Message) -> None:
        """Send one message."""
        if message["type"] == "websocket.close" and not self._status:
            if _DENIAL in self._scope.get("extensions", {}):
                error = ErrorBody(code="not_accepted", message="No WebSocket is accepted here.")
                await refuse(self._scope, self, _NOT_ACCEPTED, error)
                return
            self._status = _NOT_ACCEPTED
        elif message["type"] in _ANSWERS:
            self._status = message.get("status", _SWITCHED)
            headers = message.get("headers", ())
            others = [item for item in headers if item[0].lower() != _RAW_HEADER]
            own = (_RAW_HEADER, self.request_id.encode())
            message = {**message, "headers": [*others, own]}
        await self._send(message)


class RequestLog:
    """Serves an application; each answer has the request's id, and each request a line.

    ``is_routine(scope, status)`` says of which requests the line is for debugging only. What the
    application leaves as ``problem`` in the scope's state says in words why a request failed.
    """

    def __init__(self, app: ASGIApp, is_routine: Callable[[Scope, int], bool]) -> None:
        self._app = app
        self._is_routine = is_routine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or WebSocket."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        started = perf_counter()
        answer = TracedAnswer(scope, send)
        try:
            await self._app(scope, receive, answer)
        except BaseException:
            self._note(scope, answer.status or 500, perf_counter() - started)
            raise
        self._note(scope, answer.status or _CLIENT_GONE, perf_counter() - started)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        problem = scope["state"].get("problem")
        if status >= 500 or problem:
            level = logging.WARNING
        else:
            level = logging.DEBUG if self._is_routine(scope, status) else logging.INFO
        if not _log.isEnabledFor(level):
            return
        told = request_line(scope, status, seconds)
        if problem:
            told["problem"] = printable(problem, 500)
        _log.log(level, "request", extra=told)


def address_of(scope: Scope) -> str:
    """Return the address that limits and the log know a caller by."""
    peer = scope["client"][0] if scope.get("client") else "unknown"
    return caller(peer, scope["headers"])


def request_line(scope: Scope, status: int, seconds: float) -> dict[str, str | int | float | None]:
    """Return what the log says of a request that was answered."""
    return {
        "request_id": request_id_of(scope),
        "method": printable(scope.get("method", "WEBSOCKET"), 16),
        "path": printable(scope["path"], 200),
        "status": status,
        "ms": round(seconds * 1000, 2),
        "address": address_of(scope),
    }
