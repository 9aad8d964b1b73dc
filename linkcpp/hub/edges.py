"""Edges: made for coordinators, told to both sides, moved when a gateway goes away, closed."""

import math
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from linkcpp.common.access import RateLimit
from linkcpp.hub.assignment import choose_gateway
from linkcpp.hub.directory import Directory, Edge, Machine, PendingOffer
from linkcpp.hub.edge_rows import close_edges, insert_edge, update_gateways
from linkcpp.hub.errors import ApiError
from linkcpp.hub.events import EventSockets
from linkcpp.hub.identity import HubIdentity
from linkcpp.hub.machines import unknown_machine
from linkcpp.hub.presence import presence
from linkcpp.hub.presence_probe import PresenceProbe
from linkcpp.hub.writer import Writer
from linkcpp.registry.edges import (
    NODE_GONE,
    NODE_REVOKED,
    CloseEvent,
    EdgeEvent,
    EdgeList,
    EdgeOffer,
    EdgeRecord,
    EdgeRequest,
    EdgeRole,
    OfferRequest,
)
from linkcpp.registry.records import Presence, Role
from linkcpp.registry.relay import PAIRING_SECONDS
from linkcpp.registry.tickets import EDGE_TICKET_SECONDS, EdgeClaims, sign_edge_ticket

# An edge of which neither a gateway nor its node told anything for so long is closed.
UNSEEN_SECONDS = 15 * 60.0
_MAX_EDGES_PER_MACHINE = 256
# A link for each machine and for each program that has its own. So that one coordinator does not
# take all that a node may have. An edge of which nobody told for
# longer than a few heartbeats does not count: its coordinator was killed.
_MAX_EDGES_PER_PAIR = 64
_TOLD_LATELY_SECONDS = 60.0
_CREATIONS_AT_ONCE = 128
_SECONDS_PER_CREATION = 1.0
# All edges of a machine may lose their gateway at once, and then look for other ways again and
# again; who is refused goes on with the offer that it has, and asks again.
_RENEWALS_AT_ONCE = 4 * _MAX_EDGES_PER_MACHINE
_SECONDS_PER_RENEWAL = 0.05


class Edges:
    """The open edges of a hub."""

    def __init__(
        self,
        identity: HubIdentity,
        directory: Directory,
        writer: Writer,
        events: EventSockets,
        *,
        presence_probe: PresenceProbe,
        clock: Callable[[], float],
    ) -> None:
        self._identity = identity
        self._directory = directory
        self._writer = writer
        self._events = events
        self._presence_probe = presence_probe
        self._clock = clock
        self._creations = _limit(_CREATIONS_AT_ONCE, _SECONDS_PER_CREATION)
        self._renewals = _limit(_RENEWALS_AT_ONCE, _SECONDS_PER_RENEWAL)

    async def create(self, backbone_id: str, request: EdgeRequest) -> EdgeOffer:
        """Make an edge, tell the node, and return the coordinator's offer.

        Raises:
            ApiError: there is no such node, it is gone or does not answer, one of the two has too
                many edges, or was revoked meanwhile.
        """
        _check_rate(self._creations, backbone_id, "too many edges")
        self._check_node(backbone_id, request.node_id, self._clock())
        if await self._presence_probe.silent((request.node_id,)):
            name = self._directory.machines[request.node_id].name
            raise _gone(f"The node {name} does not answer this hub.")
        now = self._clock()
        self._check_node(backbone_id, request.node_id, now)
        self._check_counts(backbone_id, request.node_id, now)
        edge = Edge(
            edge_id=uuid.uuid4().hex,
            backbone_node_id=backbone_id,
            node_id=request.node_id,
            gateway_id=None,
            created_at=now,
            last_seen=now,
            avoid=request.not_gateways,
            rtts_ms={str(key): rtt for key, rtt in request.relay_rtts_ms.items()},
        )
        edge.gateway_id = self._choose(edge, now)
        self._directory.pending_edges[edge.edge_id] = edge
        try:
            await self._writer.write(lambda connection: insert_edge(connection, edge))
        finally:
            del self._directory.pending_edges[edge.edge_id]
        # A revocation that is committed later than this row ends its wait later, and finds it here.
        self._directory.edges[edge.edge_id] = edge
        self._tell(edge, EdgeRole.NODE)
        return self._offer(edge, EdgeRole.BACKBONE)

    async def renew(self, backbone_id: str, edge_id: str, request: OfferRequest) -> EdgeOffer:
        """Give both sides another offer for an edge whose way was lost.

        Raises:
            ApiError: the edge is closed, or another machine's, or this one asks too often.
        """
        _check_rate(self._renewals, backbone_id, "other ways for its edges too often")
        edge = self._directory.edges.get(edge_id)
        if edge is None or edge.backbone_node_id != backbone_id:
            raise _unknown_edge()
        edge.avoid = request.not_gateways
        if request.relay_rtts_ms:
            edge.rtts_ms = {str(key): rtt for key, rtt in request.relay_rtts_ms.items()}
        now = edge.last_seen = self._clock()
        await self._assign([(edge, self._choose(edge, now))])
        if edge_id not in self._directory.edges:
            raise _unknown_edge()
        self._tell(edge, EdgeRole.NODE)
        return self._offer(edge, EdgeRole.BACKBONE)

    async def close(self, machine_id: str, edge_id: str, *, is_admin: bool) -> ApiError | None:
        """End an edge at once; fine when it is closed already, or was another machine's.

        Returns why that could not be written yet, if so.
        """
        edge = self._directory.edges.get(edge_id)
        if edge is not None and (is_admin or machine_id == edge.backbone_node_id):
            return await self._close([edge])
        return None

    def forget_all_of(self, node_id: str) -> None:
        """End all edges of a machine that is revoked; their rows end with its own."""
        self._forget(self._directory.edges_of(node_id))

    def records(self) -> EdgeList:
        """List the open edges, the oldest first."""
        edges = sorted(self._directory.edges.values(), key=lambda edge: edge.created_at)
        listed = (
            {name: getattr(edge, name, None) for name in EdgeRecord.model_fields} for edge in edges
        )
        return EdgeList(edges=tuple(EdgeRecord.model_validate(fields) for fields in listed))

    def see(self, edge_ids: Iterable[str], reporter_id: str) -> tuple[str, ...]:
        """Note that a node or gateway has these edges; return those that it may not have."""
        now = self._clock()
        unwanted = []
        for edge_id in edge_ids:
            edge = self._directory.edges.get(edge_id)
            if edge is not None and reporter_id in (edge.gateway_id, edge.node_id):
                edge.last_seen = now
            else:
                unwanted.append(edge_id)
        return tuple(unwanted)

    def take_waiting(self, node_id: str) -> tuple[EdgeOffer, ...]:
        """Return the offers that a node was not told in a heartbeat's answer yet."""
        waiting = self._directory.waiting.pop(node_id, None)
        if not waiting:
            return ()
        now = self._clock()
        return tuple(one.offer for one in waiting.values() if one.until > now)

    async def move_lost(self) -> None:
        """Give edges whose gateway is not there any more another one, if there is one."""
        now = self._clock()
        moves = []
        for edge in list(self._directory.edges.values()):
            if not self._directory.is_online(edge.gateway_id, now):
                gateway_id = self._choose(edge, now)
                if gateway_id is not None:
                    moves.append((edge, gateway_id))
        await self._assign(moves)
        for edge, _ in moves:
            self._tell(edge, EdgeRole.NODE)
            self._tell(edge, EdgeRole.BACKBONE)

    async def close_unseen(self) -> None:
        """End edges that both sides seem to have forgotten."""
        limit = self._clock() - UNSEEN_SECONDS
        edges = self._directory.edges.values()
        await self._close([edge for edge in edges if edge.last_seen < limit])

    def _check_node(self, backbone_id: str, node_id: str, now: float) -> None:
        node = self._directory.machines.get(node_id)
        if node is None or node_id == backbone_id:
            raise unknown_machine()
        if node.revoked_at is not None:
            raise ApiError(
                409,
                NODE_REVOKED,
                f"The node {node.name} was revoked.",
                hint="An admin of the hub lets it in again with a new join token.",
            )
        if node.role is not Role.NODE:
            raise ApiError(409, "not_a_node", f"{node.name} joined as {node.role}, not as node.")
        if presence(node.last_seen, now, node.left_at) is Presence.GONE:
            has_left = node.left_at is not None
            what = "was stopped" if has_left else "did not tell of itself for a while"
            raise _gone(f"The node {node.name} {what}.")

    def _check_counts(self, backbone_id: str, node_id: str, now: float) -> None:
        edges = self._directory.edges_of(backbone_id, with_pending=True)
        limit = now - _TOLD_LATELY_SECONDS
        between = [edge for edge in edges if edge.node_id == node_id and edge.last_seen >= limit]
        if len(between) >= _MAX_EDGES_PER_PAIR:
            raise ApiError(
                409,
                "too_many_edges",
                f"This machine has {len(between)} edges to that node already.",
                hint="Stop a coordinator that uses the node, or wait a minute if it was killed.",
            )
        if len(edges) >= _MAX_EDGES_PER_MACHINE:
            raise ApiError(409, "too_many_edges", "This machine has too many edges already.")
        if len(self._directory.edges_of(node_id, with_pending=True)) >= _MAX_EDGES_PER_MACHINE:
            raise ApiError(409, "too_many_edges", "That node has too many edges already.")

    def _choose(self, edge: Edge, now: float) -> str | None:
        node = self._directory.machines.get(edge.node_id)
        return choose_gateway(
            self._directory.online(now),
            avoid=edge.avoid,
            rtts_ms=(edge.rtts_ms, node.relay_rtts_ms if node else {}),
        )

    async def _assign(self, moves: Sequence[tuple[Edge, str | None]]) -> None:
        changes = [move for move in moves if move[0].gateway_id != move[1]]
        if not changes:
            return
        await self._writer.write(lambda connection: update_gateways(connection, changes))
        for edge, gateway_id in changes:
            edge.gateway_id = gateway_id

    async def _close(self, edges: list[Edge]) -> ApiError | None:
        if not edges:
            return None
        now = self._clock()
        self._forget(edges)
        return await self._writer.take_away(lambda connection: close_edges(connection, edges, now))

    def _forget(self, edges: Iterable[Edge]) -> None:
        for edge in edges:
            self._directory.edges.pop(edge.edge_id, None)
            for machine_id in (edge.node_id, edge.backbone_node_id):
                self._directory.waiting.get(machine_id, {}).pop(edge.edge_id, None)
                self._events.push(machine_id, CloseEvent(edge_id=edge.edge_id))

    def _tell(self, edge: Edge, role: EdgeRole) -> None:
        if edge.edge_id not in self._directory.edges:
            return  # closed while its gateway was noted
        offer = self._offer(edge, role)
        me, _ = self._sides(edge, role)
        self._events.push(me.node_id, EdgeEvent(offer=offer))
        if role is EdgeRole.NODE:
            waiting = self._directory.waiting.setdefault(me.node_id, {})
            waiting[edge.edge_id] = PendingOffer(offer, self._clock() + PAIRING_SECONDS)

    def _offer(self, edge: Edge, role: EdgeRole) -> EdgeOffer:
        me, peer = self._sides(edge, role)
        expires_at = self._clock() + EDGE_TICKET_SECONDS
        gateway = self._directory.gateways.get(edge.gateway_id or "")
        machine = self._directory.machines.get(edge.gateway_id or "")
        claims: dict[str, Any] = {
            "iss": self._identity.hub_id,
            "sub": me.node_id,
            "edge": edge.edge_id,
            "role": role,
            "gateway": edge.gateway_id,
            "exp": expires_at,
        }
        offer = {
            "edge_id": edge.edge_id,
            "role": role,
            "gateway_id": edge.gateway_id,
            "gateway_name": machine.name if machine else None,
            "relay_url": (gateway.url or None) if gateway else None,
            "ticket": sign_edge_ticket(self._identity.signing, EdgeClaims.model_validate(claims)),
            "peer_node_id": peer.node_id,
            "peer_name": peer.name,
            "peer_public_key": peer.edge_key,
            "direct_urls": peer.direct_urls if role is EdgeRole.BACKBONE else (),
            "hub_id": self._identity.hub_id,
            "expires_at": expires_at,
        }
        return EdgeOffer.model_validate(offer)

    def _sides(self, edge: Edge, role: EdgeRole) -> tuple[Machine, Machine]:
        machines = self._directory.machines
        backbone, node = machines[edge.backbone_node_id], machines[edge.node_id]
        return (backbone, node) if role is EdgeRole.BACKBONE else (node, backbone)


def _limit(tries: int, seconds_per_try: float) -> RateLimit:
    return RateLimit(tries=tries, seconds_per_try=seconds_per_try, max_addresses=65_536)


def _check_rate(limit: RateLimit, backbone_id: str, what: str) -> None:
    wait_seconds = limit.take(backbone_id)
    if wait_seconds is not None:
        raise ApiError(
            429,
            "too_many_calls",
            f"This machine asks for {what}.",
            hint=f"Wait {math.ceil(wait_seconds)} s.",
            retry_after_seconds=wait_seconds,
        )


def _gone(message: str) -> ApiError:
    hint = "See that `linkcpp join` runs there and that the machine is awake."
    return ApiError(409, NODE_GONE, message, hint=hint)


def _unknown_edge() -> ApiError:
    return ApiError(404, "unknown_edge", "There is no such edge.", hint="Ask for a new one.")
