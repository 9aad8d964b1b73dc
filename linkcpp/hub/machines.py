"""Machines in the database: joining, listing, revoking."""

import json
from collections import deque
from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Table, func, insert, select, update
from sqlalchemy.engine import Row

from linkcpp.hub.directory import Machine
from linkcpp.hub.errors import ApiError
from linkcpp.hub.join_tokens import check_role, find_join_token, later_than, use_join_token
from linkcpp.hub.presence import presence
from linkcpp.hub.schema import JOIN_TOKENS, MACHINES
from linkcpp.registry.encoding import fingerprint
from linkcpp.registry.records import JoinRequest, RegisteredNode, Role

_MACHINES_A_PIECE = 100


def join(connection: Connection, request: JoinRequest, now: float) -> Machine:
    """Enter a machine that proved its key; the token's use is counted in the same transaction.

    The same machine with the same token joins again without another use: its answer may have been
    lost. A machine that was revoked needs a token that was made later.

    Raises:
        ApiError: the token is not taken or is for another role, or the id belongs to a machine
            with other keys.
    """
    token = find_join_token(connection, request.token, now)
    check_role(Role(token.role), request.roles)
    known = connection.execute(
        select(MACHINES).where(MACHINES.c.node_id == request.node_id)
    ).first()
    if known is not None:
        _check_known(known, request, token.created_at)
    is_same = known is not None and known.revoked_at is None and known.token_id == token.token_id
    if not is_same:
        use_join_token(connection, token)
    machine = Machine(
        node_id=request.node_id,
        name=request.name,
        role=Role(token.role),
        signing_key=request.signing_key,
        edge_key=request.edge_key,
        token_id=token.token_id,
        # Tokens from before a revocation stay worthless, for they name another time than this.
        joined_at=_joined_at(known, now, is_same=is_same),
        revoked_at=None,
        last_seen=known.last_seen if known is not None else None,
        has_state=False,
        left_at=known.left_at if known is not None else None,
    )
    enter(connection, machine)
    return machine


def enter(connection: Connection, machine: Machine) -> None:
    """Write a machine that joined; what its heartbeats told before stays."""
    names = ("name", "role", "signing_key", "edge_key", "token_id", "joined_at", "revoked_at")
    values = {name: getattr(machine, name) for name in names}
    upsert(connection, MACHINES, MACHINES.c.node_id, machine.node_id, values)


def _joined_at(known: Row[Any] | None, now: float, *, is_same: bool) -> float:
    if known is None:
        return now
    joined_at: float = known.joined_at
    return joined_at if is_same else later_than(joined_at, now)


def _check_known(known: Row[Any], request: JoinRequest, token_created_at: float) -> None:
    if known.revoked_at is not None:
        if token_created_at <= known.revoked_at:
            raise ApiError(
                403,
                "revoked",
                "This machine was revoked after the join token was made.",
                hint="An admin lets it in again with a new token: `linkcpp hub token create`.",
            )
        return
    if (known.signing_key, known.edge_key) != (request.signing_key, request.edge_key):
        raise ApiError(
            409,
            "other_key",
            f"A machine with the id {request.node_id} joined already, with other keys.",
            hint="If it was installed anew, an admin revokes the old one first: "
            f"`linkcpp hub revoke {request.node_id}`.",
        )


def revoke(connection: Connection, node_id: str, now: float) -> None:
    """Note that a machine is no longer wanted.

    Raises:
        ApiError: there is no such machine.
    """
    # Not before any join token that exists, though the clock was set back since that was made: none
    # of those may let the machine in again.
    newest = connection.execute(select(func.max(JOIN_TOKENS.c.created_at))).scalar()
    result = connection.execute(
        update(MACHINES)
        .where(MACHINES.c.node_id == node_id)
        .values(revoked_at=now if newest is None else max(now, newest))
    )
    if not result.rowcount:
        raise unknown_machine()


def upsert(
    connection: Connection,
    table: Table,
    key: ColumnElement[Any],
    value: str,
    columns: Mapping[str, Any],
) -> None:
    """Change the row with this key, or add it; there is one writer, so nobody comes between."""
    if not connection.execute(update(table).where(key == value).values(**columns)).rowcount:
        connection.execute(insert(table).values({key.key: value, **columns}))


def unknown_machine() -> ApiError:
    """Say that no machine has this id."""
    return ApiError(404, "unknown_machine", "No machine with this id joined this hub.")


def node_json(engine: Engine, node_id: str, now: float, revoked_ids: frozenset[str]) -> bytes:
    """Write one machine as a ``RegisteredNode`` in JSON; see ``nodes_json``.

    Raises:
        ApiError: there is no such machine.
    """
    with engine.connect() as connection:
        query = select(MACHINES).where(MACHINES.c.node_id == node_id)
        row = connection.execute(query).first()
    if row is None:
        raise unknown_machine()
    return _machine_json(row, now, revoked_ids).encode()


def nodes_json(
    engine: Engine,
    now: float,
    revoked_ids: frozenset[str],
    silent_ids: frozenset[str] = frozenset(),
) -> deque[bytes]:
    """Write all machines as a ``NodeList`` in JSON, in the order of their names, in pieces.

    Those of ``revoked_ids`` are revoked, though that may not be written yet. Those of
    ``silent_ids`` did not answer.

    With ten thousand machines it has tens of megabytes: in one piece they would be copied again and
    again, and every other call would wait meanwhile.
    """
    query = select(MACHINES).order_by(MACHINES.c.name, MACHINES.c.node_id)
    pieces = deque([b'{"nodes":['])
    with engine.connect() as connection:
        rows = connection.execution_options(yield_per=_MACHINES_A_PIECE).execute(query)
        for part in rows.partitions():
            if len(pieces) > 1:
                pieces.append(b",")
            written = (_machine_json(row, now, revoked_ids, silent_ids) for row in part)
            pieces.append(",".join(written).encode())
    pieces.append(f'],"hub_time":{json.dumps(now)}}}'.encode())
    return pieces


def _machine_json(
    row: Row[Any],
    now: float,
    revoked_ids: frozenset[str],
    silent_ids: frozenset[str] = frozenset(),
) -> str:
    # The state stays as it was validated when it came: parsing thousands of them to write them
    # again would hold up every heartbeat meanwhile.
    head = RegisteredNode.model_validate(
        {
            "node_id": row.node_id,
            "name": row.name,
            "role": row.role,
            "edge_key": row.edge_key,
            "key_fingerprint": fingerprint(row.edge_key),
            "joined_at": row.joined_at,
            "is_revoked": row.revoked_at is not None or row.node_id in revoked_ids,
            "presence": presence(row.last_seen, now, row.left_at),
            "has_left": row.left_at is not None,
            "is_silent": row.node_id in silent_ids,
            "last_seen": row.last_seen,
            "state": None,
        }
    )
    written = head.model_dump_json(exclude={"state"})
    return f'{written[:-1]},"state":{row.state or "null"}}}'
