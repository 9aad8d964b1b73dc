"""How two machines become sure of each other over a transport, and what they derive from that."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from linkcpp.link.core import Resume
from linkcpp.link.noise import KK, Handshake, NoiseError, TransportKeys
from linkcpp.link.session import SessionError
from linkcpp.link.transport import Transport, TransportLostError
from linkcpp.registry.encoding import decode, encode
from linkcpp.registry.relay import RelayCloseCode

HANDSHAKE_SECONDS = 10.0

_PROLOGUE = b"linkcpp-link-2"
_TOKEN_INFO = b"linkcpp agent token"


class EdgeKeys(NamedTuple):
    """What one side of an edge knows before the handshake.

    ``own_key`` and ``peer_key`` are the static keys of both machines; the ids are those of the
    edge, of the coordinator and of the node.
    """

    own_key: X25519PrivateKey
    peer_key: X25519PublicKey
    edge_id: str
    backbone_id: str
    node_id: str

    @property
    def prologue(self) -> bytes:
        """What both sides must agree on besides the keys."""
        ids = (self.backbone_id.encode(), self.node_id.encode())
        parts = (_PROLOGUE, bytes.fromhex(self.edge_id), *ids)
        return b"".join(len(part).to_bytes(2, "little") + part for part in parts)

    def agent_token(self) -> str:
        """Derive the bearer token that the node's agent takes from this edge: 256 bits as text.

        Only the two machines can derive it, and it is another one for every edge. It is the same
        for all sessions of the edge, so that clients go on after the node's agent was restarted.
        """
        secret = self.own_key.exchange(self.peer_key)
        salt = bytes.fromhex(self.edge_id)
        return encode(HKDF(SHA256(), 32, salt=salt, info=_TOKEN_INFO).derive(secret))


def parse_edge_key(text: str) -> X25519PublicKey:
    """Read a peer's key as offers have it.

    Raises:
        ValueError: it is none.
    """
    return X25519PublicKey.from_public_bytes(decode(text))


class Agreed(NamedTuple):
    """A finished handshake: ciphers, and what each side said of its session."""

    keys: TransportKeys
    own: Resume
    peer: Resume


async def initiate(transport: Transport, edge: EdgeKeys, own: Resume) -> Agreed:
    """Shake hands as the coordinator.

    Raises:
        TransportLostError: the transport ended, or who answers is not the node. It is closed then.
    """
    handshake = _handshake(edge, is_initiator=True)
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            await transport.send(handshake.write_message(own.encode()))
            peer = Resume.decode(handshake.read_message(await transport.receive()))
        return Agreed(handshake.finish(), own, peer)
    except (NoiseError, SessionError, TimeoutError) as error:
        raise await _failed(transport, error) from error


async def respond(
    transport: Transport, edge: EdgeKeys, answer: Callable[[Resume], Resume]
) -> Agreed:
    """Shake hands as the node; ``answer`` tells what to say to what the coordinator said.

    Whoever recorded a first message can send it again, so nothing may be done before the first
    record has come, which only the coordinator itself can make.

    Raises:
        TransportLostError: the transport ended, or the peer is another one; it is closed then.
    """
    handshake = _handshake(edge, is_initiator=False)
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            peer = Resume.decode(handshake.read_message(await transport.receive()))
            own = answer(peer)
            await transport.send(handshake.write_message(own.encode()))
        return Agreed(handshake.finish(), own, peer)
    except (NoiseError, SessionError, TimeoutError) as error:
        raise await _failed(transport, error) from error


def _handshake(edge: EdgeKeys, *, is_initiator: bool) -> Handshake:
    return Handshake(
        KK,
        is_initiator=is_initiator,
        static_key=edge.own_key,
        peer_static_key=edge.peer_key,
        prologue=edge.prologue,
    )


async def _failed(transport: Transport, error: Exception) -> TransportLostError:
    code = RelayCloseCode.HANDSHAKE_FAILED
    reason = f"the handshake failed: {error or 'no answer in time'}"
    await transport.close(code, reason)
    return TransportLostError(reason, code)
