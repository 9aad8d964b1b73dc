"""What nodes tell of themselves in the database: many rows with one statement."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, update

from linkcpp.hub.schema import MACHINES


class HeartbeatRow(NamedTuple):
    """One heartbeat; ``state`` is JSON, or ``None`` where it did not change."""

    node_id: str
    last_seen: float
    state: str | None


class LeaveRow(NamedTuple):
    """A node is not there until its next heartbeat."""

    node_id: str
    left_at: float


_OF_NODE = update(MACHINES).where(MACHINES.c.node_id == bindparam("id"))
# A heartbeat takes an earlier leave back by coming after it, whatever the clock showed at either:
# it may have been set back between them.
_SEEN = _OF_NODE.values(last_seen=bindparam("seen"), left_at=None)
_SEEN_WITH_STATE = _SEEN.values(state=bindparam("new_state"))
_LEFT = _OF_NODE.values(left_at=bindparam("left"))


def write_heartbeats(connection: Connection, rows: Sequence[HeartbeatRow | LeaveRow]) -> None:
    """Write them as if one by one in the order in which they came.

    In each statement they are in the order of their ids, so that no two transactions wait for each
    other.
    """
    plain: list[dict[str, Any]] = []
    whole: list[dict[str, Any]] = []
    beats, leaves = _last_of_each(rows)
    for row in beats:
        values = {"id": row.node_id, "seen": row.last_seen}
        if row.state is None:
            plain.append(values)
        else:
            whole.append(values | {"new_state": row.state})
    if plain:
        connection.execute(_SEEN, plain)
    if whole:
        connection.execute(_SEEN_WITH_STATE, whole)
    if leaves:
        connection.execute(_LEFT, [{"id": row.node_id, "left": row.left_at} for row in leaves])


def _last_of_each(
    rows: Sequence[HeartbeatRow | LeaveRow],
) -> tuple[list[HeartbeatRow], list[LeaveRow]]:
    """Return each node's last heartbeat, with the last state, and its leave if that came later."""
    beats: dict[str, HeartbeatRow] = {}
    leaves: dict[str, LeaveRow] = {}
    for row in rows:
        if isinstance(row, LeaveRow):
            leaves[row.node_id] = row
            continue
        leaves.pop(row.node_id, None)
        earlier = beats.get(row.node_id, row)
        beats[row.node_id] = row._replace(state=row.state or earlier.state)
    return [beats[node_id] for node_id in sorted(beats)], [leaves[key] for key in sorted(leaves)]
