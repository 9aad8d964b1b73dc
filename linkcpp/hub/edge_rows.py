"""Edges in the database."""

from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, delete, insert, or_, select, update

from linkcpp.hub.directory import Edge
from linkcpp.hub.errors import revoked
from linkcpp.hub.machines import unknown_machine
from linkcpp.hub.schema import EDGES, MACHINES

# How long rows of closed edges are kept.
KEPT_SECONDS = 7 * 86400.0


def insert_edge(connection: Connection, edge: Edge) -> None:
    """Enter an edge, and delete rows of those that were closed long ago.

    Raises:
        ApiError: one of its machines was revoked meanwhile. There is one writer, so no revocation
            comes between this look and the row.
    """
    both = (edge.backbone_node_id, edge.node_id)
    machine = MACHINES.c
    unwanted = connection.execute(
        select(machine.node_id).where(machine.node_id.in_(both), machine.revoked_at.is_not(None))
    ).scalars()
    for node_id in unwanted:
        raise revoked() if node_id == edge.backbone_node_id else unknown_machine()
    connection.execute(delete(EDGES).where(EDGES.c.closed_at < edge.created_at - KEPT_SECONDS))
    connection.execute(
        insert(EDGES).values(
            edge_id=edge.edge_id,
            backbone_node_id=edge.backbone_node_id,
            node_id=edge.node_id,
            gateway_id=edge.gateway_id,
            created_at=edge.created_at,
        )
    )


def update_gateways(connection: Connection, changes: Sequence[tuple[Edge, str | None]]) -> None:
    """Note the gateways that edges moved to."""
    for edge, gateway_id in changes:
        change = update(EDGES).where(EDGES.c.edge_id == edge.edge_id)
        connection.execute(change.values(gateway_id=gateway_id))


def close_edges(connection: Connection, edges: Iterable[Edge], now: float) -> None:
    """Note that edges ended."""
    for edge in edges:
        change = update(EDGES).where(EDGES.c.edge_id == edge.edge_id)
        connection.execute(change.values(closed_at=now))


def close_edges_of(connection: Connection, node_id: str, now: float) -> None:
    """Note that all open edges of a machine ended."""
    is_side = or_(EDGES.c.backbone_node_id == node_id, EDGES.c.node_id == node_id)
    change = update(EDGES).where(is_side, EDGES.c.closed_at.is_(None))
    connection.execute(change.values(closed_at=now))
