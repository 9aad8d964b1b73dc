"""What stands around an application whose requests are to be found in the log: an id and a line."""

import logging
from collections.abc import Callable
from time import perf_counter
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from linkcpp.common.callers import caller
from linkcpp.common.logs import REQUEST_LOGGER
from linkcpp.common.request_ids import REQUEST_ID_HEADER, begin_request
from linkcpp.common.text import printable

_ANSWERS: Final = ("http.response.start", "websocket.http.response.start", "websocket.accept")
_RAW_HEADER: Final = REQUEST_ID_HEADER.lower().encode()
_SWITCHED: Final = 101
# As nginx says where the client went away before there was an answer.
_CLIENT_GONE: Final = 499

_log = logging.getLogger(REQUEST_LOGGER)


class NotedAnswer:
    """Sends an answer with the request's id, and keeps its ``status`` (0: none yet)."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._own_header = (_RAW_HEADER, request_id.encode())
        self.status = 0

    async def __call__(self, message: Message) -> None:
        """Send one message."""
        if message["type"] in _ANSWERS:
            self.status = message.get("status", _SWITCHED)
            others = [item for item in message.get("headers", ()) if item[0] != _RAW_HEADER]
            message = {**message, "headers": [*others, self._own_header]}
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
        request_id = begin_request(scope["headers"])
        scope.setdefault("state", {})
        answer = NotedAnswer(send, request_id)
        try:
            await self._app(scope, receive, answer)
        except BaseException:
            self._note(scope, request_id, answer.status or 500, perf_counter() - started)
            raise
        self._note(scope, request_id, answer.status or _CLIENT_GONE, perf_counter() - started)

    def _note(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        problem = scope["state"].get("problem")
        if status >= 500 or problem:
            level = logging.WARNING
        else:
            level = logging.DEBUG if self._is_routine(scope, status) else logging.INFO
        if not _log.isEnabledFor(level):
            return
        peer = scope["client"][0] if scope.get("client") else "unknown"
        told: dict[str, str | int | float] = {
            "request_id": request_id,
            "method": printable(scope.get("method", "WEBSOCKET"), 16),
            "path": printable(scope["path"], 200),
            "status": status,
            "ms": round(seconds * 1000, 2),
            "address": caller(peer, scope["headers"]),
        }
        if problem:
            told["problem"] = printable(problem, 500)
        _log.log(level, "request", extra=told)
