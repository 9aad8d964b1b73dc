"""Heartbeats in the database: many rows with one statement."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, update

from linkcpp.hub.schema import MACHINES


class HeartbeatRow(NamedTuple):
    """One heartbeat; ``state`` is JSON, or ``None`` where it did not change."""

    node_id: str
    last_seen: float
    sequence: int
    state: str | None


_SEEN = (
    update(MACHINES)
    .where(MACHINES.c.node_id == bindparam("id"))
    .values(last_seen=bindparam("seen"), sequence=bindparam("number"))
)
_SEEN_WITH_STATE = _SEEN.values(state=bindparam("new_state"))


def write_heartbeats(connection: Connection, rows: Sequence[HeartbeatRow]) -> None:
    """Write them in the order of their ids, so that no two transactions wait for each other."""
    plain: list[dict[str, Any]] = []
    whole: list[dict[str, Any]] = []
    for row in sorted(rows):
        values = {"id": row.node_id, "seen": row.last_seen, "number": row.sequence}
        if row.state is None:
            plain.append(values)
        else:
            whole.append(values | {"new_state": row.state})
    if plain:
        connection.execute(_SEEN, plain)
    if whole:
        connection.execute(_SEEN_WITH_STATE, whole)
