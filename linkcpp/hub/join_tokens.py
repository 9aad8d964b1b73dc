"""Join tokens: made by an admin, exchanged by machines, stored as hashes only."""

import hashlib
import math
import secrets
import uuid
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, Engine, delete, func, insert, select, update
from sqlalchemy.engine import Row

from linkcpp.hub.errors import ApiError
from linkcpp.hub.schema import JOIN_TOKENS, MACHINES
from linkcpp.registry.records import (
    JoinTokenList,
    JoinTokenRecord,
    JoinTokenRequest,
    NewJoinToken,
    Role,
)

_PREFIX = "lcj_"
_MAX_TOKENS = 10_000
_KEPT_SECONDS = 30 * 86400.0
_TAKEN_BY = {
    Role.NODE: "`linkcpp join URL --token -`",
    Role.BACKBONE: "`linkcpp join URL --token -` without options for nodes",
    Role.ADMIN: "`linkcpp join URL --token -` without options for nodes",
    Role.GATEWAY: "`linkcpp gateway --hub URL --token -`",
}


def create_join_token(
    connection: Connection, request: JoinTokenRequest, now: float
) -> NewJoinToken:
    """Make a token of 256 random bits.

    Raises:
        ApiError: there are too many already.
    """
    table = JOIN_TOKENS.c
    connection.execute(delete(JOIN_TOKENS).where(table.expires_at < now - _KEPT_SECONDS))
    count = connection.execute(select(func.count()).select_from(JOIN_TOKENS)).scalar_one()
    if count >= _MAX_TOKENS:
        raise ApiError(409, "too_many", f"There are {count} join tokens already.")
    token = _PREFIX + secrets.token_urlsafe(32)
    # Later than every revocation, though the clock was set back since: it lets in who was revoked.
    last_revocation = connection.execute(select(func.max(MACHINES.c.revoked_at))).scalar()
    values = {
        "token_id": str(uuid.uuid4()),
        "role": request.role.value,
        "label": request.label,
        "created_at": now if last_revocation is None else later_than(last_revocation, now),
        "expires_at": now + request.lifetime_seconds,
        "use_limit": request.use_limit,
        "use_count": 0,
    }
    connection.execute(insert(JOIN_TOKENS).values(secret_sha256=_hash(token), **values))
    record = JoinTokenRecord.model_validate(values | {"is_revoked": False})
    return NewJoinToken(token=token, record=record)


def later_than(moment: float, now: float) -> float:
    """Return ``now``, or the next time after ``moment`` where the clock was set back. Pure."""
    return now if now > moment else math.nextafter(moment, math.inf)


def list_join_tokens(engine: Engine, revoked_ids: Collection[str]) -> JoinTokenList:
    """Return all join tokens without their secrets, the newest first.

    ``revoked_ids`` are of tokens whose revocation is not written yet.
    """
    with engine.connect() as connection:
        rows = connection.execute(select(JOIN_TOKENS).order_by(JOIN_TOKENS.c.created_at.desc()))
        return JoinTokenList(tokens=tuple(_record(row, revoked_ids) for row in rows))


def revoke_join_token(connection: Connection, token_id: str, now: float) -> None:
    """Make a token useless.

    Raises:
        ApiError: there is none with this id.
    """
    table = JOIN_TOKENS.c
    found = connection.execute(select(table.revoked_at).where(table.token_id == token_id)).first()
    if found is None:
        raise ApiError(404, "unknown_token", "There is no such join token.")
    if found.revoked_at is None:
        connection.execute(
            update(JOIN_TOKENS).where(table.token_id == token_id).values(revoked_at=now)
        )


def find_join_token(connection: Connection, token: str, now: float) -> Row[Any]:
    """Find the row of a token that may be used now, apart from how often it was.

    Raises:
        ApiError: it is none of this hub's, has expired, or was revoked. The three are told apart
            only to whoever has the secret.
    """
    query = select(JOIN_TOKENS).where(JOIN_TOKENS.c.secret_sha256 == _hash(token))
    row = connection.execute(query).first()
    hint = "`linkcpp hub token create` on the hub makes a new one."
    if row is None:
        raise ApiError(401, "wrong_token", "That is not a join token of this hub.", hint=hint)
    if row.revoked_at is not None:
        raise ApiError(401, "revoked_token", "This join token was revoked.", hint=hint)
    if row.expires_at <= now:
        raise ApiError(401, "expired_token", "This join token has expired.", hint=hint)
    return row


def check_role(role: Role, wanted: Sequence[Role]) -> None:
    """Refuse a token of ``role`` where other roles are wanted; with none named any role will do.

    Raises:
        ApiError: it is for another role.
    """
    if not wanted or role in wanted:
        return
    raise ApiError(
        409,
        "token_of_other_role",
        f"This join token is for the role {role}, not {' or '.join(wanted)}; it keeps its use.",
        hint=f"{_TAKEN_BY[role]} takes it; `linkcpp hub token create --role {wanted[0]}` makes one "
        f"for the role {wanted[0]}.",
    )


def use_join_token(connection: Connection, row: Row[Any]) -> None:
    """Count a use.

    Raises:
        ApiError: it was used as often as it may be.
    """
    if row.use_count >= row.use_limit:
        raise ApiError(
            401,
            "used_token",
            "This join token was used as often as it may be.",
            hint="`linkcpp hub token create --uses N` makes one for N machines.",
        )
    connection.execute(
        update(JOIN_TOKENS)
        .where(JOIN_TOKENS.c.token_id == row.token_id)
        .values(use_count=JOIN_TOKENS.c.use_count + 1)
    )


def _hash(token: str) -> str:
    # Looked up by its hash: comparing takes no time that would tell something of the token. A plain
    # hash is enough for 256 random bits.
    return hashlib.sha256(token.encode()).hexdigest()


def _record(row: Row[Any], revoked_ids: Collection[str]) -> JoinTokenRecord:
    is_revoked = row.revoked_at is not None or row.token_id in revoked_ids
    return JoinTokenRecord.model_validate(dict(row._mapping) | {"is_revoked": is_revoked})
