"""All connections of a gateway: who may come in, who meets whom, who has to go."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from linkcpp.common.callers import Headers, caller
from linkcpp.common.descriptors import is_near_descriptor_limit
from linkcpp.common.upgrade import UpgradeError, upgrade_response
from linkcpp.gateway.connection import RelayConnection
from linkcpp.gateway.frames import MAX_REST_BYTES
from linkcpp.gateway.pairing import Ended, Event, PairingTable, Seat
from linkcpp.registry.fields import MAX_EDGES_PER_GATEWAY
from linkcpp.registry.relay import Hello, RelayCloseCode
from linkcpp.registry.tickets import HubKey, TicketError, verify_edge_ticket

READ_BYTES: Final = 256 * 1024


class RelayLimits(NamedTuple):
    """Bounds on what strangers and members may take.

    A connection is unpaired from its upgrade until its other side is there; while it has not told
    who it is, it makes room for newer ones. A coordinator dials for all of its nodes at once, so
    that one address may have many. ``spare_descriptors`` of those
    that the process may have open are left to others.
    """

    edges: int = MAX_EDGES_PER_GATEWAY
    unpaired: int = MAX_EDGES_PER_GATEWAY
    unpaired_per_caller: int = 512
    spare_descriptors: int = 128


class RelayCounts(NamedTuple):
    """What a relay did and does; ``closed`` counts the gateway's own close codes."""

    unpaired_connections: int
    paired_edges: int
    pairs_made: int
    received_bytes: int
    refused: dict[str, int]
    closed: dict[int, int]


class Relay:
    """The relay of one gateway, for one event loop.

    ``gateway_id`` is the id by which the hub knows it, ``hub`` the key that tickets are verified
    with; no call to the hub is ever waited for.
    """

    def __init__(
        self,
        *,
        gateway_id: str,
        hub: HubKey,
        limits: RelayLimits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.gateway_id: Final = gateway_id
        self.buffer = memoryview(bytearray(MAX_REST_BYTES + READ_BYTES))
        self._hub = hub
        self._limits = limits or RelayLimits()
        self._clock = clock
        self._table = PairingTable()
        self._connections: dict[RelayConnection, Seat | None] = {}
        self._seated: dict[Seat, RelayConnection] = {}
        self._unpaired: dict[RelayConnection, str] = {}
        self._unpaired_by_caller: Counter[str] = Counter()
        self._received_bytes = 0
        self._pairs_made = 0
        self._refused: Counter[str] = Counter()
        self._closed: Counter[int] = Counter()
        self._is_stopping = False
        self._all_lost = asyncio.Event()

    @property
    def edge_ids(self) -> tuple[str, ...]:
        """Edges that have a connection here, one side or both."""
        return self._table.edge_ids

    def counts(self) -> RelayCounts:
        """Count what is and was."""
        return RelayCounts(
            unpaired_connections=len(self._unpaired),
            paired_edges=self._table.pair_count,
            pairs_made=self._pairs_made,
            received_bytes=self._received_bytes
            + sum(connection.received_bytes for connection in self._connections),
            refused=dict(self._refused),
            closed=dict(self._closed),
        )

    def accept(
        self, transport: asyncio.Transport, *, method: bytes, headers: Headers, peer: str
    ) -> None:
        """Make a relay's WebSocket of an HTTP connection whose request was just read.

        Raises:
            UpgradeError: the request does not ask for one, or there are too many.
        """
        whose = caller(peer, headers)
        try:
            response = upgrade_response(method, headers)
            self._check_room(whose, transport.get_extra_info("socket").fileno())
        except UpgradeError as error:
            self._refused[error.code] += 1
            raise
        connection = RelayConnection(self)
        self._connections[connection] = None
        self._unpaired[connection] = whose
        self._unpaired_by_caller[whose] += 1
        transport.write(response)
        transport.set_protocol(connection)
        connection.connection_made(transport)

    def _check_room(self, whose: str, descriptor: int) -> None:
        if self._is_stopping:
            raise UpgradeError(503, "stopping", "This gateway stops.")
        if is_near_descriptor_limit(descriptor, self._limits.spare_descriptors):
            raise UpgradeError(
                503, "full", "This gateway has nearly all connections open that its system allows."
            )
        if len(self._unpaired) >= self._limits.unpaired:
            ((crowd, _),) = self._unpaired_by_caller.most_common(1)
            if not self._make_room(crowd):
                raise UpgradeError(503, "full", "Too many connections wait for their other side.")
        is_over = self._unpaired_by_caller[whose] >= self._limits.unpaired_per_caller
        if is_over and not self._make_room(whose):
            raise UpgradeError(
                429, "too_many", "Too many connections from there wait for their other side."
            )

    def _make_room(self, whose: str) -> bool:
        """Drop the caller's connection that has said nothing for longest, if there is one."""
        for connection, caller_of_it in self._unpaired.items():
            if caller_of_it == whose and self._connections.get(connection) is None:
                self._count_out(connection)
                connection.drop()
                return True
        return False

    def close_edges(self, edge_ids: Iterable[str]) -> None:
        """End edges that the hub wants no more."""
        for edge_id in edge_ids:
            self._apply(
                self._table.close(edge_id, RelayCloseCode.REVOKED, "the hub ended this edge")
            )

    async def aclose(self) -> None:
        """Take no more, and close all; each peer has a moment to close too."""
        self._is_stopping = True
        self._all_lost.clear()
        reason = "this gateway stops"
        for edge_id in self._table.edge_ids:
            self._apply(self._table.close(edge_id, RelayCloseCode.STOPPING, reason))
        for connection in tuple(self._connections):
            connection.close(RelayCloseCode.STOPPING, reason)
        if self._connections:
            await self._all_lost.wait()

    # What its connections tell it.

    def said_hello(self, connection: RelayConnection, hello: Hello) -> None:
        """Take a side that told who it is, if its ticket proves it."""
        if reason := self._refusal(hello):
            connection.close(RelayCloseCode.UNAUTHORIZED, reason)
            return
        if hello.edge_id not in self._table and len(self._table) >= self._limits.edges:
            connection.close(RelayCloseCode.FULL, "this gateway has no room for another edge")
            return
        seat, events = self._table.attach(hello.edge_id, hello.role)
        self._connections[connection] = seat
        self._seated[seat] = connection
        connection.wait()
        self._apply(events)

    def ended(self, connection: RelayConnection, code: int, reason: str) -> None:
        """Hear that a connection takes part no more; ``code`` is for its partner."""
        seat = self._connections.get(connection)
        if seat is not None and self._seated.pop(seat, None) is not None:
            self._apply(self._table.detach(seat, code, reason))

    def closes(self, code: int) -> None:
        """Hear that a connection is closed from here."""
        self._closed[code] += 1

    def lost(self, connection: RelayConnection) -> None:
        """Hear that a connection's socket is closed."""
        if self._connections.pop(connection, None) is not None:
            self._received_bytes += connection.received_bytes
        self._count_out(connection)
        if not self._connections:
            self._all_lost.set()

    def _apply(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Ended):
                if (connection := self._seated.pop(event.seat, None)) is not None:
                    connection.close(event.code, event.reason)
                continue
            newer, older = self._seated[event.newer], self._seated[event.older]
            self._pairs_made += 1
            for connection, partner in ((newer, older), (older, newer)):
                self._count_out(connection)
                connection.pair(partner)

    def _count_out(self, connection: RelayConnection) -> None:
        whose = self._unpaired.pop(connection, None)
        if whose is not None:
            self._unpaired_by_caller[whose] -= 1
            if not self._unpaired_by_caller[whose]:
                del self._unpaired_by_caller[whose]

    def _refusal(self, hello: Hello) -> str | None:
        try:
            claims = verify_edge_ticket(self._hub, hello.ticket, now=self._clock())
        except TicketError as error:
            return f"the ticket is not taken: {error.reason}"
        if claims.edge != hello.edge_id or claims.role != hello.role:
            return "the ticket is for another edge or side"
        if claims.gateway != self.gateway_id:
            return "the ticket is for another gateway"
        return None
