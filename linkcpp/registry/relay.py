"""How a relay begins and ends: the first message of both sides, and the close codes.

``docs/wire.md`` has the rules. Pure.
"""

from enum import IntEnum
from typing import Final, NamedTuple

from linkcpp.registry.edges import EdgeRole
from linkcpp.registry.fields import MAX_TOKEN_CHARACTERS

RELAY_PATH: Final = "/v1/relay"
DIRECT_PATH: Final = "/v1/edge"
PAIRED: Final = b"\x01"
FIN: Final = "fin"
HELLO_DEADLINE_SECONDS: Final = 10.0
PAIRING_SECONDS: Final = 60.0
MAX_HELLO_BYTES: Final = 4 + 1 + 16 + MAX_TOKEN_CHARACTERS

_MAGIC: Final = b"LCR1"
_CLUSTER_MAGIC: Final = b"LCC1"
CLUSTER_HELLO_BYTES: Final = 4 + 16
_ROLE_BYTES: Final = {EdgeRole.BACKBONE: 0x01, EdgeRole.NODE: 0x02}
_ROLES: Final = {byte: role for role, byte in _ROLE_BYTES.items()}


class RelayCloseCode(IntEnum):
    """Why a link of an edge was closed; the close reason says it in words.

    Private-use codes of RFC 6455, section 7.4.2; 1000 is a wanted end. A side that gets
    ``UNAUTHORIZED``, ``NO_PEER``, ``PEER_GONE`` or ``STOPPING`` asks the hub for a new offer;
    ``REVOKED`` and ``REPLACED`` are final for this connection.
    """

    MALFORMED = 4400
    UNAUTHORIZED = 4401
    REVOKED = 4403
    NO_PEER = 4404
    HELLO_TIMEOUT = 4408
    REPLACED = 4409
    PEER_GONE = 4410
    STALLED = 4411
    STOPPING = 4412
    HANDSHAKE_FAILED = 4420
    RECORD_INVALID = 4421
    FULL = 4429


class Hello(NamedTuple):
    """The first message of a side: who it is in which edge, and the ticket that proves it."""

    role: EdgeRole
    edge_id: str
    ticket: str


def encode_hello(hello: Hello) -> bytes:
    """Write the first binary message."""
    head = _MAGIC + bytes([_ROLE_BYTES[hello.role]]) + bytes.fromhex(hello.edge_id)
    return head + hello.ticket.encode("ascii")


def encode_cluster_hello(link_id: str) -> bytes:
    """Write the first binary message of a machine that the cluster token introduces."""
    return _CLUSTER_MAGIC + bytes.fromhex(link_id)


def decode_cluster_hello(message: bytes) -> str | None:
    """Read the link's id; ``None`` where it is not the hello of a cluster's machine."""
    is_one = len(message) == CLUSTER_HELLO_BYTES and message[:4] == _CLUSTER_MAGIC
    return message[4:].hex() if is_one else None


def decode_hello(message: bytes) -> Hello:
    """Read the first binary message; the ticket is not verified.

    Raises:
        ValueError: it is none; the text is a reason fit for a close frame.
    """
    if not 21 < len(message) <= MAX_HELLO_BYTES or message[:4] != _MAGIC:
        raise ValueError("the first message is not a hello of a relay")
    role = _ROLES.get(message[4])
    if role is None:
        raise ValueError("the role is neither backbone nor node")
    if not message[21:].isascii():
        raise ValueError("the ticket is not ASCII")
    return Hello(role, message[5:21].hex(), message[21:].decode("ascii"))
