"""The node's end of all its edges: offers of the hub come in, coordinators get to the agent."""

import asyncio
import logging
import time
from collections.abc import Callable
from time import monotonic

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from linkcpp.common.errors import LinkcppError
from linkcpp.common.records import Record
from linkcpp.common.text import printable
from linkcpp.link.accepted import AcceptedEdge, AgentTokens
from linkcpp.link.handshake import EdgeKeys, parse_edge_key
from linkcpp.link.pump import open_loopback
from linkcpp.link.records import EdgeLimits, EdgeTimes
from linkcpp.link.supply import Pin
from linkcpp.link.transport import Transport, TransportLostError
from linkcpp.registry.credentials import pin_peer
from linkcpp.registry.edges import EdgeOffer, EdgeRole
from linkcpp.registry.relay import (
    HELLO_DEADLINE_SECONDS,
    PAIRED,
    Hello,
    RelayCloseCode,
    decode_hello,
)
from linkcpp.registry.tickets import HubKey, TicketError, verify_edge_ticket

MAX_EDGES = 32

MAX_STRANGERS = 128
# A coordinator may dial before the hub's offer has come to the node.
_OFFER_SECONDS = 5.0
_SWEEP_SECONDS = 5.0

_log = logging.getLogger(__name__)


class AcceptedStatus(Record):
    """One edge at the node; ``path`` is ``None`` while no path carries it."""

    edge_id: str
    peer_node_id: str
    peer_name: str
    path: str | None
    sent_bytes: int
    received_bytes: int


class EdgeAcceptor:
    """Takes part in edges to this node, whose agent listens at ``agent_address`` (host, port).

    ``hub`` verifies the tickets of coordinators that dial directly. A token for the agent is in
    ``tokens`` while its edge lives.
    """

    def __init__(
        self,
        *,
        own_key: X25519PrivateKey,
        own_node_id: str,
        hub: HubKey,
        agent_address: tuple[str, int],
        tokens: AgentTokens,
        pin: Pin = pin_peer,
        limits: EdgeLimits | None = None,
        times: EdgeTimes | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._own_key = own_key
        self._own_node_id = own_node_id
        self._hub = hub
        self._agent_address = agent_address
        self._tokens = tokens
        self._pin = pin
        self._limits = limits or EdgeLimits()
        self._times = times or EdgeTimes()
        self._clock = clock
        self._edges: dict[str, AcceptedEdge] = {}
        self._offered = asyncio.Condition()
        # Those who have shown no ticket, in the order in which they came.
        self._strangers: dict[Transport, None] = {}
        self._is_closed = False
        self._sweeping = asyncio.create_task(self._sweep())

    @property
    def edge_ids(self) -> tuple[str, ...]:
        """All edges that this node takes part in."""
        return tuple(self._edges)

    def status(self) -> tuple[AcceptedStatus, ...]:
        """Tell what every edge does now."""
        return tuple(
            AcceptedStatus(
                edge_id=edge_id,
                peer_node_id=edge.offer.peer_node_id,
                peer_name=printable(edge.offer.peer_name, 64),
                path=edge.path,
                sent_bytes=edge.traffic_bytes[0],
                received_bytes=edge.traffic_bytes[1],
            )
            for edge_id, edge in self._edges.items()
        )

    async def offer(self, offer: EdgeOffer) -> None:
        """Take part in an edge, or take another way for one; the same offer twice is one.

        Raises:
            LinkcppError: the coordinator is not the one it was, or there are too many edges.
        """
        keys = self._keys_of(offer)
        async with self._offered:
            if self._is_closed:
                raise LinkcppError("This node's agent stops.")
            known = self._edges.get(offer.edge_id)
            if known is None:
                known = self._edges[offer.edge_id] = await self._new_edge(offer, keys)
            elif known.keys.backbone_id != keys.backbone_id:
                raise LinkcppError("The hub offers an edge of another coordinator than before.")
            elif known.offer.ticket == offer.ticket:
                return
            known.renew(offer)
            self._offered.notify_all()

    async def close_edge(self, edge_id: str, reason: str = "the edge was closed") -> None:
        """End an edge at once; fine when there is none."""
        edge = self._edges.pop(edge_id, None)
        if edge is not None:
            await edge.aclose(RelayCloseCode.REVOKED, reason)

    async def close_all(self, reason: str) -> None:
        """End all edges at once."""
        await asyncio.gather(*(self.close_edge(edge_id, reason) for edge_id in self.edge_ids))

    async def aclose(self) -> None:
        """End all edges; no offer is taken afterwards."""
        self._is_closed = True
        self._sweeping.cancel()
        await asyncio.gather(self._sweeping, return_exceptions=True)
        await self.close_all("the node's agent stops")

    async def accept_direct(self, transport: Transport) -> None:
        """Serve a coordinator that dialled this machine itself, until it leaves."""
        try:
            edge = await self._admit(transport)
            await transport.send(PAIRED)
            await edge.serve(transport, "direct")
        except _RefusedError as error:
            await transport.close(error.code, str(error))
        except TransportLostError as error:
            _log.info("a direct path ended: %s", error.reason)

    async def _admit(self, transport: Transport) -> AcceptedEdge:
        if len(self._strangers) >= MAX_STRANGERS:
            # The newcomer may have a ticket; who said nothing for longest has least to say.
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            await oldest.close(RelayCloseCode.FULL, "newer ones take its place")
        self._strangers[transport] = None
        try:
            hello = await self._read_hello(transport)
        finally:
            self._strangers.pop(transport, None)
        return await self._edge_of(hello.edge_id)

    async def _read_hello(self, transport: Transport) -> Hello:
        try:
            async with asyncio.timeout(HELLO_DEADLINE_SECONDS):
                hello = decode_hello(await transport.receive())
            claims = verify_edge_ticket(self._hub, hello.ticket, now=self._clock())
        except TimeoutError:
            raise _RefusedError(RelayCloseCode.HELLO_TIMEOUT, "no hello came") from None
        except ValueError as error:
            raise _RefusedError(RelayCloseCode.MALFORMED, str(error)) from None
        except TicketError as error:
            reason = f"the ticket is not taken: {error.reason}"
            raise _RefusedError(RelayCloseCode.UNAUTHORIZED, reason) from None
        if claims.edge != hello.edge_id or not claims.role == hello.role == EdgeRole.BACKBONE:
            raise _RefusedError(
                RelayCloseCode.UNAUTHORIZED, "the ticket is for another edge or side"
            )
        return hello

    async def _edge_of(self, edge_id: str) -> AcceptedEdge:
        try:
            async with asyncio.timeout(_OFFER_SECONDS), self._offered:
                await self._offered.wait_for(lambda: edge_id in self._edges)
        except TimeoutError:
            raise _RefusedError(
                RelayCloseCode.NO_PEER, "the hub has not told this node of the edge"
            ) from None
        return self._edges[edge_id]

    def _keys_of(self, offer: EdgeOffer) -> EdgeKeys:
        if offer.role is not EdgeRole.NODE or offer.hub_id != self._hub.hub_id:
            raise LinkcppError("That is no offer for this node of its hub.")
        self._pin(offer.hub_id, offer.peer_node_id, offer.peer_public_key)
        try:
            peer_key = parse_edge_key(offer.peer_public_key)
        except ValueError:
            raise LinkcppError("The hub gave a key for a coordinator that is none.") from None
        return EdgeKeys(
            self._own_key, peer_key, offer.edge_id, offer.peer_node_id, self._own_node_id
        )

    async def _new_edge(self, offer: EdgeOffer, keys: EdgeKeys) -> AcceptedEdge:
        if len(self._edges) >= MAX_EDGES:
            idle = [
                (edge.idle_since, known) for known, edge in self._edges.items() if not edge.path
            ]
            if not idle:
                raise LinkcppError(f"This node has {MAX_EDGES} edges already.")
            await self.close_edge(min(idle)[1], "newer edges take its place")
        host, port = self._agent_address
        return AcceptedEdge(
            offer,
            keys,
            connect=lambda: open_loopback(host, port),
            tokens=self._tokens,
            limits=self._limits,
            times=self._times,
        )

    async def _sweep(self) -> None:
        """Forget edges for which nobody came in a long time."""
        while True:
            await asyncio.sleep(min(_SWEEP_SECONDS, self._times.forgotten))
            before = monotonic() - self._times.forgotten
            for edge_id, edge in list(self._edges.items()):
                if edge.path is None and edge.idle_since < before:
                    await self.close_edge(edge_id, "no path carried it for a long time")


class _RefusedError(Exception):
    def __init__(self, code: RelayCloseCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
