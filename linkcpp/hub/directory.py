"""What every call looks at, kept in memory: machines, gateways and open edges.

The database is the truth; this follows it. Each change is committed first and noted here then, on
the event loop, so that no call sees what a kill could take back. Only what takes rights away is
noted here first: it holds though the database cannot be written to.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sqlalchemy import Engine, select

from linkcpp.hub.assignment import Candidate
from linkcpp.hub.clock_steps import seen_since
from linkcpp.hub.presence import is_gateway_online, presence
from linkcpp.hub.schema import EDGES, GATEWAYS, MACHINES
from linkcpp.registry.edges import EdgeOffer
from linkcpp.registry.records import NodeState, Presence, Role


@dataclass(slots=True)
class Machine:
    """A machine that joined; ``has_state`` tells whether a whole heartbeat came since it did."""

    node_id: str
    name: str
    role: Role
    signing_key: str
    edge_key: str
    token_id: str
    joined_at: float
    revoked_at: float | None
    last_seen: float | None
    has_state: bool
    left_at: float | None = None
    direct_urls: tuple[str, ...] = ()
    relay_rtts_ms: Mapping[str, float] = field(default_factory=dict)

    def take_state(self, state: NodeState) -> None:
        """Note what edges need of a node's state."""
        self.has_state = True
        self.direct_urls = state.direct_urls
        self.relay_rtts_ms = {str(key): rtt for key, rtt in state.relay_rtts_ms.items()}


@dataclass(slots=True)
class Gateway:
    """A relay, by the id of the machine that it is."""

    gateway_id: str
    url: str
    edge_count: int
    last_seen: float


@dataclass(slots=True)
class Edge:
    """An open edge. ``last_seen`` is when a gateway or the node last told of it.

    ``avoid`` are gateways through which it failed; ``rtts_ms`` are the coordinator's round trips.
    """

    edge_id: str
    backbone_node_id: str
    node_id: str
    gateway_id: str | None
    created_at: float
    last_seen: float
    avoid: tuple[str, ...] = ()
    rtts_ms: Mapping[str, float] = field(default_factory=dict)


class PendingOffer(NamedTuple):
    """An offer that its machine may not have got yet."""

    offer: EdgeOffer
    until: float


class Directory:
    """Machines, gateways and edges by their ids."""

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self.gateways: dict[str, Gateway] = {}
        self.edges: dict[str, Edge] = {}
        # Those whose rows are being written: nobody is told of them yet, but limits count them.
        self.pending_edges: dict[str, Edge] = {}
        # By machine and edge: what the next heartbeat is answered with.
        self.waiting: dict[str, dict[str, PendingOffer]] = {}

    def online(self, now: float) -> list[Candidate]:
        """Return the gateways that may be given edges, with how many they have or will have."""
        counts: dict[str | None, int] = {}
        for edge in self.edges.values():
            counts[edge.gateway_id] = counts.get(edge.gateway_id, 0) + 1
        return [
            Candidate(gateway.gateway_id, counts.get(gateway.gateway_id, 0))
            for gateway in self.gateways.values()
            if self.is_online(gateway.gateway_id, now)
        ]

    def is_online(self, gateway_id: str | None, now: float) -> bool:
        """Tell whether a gateway is there and still wanted."""
        gateway = self.gateways.get(gateway_id or "")
        machine = self.machines.get(gateway_id or "")
        if gateway is None or machine is None or machine.revoked_at is not None:
            return False
        return machine.role is Role.GATEWAY and is_gateway_online(gateway.last_seen, now)

    def nodes_online(self, now: float) -> list[str]:
        """Return the nodes that are there by their heartbeats."""
        return [
            machine.node_id
            for machine in self.machines.values()
            if machine.role is Role.NODE
            and machine.revoked_at is None
            and presence(machine.last_seen, now, machine.left_at) is Presence.ONLINE
        ]

    def is_revoked(self, node_id: str) -> bool:
        """Tell whether a machine is not wanted any more, or never joined."""
        machine = self.machines.get(node_id)
        return machine is None or machine.revoked_at is not None

    def revoked_ids(self) -> frozenset[str]:
        """Return the machines that are not wanted any more."""
        return frozenset(
            node_id for node_id, one in self.machines.items() if one.revoked_at is not None
        )

    def follow_clock(self, step: float, now: float) -> None:
        """Keep how long ago machines, gateways and edges were seen, when the clock was set."""
        for machine in self.machines.values():
            if machine.last_seen is not None:
                machine.last_seen = seen_since(machine.last_seen, step, now)
        for gateway in self.gateways.values():
            gateway.last_seen = seen_since(gateway.last_seen, step, now)
        for edge in self.edges.values():
            edge.last_seen = seen_since(edge.last_seen, step, now)

    def edges_of(self, node_id: str, *, with_pending: bool = False) -> list[Edge]:
        """Return the open edges that a machine is a side of."""
        pending = self.pending_edges.values() if with_pending else ()
        edges = (*self.edges.values(), *pending)
        return [edge for edge in edges if node_id in (edge.node_id, edge.backbone_node_id)]


def load_directory(engine: Engine, now: float) -> Directory:
    """Read it from the database when the hub starts.

    Gateways and edges count as seen now: they had no chance to tell of themselves meanwhile.
    """
    directory = Directory()
    with engine.connect() as connection:
        for row in connection.execute(select(MACHINES)):
            machine = Machine(
                node_id=row.node_id,
                name=row.name,
                role=Role(row.role),
                signing_key=row.signing_key,
                edge_key=row.edge_key,
                token_id=row.token_id,
                joined_at=row.joined_at,
                revoked_at=row.revoked_at,
                last_seen=row.last_seen,
                has_state=row.state is not None,
                left_at=row.left_at,
            )
            if row.state is not None:
                machine.take_state(NodeState.model_validate_json(row.state))
            directory.machines[row.node_id] = machine
        for row in connection.execute(select(GATEWAYS)):
            directory.gateways[row.gateway_id] = Gateway(
                row.gateway_id, row.url, row.edge_count, now
            )
        for row in connection.execute(select(EDGES).where(EDGES.c.closed_at.is_(None))):
            directory.edges[row.edge_id] = Edge(
                row.edge_id,
                row.backbone_node_id,
                row.node_id,
                row.gateway_id,
                row.created_at,
                now,
            )
    return directory
