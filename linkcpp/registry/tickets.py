"""Tokens that a hub signs: a machine's token for the hub, a side's ticket for one edge.

JSON Web Tokens with EdDSA. Pure: the time is an argument. The audience keeps the two kinds apart,
so that a ticket opens no hub and a token no relay.
"""

from typing import Any, NamedTuple, TypeVar

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import ValidationError

from linkcpp.common.records import WireRecord
from linkcpp.registry.edges import EdgeRole
from linkcpp.registry.encoding import decode
from linkcpp.registry.fields import MAX_TOKEN_CHARACTERS, EdgeId, MachineId, UnixTime
from linkcpp.registry.records import Role

NODE_TOKEN_SECONDS = 15 * 60.0
EDGE_TICKET_SECONDS = 10 * 60.0

_ALGORITHM = "EdDSA"
_HUB = "linkcpp-hub"
_EDGE = "linkcpp-edge"


class TicketError(Exception):
    """A token is not taken: ``code`` is ``invalid_token`` or ``expired_token``."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class NodeClaims(WireRecord):
    """What a node token says: the hub ``iss`` knows machine ``sub`` in this role until ``exp``.

    ``joined`` is when it joined, by the hub's clock then: it names that joining, and is compared
    with nothing else, since clocks are set.
    """

    iss: MachineId
    sub: MachineId
    role: Role
    iat: UnixTime
    exp: UnixTime
    joined: UnixTime | None = None
    jti: str


class EdgeClaims(WireRecord):
    """What an edge ticket says: machine ``sub`` is this side of the edge, at this gateway.

    ``gateway`` is ``None`` where there was no gateway: then only the direct way is open.
    """

    iss: MachineId
    sub: MachineId
    edge: EdgeId
    role: EdgeRole
    gateway: MachineId | None
    exp: UnixTime


_C = TypeVar("_C", NodeClaims, EdgeClaims)


class HubKey(NamedTuple):
    """A hub's id and the key that verifies what it signs."""

    hub_id: str
    public_key: Ed25519PublicKey

    @classmethod
    def parse(cls, hub_id: str, public_key: str) -> "HubKey":
        """Read the key from its text, as ``HubHealth`` and ``HubCredentials`` have it.

        Raises:
            ValueError: the text is not an Ed25519 key.
        """
        return cls(hub_id, Ed25519PublicKey.from_public_bytes(decode(public_key)))


def sign_node_token(key: Ed25519PrivateKey, claims: NodeClaims) -> str:
    """Write a node token."""
    return _sign(key, {**claims.model_dump(mode="json"), "aud": _HUB})


def verify_node_token(hub: HubKey, token: str, *, now: float) -> NodeClaims:
    """Read a node token; whether its machine was revoked is not looked at.

    Raises:
        TicketError: the hub did not sign it, it is none, or it has ended.
    """
    return _in_time(NodeClaims, _verify(hub, token, _HUB), now)


def sign_edge_ticket(key: Ed25519PrivateKey, claims: EdgeClaims) -> str:
    """Write an edge ticket."""
    return _sign(key, {**claims.model_dump(mode="json"), "aud": _EDGE})


def verify_edge_ticket(hub: HubKey, ticket: str, *, now: float) -> EdgeClaims:
    """Read an edge ticket; edge, side and gateway are for the caller to compare.

    Raises:
        TicketError: the hub did not sign it, it is none, or it has ended.
    """
    return _in_time(EdgeClaims, _verify(hub, ticket, _EDGE), now)


def _sign(key: Ed25519PrivateKey, claims: dict[str, Any]) -> str:
    return jwt.encode(claims, key, algorithm=_ALGORITHM)


def _verify(hub: HubKey, token: str, audience: str) -> dict[str, Any]:
    if len(token) > MAX_TOKEN_CHARACTERS:
        raise TicketError("invalid_token", "it is too long")
    try:
        claims: dict[str, Any] = jwt.decode(
            token,
            hub.public_key,
            algorithms=[_ALGORITHM],
            audience=audience,
            issuer=hub.hub_id,
            # The time is compared below: PyJWT would read the clock itself.
            options={"verify_exp": False, "verify_iat": False, "require": ["exp", "iss", "aud"]},
        )
    except (jwt.InvalidTokenError, ValueError, RecursionError) as error:
        raise TicketError("invalid_token", "it is not one that this hub signed") from error
    return claims


def _in_time(record: type[_C], claims: dict[str, Any], now: float) -> _C:
    try:
        parsed = record.model_validate(claims)
    except ValidationError as error:
        raise TicketError("invalid_token", "it lacks what such a token says") from error
    if parsed.exp <= now:
        raise TicketError("expired_token", "it has ended")
    return parsed
