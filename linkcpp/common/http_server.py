"""The HTTP server under every service: uvicorn with deadlines and bounds for strangers.

uvicorn gives a client any time to send its headers; here a connection that does not bring a whole
request head in time is dropped. Beyond a bound on connections the oldest unfinished ones of whoever
has the most go, so that those who have a token find room (``linkcpp.common.eviction``).
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, ClassVar, Protocol, cast
from weakref import WeakKeyDictionary

import h11
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from linkcpp.common.access import LET_IN
from linkcpp.common.callers import Headers
from linkcpp.common.descriptors import is_near_descriptor_limit, raise_descriptor_limit
from linkcpp.common.eviction import ConnectionInfo, ConnectionLimits, connection_to_evict
from linkcpp.common.records import ErrorBody
from linkcpp.common.request_ids import REQUEST_ID_HEADER, choose_request_id
from linkcpp.common.request_log import note_refusal, request_id_of
from linkcpp.common.sockets import tune_transport
from linkcpp.common.upgrade import UpgradeError

HEAD_DEADLINE_SECONDS = 10.0
MAX_HEAD_BYTES = 16 * 1024
IDLE_SECONDS = 15
MAX_CONNECTIONS = 2048
MAX_STRANGERS = 256
NEWCOMER_SECONDS = 1.0
# For what the process opens besides connections. A relay leaves more, so that the calls of the
# application have room beside it.
SPARE_DESCRIPTORS = 64
# One address that nobody shares may have one in so many of the strangers' connections.
STRANGERS_SHARE = 4


_strangers: WeakKeyDictionary[ServerState, "set[BoundedHttpProtocol]"] = WeakKeyDictionary()
_numbers = count()


class BoundedHttpProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with a deadline for each request head, and bounds on connections.

    Strangers are those of whom the application has not said that they may come in
    (``linkcpp.common.access.let_in``). Beyond ``max_strangers`` a newcomer has a moment to show
    what it has, and then another one goes for it. WebSockets are for the application to bound.
    """

    max_connections: ClassVar[int] = MAX_CONNECTIONS
    max_strangers: ClassVar[int] = MAX_STRANGERS
    _head_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection; where there are too many, another one goes."""
        self.app_state = {**self.app_state, LET_IN: self._is_let_in}
        super().connection_made(transport)
        tune_transport(transport)
        self._number = next(_numbers)
        self._strangers = _strangers.setdefault(self.server_state, set())
        self._strangers.add(self)
        self._start_deadline()
        if self._is_full():
            self._make_room_at_once()
        elif len(self._strangers) > self.max_strangers // STRANGERS_SHARE:
            self.loop.call_later(NEWCOMER_SECONDS, self._make_room)

    def _is_let_in(self) -> None:
        self._strangers.discard(self)

    def _is_full(self) -> bool:
        raw = self.transport.get_extra_info("socket")
        is_near_limit = raw is not None and is_near_descriptor_limit(
            raw.fileno(), SPARE_DESCRIPTORS
        )
        return is_near_limit or len(self.connections) > self.max_connections

    def _make_room(self) -> None:
        limits = ConnectionLimits(self.max_strangers, self.max_strangers // STRANGERS_SHARE)
        _drop_one(self._strangers, limits)

    def _make_room_at_once(self) -> None:
        none_left = ConnectionLimits(0, self.max_connections)
        waiting = {each for each in self._all_http() if each.is_waiting}
        if not (_drop_one(self._strangers, none_left) or _drop_one(waiting, none_left)):
            self.drop()

    def _all_http(self) -> "Iterator[BoundedHttpProtocol]":
        return (each for each in self.connections if isinstance(each, BoundedHttpProtocol))

    def drop(self) -> None:
        """Close the connection at once; it counts no longer."""
        # Now, and not when the event loop tells of it: others may come before that.
        self._strangers.discard(self)
        self.connections.discard(self)
        self.transport.abort()

    @property
    def is_waiting(self) -> bool:
        """Whether nothing is done for it now."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def info(self) -> ConnectionInfo:
        """What a choice of whom to drop is made by."""
        return ConnectionInfo(self._number, self.client[0] if self.client else "", self.is_waiting)

    def data_received(self, data: bytes) -> None:
        """Read a piece of a request."""
        # Set before the base class looks at the data: it may hand the connection to a WebSocket.
        self._start_deadline()
        super().data_received(data)
        is_upgraded = self.transport.get_protocol() is not self
        if is_upgraded:
            self._strangers.discard(self)
        if is_upgraded or (self.cycle is not None and not self.cycle.response_complete):
            self._stop_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_deadline()
        self._strangers.discard(self)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not an HTTP request with the API's kind of error."""
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


class TakeUpgrade(Protocol):
    """Makes something else of a connection whose request asks for a WebSocket."""

    def __call__(
        self, transport: asyncio.Transport, *, method: bytes, headers: Headers, peer: str
    ) -> None:
        """Answer the request and take the connection over.

        Raises:
            UpgradeError: it stays as it is, and is refused.
        """
        ...


def upgrading_protocol(find: Callable[[str], TakeUpgrade | None]) -> type[BoundedHttpProtocol]:
    """Make a class for ``make_server``: ``find`` says who takes WebSockets at a path.

    Where nobody does, the application has them. What was taken does not count as a connection of
    the server any more: whoever took it has bounds of their own.
    """

    class UpgradingHttpProtocol(BoundedHttpProtocol):
        """Bounded HTTP/1.1, some of whose WebSockets are not the application's."""

        def handle_websocket_upgrade(self, event: h11.Request) -> None:
            """Give the connection to whoever has its path."""
            take = find(self.scope["path"])
            if take is None:
                super().handle_websocket_upgrade(event)
                return
            self.connections.discard(self)
            try:
                take(
                    self.transport,
                    method=event.method,
                    headers=self.headers,
                    peer=self.client[0] if self.client else "",
                )
            except UpgradeError as error:
                told = ErrorBody(code=error.code, message=error.reason)
                self.refuse(error.status, told, self.headers)

    return UpgradingHttpProtocol


def _drop_one(among: set[BoundedHttpProtocol], limits: ConnectionLimits) -> bool:
    by_info = {each.info: each for each in among}
    chosen = connection_to_evict(by_info, limits)
    if chosen is not None:
        by_info[chosen].drop()
    return chosen is not None


class BoundedServer(uvicorn.Server):
    """uvicorn that leaves the signals to its owner, who has more to stop than connections."""

    def new_protocol(self, state: Mapping[str, Any]) -> asyncio.Protocol:
        """Make what speaks HTTP on a connection from elsewhere; ``state`` is its requests'."""
        http = cast("type[H11Protocol]", self.config.http_protocol_class)
        return http(config=self.config, server_state=self.server_state, app_state=dict(state))

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
    ping_interval_seconds: float | None = 30.0,
    ping_timeout_seconds: float = 30.0,
) -> BoundedServer:
    """Configure the server; ``serve(sockets=…)`` runs it until ``should_exit``.

    ``http`` may be a class that takes some requests for itself. A connection without a request is
    closed after ``idle_seconds``. The last three are for the application's WebSockets, of which it
    has none where ``max_message_bytes`` is 0.
    """
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    raise_descriptor_limit(MAX_CONNECTIONS + SPARE_DESCRIPTORS)
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
