"""The HTTP server under every service: uvicorn with deadlines and bounds for strangers.

uvicorn gives a client any time to send its headers; here a connection that does not bring a whole
request head in time is dropped, and so are connections beyond a bound.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar, cast

import h11
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from linkcpp.common.records import ErrorBody
from linkcpp.common.request_ids import REQUEST_ID_HEADER, choose_request_id
from linkcpp.common.request_log import note_refusal, request_id_of
from linkcpp.common.sockets import tune_transport

HEAD_DEADLINE_SECONDS = 10.0
MAX_HEAD_BYTES = 16 * 1024
IDLE_SECONDS = 15
MAX_CONNECTIONS = 512


class BoundedHttpProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with a deadline for each request head, and a bound on connections."""

    most_connections: ClassVar[int] = MAX_CONNECTIONS
    _head_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or drop it where there are too many."""
        super().connection_made(transport)
        tune_transport(transport)
        if len(self.connections) > self.most_connections:
            transport.abort()
            return
        self._start_deadline()

    def data_received(self, data: bytes) -> None:
        """Read a piece of a request."""
        # Set before the base class looks at the data: it may hand the connection to a WebSocket.
        self._start_deadline()
        super().data_received(data)
        is_upgraded = self.transport.get_protocol() is not self
        if is_upgraded or (self.cycle is not None and not self.cycle.response_complete):
            self._stop_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_deadline()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP request with the API's kind of error."""
        self.refuse(400, ErrorBody(code="not_http", message=msg))

    def refuse(
        self, status: int, error: ErrorBody, headers: Iterable[tuple[bytes, bytes]] = ()
    ) -> None:
        """Answer a request in the application's place, and close the connection.

        ``headers`` are the request's, as far as they were read.
        """
        body = error.model_dump_json().encode()
        answer_headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
            (REQUEST_ID_HEADER, self._end_cycle(status) or choose_request_id(headers)),
        ]
        with suppress(h11.LocalProtocolError):
            answer = (
                h11.Response(status_code=status, headers=answer_headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            )
            self.transport.write(b"".join(self.conn.send(part) or b"" for part in answer))
        self.transport.close()

    def _end_cycle(self, status: int) -> str | None:
        """End the request that the application has, if it has one, and return its id."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return None
        scope = cast("Scope", cycle.scope)
        if not cycle.response_started:
            note_refusal(scope, status)
        # To the application it is as if the client went away: it would answer as well.
        cycle.disconnected = True
        cycle.message_event.set()
        return request_id_of(scope)

    def _start_deadline(self) -> None:
        if self._head_deadline is None:
            self._head_deadline = self.loop.call_later(
                HEAD_DEADLINE_SECONDS, self._drop_slow_client
            )

    def _stop_deadline(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _drop_slow_client(self) -> None:
        self._head_deadline = None
        self.transport.abort()


class BoundedServer(uvicorn.Server):
    """uvicorn that leaves the signals to its owner, who has more to stop than connections."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers."""
        yield


def _is_news(record: logging.LogRecord) -> bool:
    # uvicorn 0.54 says this of every WebSocket that is refused with a response.
    return "without completing handshake" not in record.msg


def make_server(
    app: ASGIApp,
    *,
    http: type[H11Protocol] = BoundedHttpProtocol,
    max_head_bytes: int = MAX_HEAD_BYTES,
    idle_seconds: int = IDLE_SECONDS,
    max_message_bytes: int = 0,
    ping_interval_seconds: float = 30.0,
    ping_timeout_seconds: float = 30.0,
) -> BoundedServer:
    """Configure the server; ``serve(sockets=…)`` runs it until ``should_exit``.

    ``http`` may be a class that takes some requests for itself. A connection without a request is
    closed after ``idle_seconds``. The last three are for the application's WebSockets, of which it
    has none where ``max_message_bytes`` is 0.
    """
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=http,
        ws="websockets-sansio" if max_message_bytes else "none",
        ws_max_size=max_message_bytes,
        ws_ping_interval=ping_interval_seconds,
        ws_ping_timeout=ping_timeout_seconds,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        access_log=False,
        # A forged X-Forwarded-For would otherwise change whom a local caller seems to be.
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=max_head_bytes,
        timeout_keep_alive=idle_seconds,
        timeout_graceful_shutdown=3,
    )
    return BoundedServer(config)
