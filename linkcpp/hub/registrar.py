"""Machines as the API sees them: joining, new tokens, heartbeats, revocation."""

import contextlib
from collections.abc import Callable

from sqlalchemy import Connection

from linkcpp.hub import machines
from linkcpp.hub.directory import Directory, Gateway, Machine
from linkcpp.hub.edge_rows import close_edges_of
from linkcpp.hub.edges import Edges
from linkcpp.hub.errors import ApiError, revoked
from linkcpp.hub.events import EventSockets
from linkcpp.hub.heartbeat_rows import HeartbeatRow, LeaveRow
from linkcpp.hub.identity import HubIdentity
from linkcpp.hub.nonces import NonceMemory
from linkcpp.hub.presence_probe import PresenceProbe
from linkcpp.hub.schema import GATEWAYS
from linkcpp.hub.writer import Writer
from linkcpp.registry.edges import (
    GATEWAY_HEARTBEAT_SECONDS,
    GatewayHeartbeat,
    GatewayHeartbeatAnswer,
    GatewayList,
    GatewayRecord,
)
from linkcpp.registry.proofs import is_in_time, is_join_proven, is_renewal_proven
from linkcpp.registry.records import (
    HEARTBEAT_SECONDS,
    Heartbeat,
    HeartbeatAnswer,
    JoinAnswer,
    JoinRequest,
    NodeToken,
    Proof,
    RenewRequest,
    Role,
)
from linkcpp.registry.tickets import NODE_TOKEN_SECONDS


class Registrar:
    """Who belongs to a hub, and who is there."""

    def __init__(
        self,
        identity: HubIdentity,
        directory: Directory,
        writer: Writer,
        events: EventSockets,
        edges: Edges,
        *,
        presence_probe: PresenceProbe,
        clock: Callable[[], float],
    ) -> None:
        self._identity = identity
        self._directory = directory
        self._writer = writer
        self._events = events
        self._edges = edges
        self._presence_probe = presence_probe
        self._clock = clock
        self._nonces = NonceMemory(clock())

    async def join(self, request: JoinRequest) -> JoinAnswer:
        """Enter a machine that has a join token.

        Raises:
            ApiError: the token or the proof is not taken, or the id is another's.
        """
        if request.node_id == self._identity.hub_id:
            raise ApiError(
                409,
                "hub_id",
                "That id is the hub's own.",
                hint="Give the machine an id of its own: delete its identity and join again.",
            )
        if not is_join_proven(request, hub_id=self._identity.hub_id):
            raise _wrong_proof()
        self._check_fresh(request.proof)
        now = self._clock()
        machine = await self._writer.write(
            lambda connection: machines.join(connection, request, now)
        )
        self._directory.machines[machine.node_id] = machine
        return JoinAnswer.model_validate(
            {
                "hub_id": self._identity.hub_id,
                "hub_public_key": self._identity.public_key,
                "node_token": self._issue(machine),
            }
        )

    def renew(self, request: RenewRequest) -> NodeToken:
        """Give a machine that proves its key a new token.

        Raises:
            ApiError: it is not known, was revoked, or the proof is not taken.
        """
        machine = self._directory.machines.get(request.node_id)
        key = machine.signing_key if machine else ""
        if machine is None or not is_renewal_proven(
            request, hub_id=self._identity.hub_id, signing_key=key
        ):
            # Strangers learn nothing of who joined.
            raise _wrong_proof()
        self._check_fresh(request.proof)
        if machine.revoked_at is not None:
            raise revoked()
        return self._issue(machine)

    async def heartbeat(self, node_id: str, body: Heartbeat) -> HeartbeatAnswer | None:
        """Note that a node is alive; durable when this returns.

        ``None`` stands for the answer that has nothing new, which is nearly every one.

        Raises:
            ApiError: it tells of another machine.
        """
        now = self._clock()
        if body.state is not None and body.state.record.node_id != node_id:
            raise ApiError(
                422,
                "other_machine",
                "A node can tell only of itself.",
                hint="Its id changed while it ran: start `linkcpp join` again.",
            )
        left_before = self._directory.machines[node_id].left_at
        state = body.state.model_dump_json() if body.state is not None else None
        await self._writer.heartbeat(HeartbeatRow(node_id, now, state))
        # Only now: it may have joined again meanwhile.
        machine = self._directory.machines[node_id]
        machine.last_seen = now
        if machine.left_at == left_before:  # else it left while this was written
            machine.left_at = None
            self._presence_probe.heard(node_id)
        if body.state is not None:
            machine.take_state(body.state)
        offers = self._edges.take_waiting(node_id)
        unwanted = self._edges.see(body.edges, node_id) if body.edges else ()
        if machine.has_state and not offers and not unwanted:
            return None
        return HeartbeatAnswer(
            interval_seconds=HEARTBEAT_SECONDS,
            wants_state=not machine.has_state,
            offers=offers,
            close_edges=unwanted,
        )

    async def leave(self, node_id: str) -> None:
        """Note that a node stops; its next heartbeat brings it back. Its edges wait for that."""
        now = self._clock()
        self._directory.machines[node_id].left_at = now
        self._presence_probe.lost(node_id)
        await self._writer.heartbeat(LeaveRow(node_id, now))

    async def revoke(self, node_id: str) -> ApiError | None:
        """Cut a machine off at once: its tokens, its events and its edges.

        Returns why that could not be written yet, if so.

        Raises:
            ApiError: there is no such machine.
        """
        now = self._clock()

        def revoke(connection: Connection) -> None:
            machines.revoke(connection, node_id, now)
            close_edges_of(connection, node_id, now)

        self._cut_off(node_id, now)
        unwritten = await self._writer.take_away(revoke)
        # Once more: what was being written just then, it may have got back.
        self._cut_off(node_id, now)
        return unwritten

    def _cut_off(self, node_id: str, now: float) -> None:
        machine = self._directory.machines.get(node_id)
        if machine is None:
            raise machines.unknown_machine()
        machine.revoked_at = now
        self._events.revoke(node_id)
        self._edges.forget_all_of(node_id)

    async def gateway_heartbeat(
        self, gateway_id: str, body: GatewayHeartbeat
    ) -> GatewayHeartbeatAnswer:
        """Note that a gateway is alive, and say which of its edges may not stay."""
        return GatewayHeartbeatAnswer(
            interval_seconds=GATEWAY_HEARTBEAT_SECONDS,
            close_edges=await self.see_gateway(gateway_id, body.url, body.edges),
        )

    async def see_gateway(
        self, gateway_id: str, url: str, edge_ids: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Note a gateway at ``url``, empty for the hub's own; return its edges that must go."""
        now = self._clock()
        values = {"url": url, "edge_count": len(edge_ids), "last_seen": now}
        # What it may not carry any more it is told also where this cannot be written.
        with contextlib.suppress(ApiError):
            await self._writer.write(
                lambda connection: machines.upsert(
                    connection, GATEWAYS, GATEWAYS.c.gateway_id, gateway_id, values
                )
            )
        self._directory.gateways[gateway_id] = Gateway(gateway_id, url, len(edge_ids), now)
        return self._edges.see(edge_ids, gateway_id)

    async def enter_embedded_gateway(self) -> None:
        """Enter the hub itself as a gateway, though it was revoked before."""
        now = self._clock()
        machine = Machine(
            node_id=self._identity.hub_id,
            name="the hub itself",
            role=Role.GATEWAY,
            signing_key=self._identity.public_key,
            edge_key=self._identity.public_key,
            token_id="",
            joined_at=now,
            revoked_at=None,
            last_seen=None,
            has_state=False,
        )
        await self._writer.write(lambda connection: machines.enter(connection, machine))
        self._directory.machines[machine.node_id] = machine

    def gateways(self) -> GatewayList:
        """List the gateways that are not revoked."""
        now = self._clock()
        listed = []
        for gateway in self._directory.gateways.values():
            machine = self._directory.machines[gateway.gateway_id]
            if machine.revoked_at is None:
                fields = {
                    "gateway_id": gateway.gateway_id,
                    "name": machine.name,
                    "url": gateway.url or None,
                    "edge_count": gateway.edge_count,
                    "is_online": self._directory.is_online(gateway.gateway_id, now),
                    "last_seen": gateway.last_seen,
                }
                listed.append(GatewayRecord.model_validate(fields))
        return GatewayList(gateways=tuple(listed))

    def told_time(self) -> float:
        """Return the hub's time for proofs that are made with it."""
        now = self._clock()
        self._nonces.note_time(now)
        return now

    def _issue(self, machine: Machine) -> NodeToken:
        return self._identity.issue(
            machine.node_id,
            machine.role,
            now=self._clock(),
            lifetime_seconds=NODE_TOKEN_SECONDS,
            joined_at=machine.joined_at,
        )

    def _check_fresh(self, proof: Proof) -> None:
        now = self._clock()
        if not is_in_time(proof, now):
            raise ApiError(
                401,
                "proof_out_of_time",
                "The proof was not made now, or the hub's clock was set meanwhile.",
                hint="Try again: proofs use the time that the hub tells then.",
            )
        if not self._nonces.is_new(proof.nonce, proof.time, now):
            raise ApiError(
                401,
                "proof_used",
                "This proof was used before, or the hub's clock was set back meanwhile.",
                hint="Try again: proofs are used once, and use the time that the hub tells then.",
            )


def _wrong_proof() -> ApiError:
    return ApiError(
        401,
        "wrong_proof",
        "This machine does not prove a key that this hub knows.",
        hint="`linkcpp join URL --token …` lets it in.",
    )
