"""The end of links that is dialled: other machines get to what this one serves."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from linkcpp.common.callers import Headers
from linkcpp.common.errors import LinkcppError
from linkcpp.common.records import Record
from linkcpp.common.text import printable
from linkcpp.common.upgrade import UpgradeError, upgrade_response
from linkcpp.link.accepted import AcceptedLink
from linkcpp.link.handlers import StreamHandler, StreamPort
from linkcpp.link.handshake import (
    Agreed,
    ClusterMember,
    Introduction,
    KnownPeer,
    Machine,
    parse_link_key,
    respond,
)
from linkcpp.link.records import LinkLimits, LinkTimes
from linkcpp.link.supply import Pin
from linkcpp.link.transport import Transport, TransportLostError, WebSocketTransport
from linkcpp.registry.credentials import pin_peer
from linkcpp.registry.edges import EdgeOffer, EdgeRole
from linkcpp.registry.relay import (
    HELLO_DEADLINE_SECONDS,
    PAIRED,
    Hello,
    RelayCloseCode,
    decode_cluster_hello,
    decode_hello,
)
from linkcpp.registry.tickets import HubKey, TicketError, verify_edge_ticket

MAX_LINKS = 64

MAX_STRANGERS = 128
# A coordinator may dial before the hub's offer has come to the node.
_OFFER_SECONDS = 5.0
_SWEEP_SECONDS = 5.0

_log = logging.getLogger(__name__)


class AcceptedStatus(Record):
    """One link at the end that was dialled; ``path`` is ``None`` while no path carries it."""

    link_id: str
    peer_node_id: str
    peer_name: str
    path: str | None
    sent_bytes: int
    received_bytes: int


class LinkUser(NamedTuple):
    """Who opened a stream, and over which link."""

    link_id: str
    machine: Machine


# Says what stands behind a target for a user; raises StreamRefusedError.
ServeUser = Callable[[LinkUser, str, StreamPort], StreamHandler]


class HubIntroduction(NamedTuple):
    """Whose tickets introduce coordinators, and what time it is for them."""

    hub: HubKey
    clock: Callable[[], float] = time.time


class HandedEdge(NamedTuple):
    """An edge of a program: with which machine, and how the program is told of offers.

    ``tell`` raises OSError where the program has ended.
    """

    peer_node_id: str
    tell: Callable[[EdgeOffer], None]


class LinkAcceptor:
    """Takes part in links to this machine; ``serve`` says what their streams lead to.

    Whoever dials is introduced by the cluster's secret (``psk``, ``None`` where this machine has no
    cluster) or by a ticket of ``hub``, which is set while this machine has joined one.
    """

    def __init__(
        self,
        *,
        own_key: X25519PrivateKey,
        own: Machine,
        serve: ServeUser,
        psk: bytes | None = None,
        hub: HubIntroduction | None = None,
        pin: Pin = pin_peer,
        limits: LinkLimits | None = None,
        times: LinkTimes | None = None,
    ) -> None:
        self.hub = hub
        self._own_key = own_key
        self._own = own
        self._serve = serve
        self._psk = psk
        self._pin = pin
        self._limits = limits or LinkLimits()
        self._times = times or LinkTimes()
        self._links: dict[str, AcceptedLink] = {}
        # Edges that a program takes part in by itself, and how it is told of offers.
        self._handed: dict[str, HandedEdge] = {}
        # Links whose first handshake is going on.
        self._met: dict[str, AcceptedLink] = {}
        self._offered = asyncio.Condition()
        # Those who have not proved anything yet, in the order in which they came.
        self._strangers: dict[Transport, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._sweeping = asyncio.create_task(self._sweep())

    @property
    def edge_ids(self) -> tuple[str, ...]:
        """All links that a hub introduced."""
        own = (link_id for link_id, link in self._links.items() if link.offer is not None)
        return (*own, *self._handed)

    def status(self) -> tuple[AcceptedStatus, ...]:
        """Tell what every link does now."""
        return tuple(
            AcceptedStatus(
                link_id=link_id,
                peer_node_id=printable(link.machine.node_id, 64),
                peer_name=printable(link.machine.name, 64),
                path=link.path,
                sent_bytes=link.traffic_bytes[0],
                received_bytes=link.traffic_bytes[1],
            )
            for link_id, link in self._links.items()
        )

    async def offer(self, offer: EdgeOffer) -> None:
        """Take part in a link that the hub introduces, or take another way for one.

        The same offer twice is one.

        Raises:
            LinkcppError: the coordinator is not the one it was, or there are too many links.
        """
        known_peer = self._known_peer(offer)
        if (handed := self._handed.get(offer.edge_id)) is not None:
            self._pass_on(handed, offer)
            return
        async with self._offered:
            if self._is_closed:
                raise LinkcppError("This node's agent stops.")
            known = self._links.get(offer.edge_id)
            if known is None:
                await self._make_room()
                known = self._add(
                    known_peer, known_peer.peer, known_peer.peer_key.public_bytes_raw(), offer
                )
            elif known.machine.node_id != offer.peer_node_id:
                raise LinkcppError("The hub offers an edge of another coordinator than before.")
            elif known.offer is not None and known.offer.ticket == offer.ticket:
                return
            known.renew(offer)
            self._offered.notify_all()

    async def hand_over(self, edge_id: str, handed: HandedEdge) -> None:
        """Let a program take part in an edge, whose offer may have come or not.

        Raises:
            LinkcppError: there are too many.
        """
        if len(self._handed) >= MAX_LINKS:
            raise LinkcppError(f"This node has {MAX_LINKS} links of programs already.")
        self._handed[edge_id] = handed
        link = self._links.get(edge_id)
        if link is not None and link.offer is not None:
            self._pass_on(handed, link.offer)
            del self._links[edge_id]
            await link.aclose(1000, "a program takes part in this edge")

    def _pass_on(self, handed: HandedEdge, offer: EdgeOffer) -> None:
        try:
            if offer.peer_node_id == handed.peer_node_id:
                handed.tell(offer)
        except OSError:  # the program has ended
            self._handed.pop(offer.edge_id, None)

    async def close_link(self, link_id: str, reason: str = "the link was closed") -> None:
        """End a link at once; fine when there is none."""
        self._handed.pop(link_id, None)
        link = self._links.pop(link_id, None)
        if link is not None:
            await link.aclose(RelayCloseCode.REVOKED, reason)

    async def aclose(self) -> None:
        """End all links; nobody is let in afterwards."""
        self._is_closed = True
        self._sweeping.cancel()
        await asyncio.gather(self._sweeping, return_exceptions=True)
        reason = "the node's agent stops"
        await asyncio.gather(*(self.close_link(link_id, reason) for link_id in list(self._links)))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def take(
        self, transport: asyncio.Transport, *, method: bytes, headers: Headers, peer: str
    ) -> None:
        """Serve whoever dialled this machine itself: ``linkcpp.common.http_server.TakeUpgrade``.

        Raises:
            UpgradeError: it does not ask for a WebSocket as it should, or this machine stops.
        """
        if self._is_closed:
            raise UpgradeError(503, "stopping", "This node's agent is stopping.")
        transport.write(upgrade_response(method, headers))
        websocket = WebSocketTransport.accepted()
        transport.set_protocol(websocket)
        websocket.connection_made(transport)
        self._spawn(self.accept_direct(websocket))

    async def accept_direct(self, transport: Transport) -> None:
        """Serve whoever dialled this machine itself, until it leaves."""
        try:
            await self._accept(transport)
        except _RefusedError as error:
            await transport.close(error.code, str(error))
        except TransportLostError as error:
            _log.info("a direct path ended: %s", error.reason)

    async def _accept(self, transport: Transport) -> None:
        if len(self._strangers) >= MAX_STRANGERS:
            # The newcomer may be introduced; who said nothing for longest has least to say.
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            await oldest.close(RelayCloseCode.FULL, "newer ones take its place")
        self._strangers[transport] = None
        try:
            message = await self._first_message(transport)
            link_id = decode_cluster_hello(message)
            if link_id is not None:
                link, agreed = await self._meet_member(transport, link_id)
            else:
                hello = self._read_hello(message)
                link = await self._link_of(hello.edge_id)
                transport.send(PAIRED)
                agreed = await respond(transport, link.introduction, link.answer)
        finally:
            self._strangers.pop(transport, None)
        await link.use(transport, agreed, "direct")

    async def _first_message(self, transport: Transport) -> bytes:
        try:
            async with asyncio.timeout(HELLO_DEADLINE_SECONDS):
                return await transport.receive()
        except TimeoutError:
            raise _RefusedError(RelayCloseCode.HELLO_TIMEOUT, "no hello came") from None

    async def _meet_member(self, transport: Transport, link_id: str) -> tuple[AcceptedLink, Agreed]:
        if self._psk is None:
            raise _RefusedError(RelayCloseCode.UNAUTHORIZED, "this node is not in a cluster")
        member = ClusterMember(self._own_key, self._psk, link_id, self._own)
        # Paths that are opened at the same time speak of the same session.
        link = self._links.get(link_id) or self._met.get(link_id) or self._make(member, self._own)
        self._met[link_id] = link
        try:
            transport.send(PAIRED)
            agreed = await respond(transport, member, link.answer)
        except BaseException:
            # Nothing is kept of whoever did not prove that it has the token.
            self._met.pop(link_id, None)
            raise
        self._met.pop(link_id, None)
        key = agreed.peer_key.public_bytes_raw()
        if link.key not in (None, key):
            raise _RefusedError(RelayCloseCode.UNAUTHORIZED, "this link is another machine's")
        link.machine, link.key = agreed.machine, key
        if link_id not in self._links:
            try:
                await self._make_room()
            except LinkcppError as error:
                raise _RefusedError(RelayCloseCode.FULL, error.message) from None
        if self._is_closed or self._links.setdefault(link_id, link) is not link:
            raise _RefusedError(RelayCloseCode.REPLACED, "another path came first")
        return link, agreed

    def _read_hello(self, message: bytes) -> Hello:
        if self.hub is None:
            raise _RefusedError(RelayCloseCode.UNAUTHORIZED, "this node did not join a hub")
        try:
            hello = decode_hello(message)
            claims = verify_edge_ticket(self.hub.hub, hello.ticket, now=self.hub.clock())
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

    async def _link_of(self, edge_id: str) -> AcceptedLink:
        try:
            async with asyncio.timeout(_OFFER_SECONDS), self._offered:
                await self._offered.wait_for(lambda: edge_id in self._links)
        except TimeoutError:
            raise _RefusedError(
                RelayCloseCode.NO_PEER, "the hub has not told this node of the edge"
            ) from None
        return self._links[edge_id]

    def _known_peer(self, offer: EdgeOffer) -> KnownPeer:
        if self.hub is None or offer.role is not EdgeRole.NODE:
            raise LinkcppError("That is not an offer for this node.")
        if offer.hub_id != self.hub.hub.hub_id:
            raise LinkcppError("That is not an offer of this node's hub.")
        self._pin(offer.hub_id, offer.peer_node_id, offer.peer_public_key)
        try:
            peer_key = parse_link_key(offer.peer_public_key)
        except ValueError:
            raise LinkcppError("The hub gave an unusable key for a coordinator.") from None
        peer = Machine(offer.peer_node_id, offer.peer_name)
        return KnownPeer(self._own_key, peer_key, offer.edge_id, self._own, peer)

    async def _make_room(self) -> None:
        if len(self._links) < MAX_LINKS:
            return
        idle = [(link.idle_since, known) for known, link in self._links.items() if not link.path]
        if not idle:
            raise LinkcppError(f"This node has {MAX_LINKS} links already.")
        await self.close_link(min(idle)[1], "newer links take its place")

    def _add(
        self, introduction: Introduction, machine: Machine, key: bytes, offer: EdgeOffer
    ) -> AcceptedLink:
        link = self._links[introduction.link_id] = self._make(introduction, machine, key, offer)
        return link

    def _make(
        self,
        introduction: Introduction,
        machine: Machine,
        key: bytes | None = None,
        offer: EdgeOffer | None = None,
    ) -> AcceptedLink:
        link_id = introduction.link_id

        def serve(target: str, port: StreamPort) -> StreamHandler:
            return self._serve(LinkUser(link_id, link.machine), target, port)

        link = AcceptedLink(
            introduction,
            machine,
            key,
            serve=serve,
            on_goodbye=lambda: self._said_goodbye(link_id),
            limits=self._limits,
            times=self._times,
            offer=offer,
        )
        return link

    def _said_goodbye(self, link_id: str) -> None:
        self._spawn(self.close_link(link_id, "the other side closed it"))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _sweep(self) -> None:
        """Forget links that nobody used in a long time."""
        while True:
            await asyncio.sleep(min(_SWEEP_SECONDS, self._times.forgotten))
            for link_id, link in list(self._links.items()):
                if link.path is None and link.is_forgotten:
                    await self.close_link(link_id, "no path carried it for a long time")


class _RefusedError(Exception):
    def __init__(self, code: RelayCloseCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
