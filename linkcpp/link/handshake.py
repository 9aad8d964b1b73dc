"""How two machines become sure of each other over a transport, and what they derive from that.

Who introduces them decides the handshake: a hub (or a coordinator) tells each the key of the other
beforehand, and the pattern is KK; machines of one cluster share its token, and prove with XXpsk0
that they do while they exchange their keys. The token itself is never sent.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from linkcpp.link.core import RESUME_BYTES, Resume
from linkcpp.link.noise import KK, XX_PSK0, Handshake, NoiseError, TransportKeys
from linkcpp.link.session import SessionError
from linkcpp.link.transport import Transport, TransportLostError
from linkcpp.registry.encoding import decode
from linkcpp.registry.relay import RelayCloseCode

HANDSHAKE_SECONDS = 10.0
LINK_ID_BYTES = 16

_PROLOGUE = b"linkcpp-link-2"
_CLUSTER_INFO = b"linkcpp cluster token"
_MAX_NAME_BYTES = 256


class Machine(NamedTuple):
    """Who a machine says it is: its id and its name, ASCII and UTF-8."""

    node_id: str
    name: str

    def encode(self) -> bytes:
        """Write it for a handshake."""
        return self.node_id.encode("ascii") + b"\0" + self.name.encode()[:_MAX_NAME_BYTES]

    @classmethod
    def decode(cls, payload: bytes) -> "Machine":
        """Read it from a handshake.

        Raises:
            SessionError: it is not one.
        """
        node_id, separator, name = payload.partition(b"\0")
        is_sane = node_id.isascii() and 0 < len(node_id) <= 64 and len(name) <= _MAX_NAME_BYTES
        if not separator or not is_sane:
            raise SessionError("a handshake does not tell whose it is")
        return cls(node_id.decode("ascii"), name.decode(errors="replace"))


class Agreed(NamedTuple):
    """A finished handshake: ciphers, what each side said of its session, and who the peer is."""

    keys: TransportKeys
    own: Resume
    peer: Resume
    machine: Machine
    peer_key: X25519PublicKey


class Introduction(Protocol):
    """What one side of a link knows before the handshake."""

    @property
    def link_id(self) -> str:
        """The link's id: 32 hex digits."""
        ...

    @property
    def own(self) -> Machine:
        """This machine."""
        ...

    @property
    def peer(self) -> Machine | None:
        """The other one, where the introduction names it."""
        ...

    def handshake(self, *, is_initiator: bool) -> Handshake:
        """Begin a handshake."""
        ...


class KnownPeer(NamedTuple):
    """A third party, whom both machines trust, gave each the other's static key: Noise KK."""

    own_key: X25519PrivateKey
    peer_key: X25519PublicKey
    link_id: str
    own: Machine
    peer: Machine

    def handshake(self, *, is_initiator: bool) -> Handshake:
        """Begin a handshake, bound to the link and both ids."""
        own, peer = self.own.node_id.encode(), self.peer.node_id.encode()
        ids = (own, peer) if is_initiator else (peer, own)
        return Handshake(
            KK,
            is_initiator=is_initiator,
            static_key=self.own_key,
            peer_static_key=self.peer_key,
            prologue=_prologue(bytes.fromhex(self.link_id), *ids),
        )


class ClusterMember(NamedTuple):
    """Both machines have the cluster's token: Noise XXpsk0. ``psk`` is ``cluster_psk(token)``."""

    own_key: X25519PrivateKey
    psk: bytes
    link_id: str
    own: Machine

    @property
    def peer(self) -> None:
        """Whoever has the token: the handshake tells who it is."""
        return

    def handshake(self, *, is_initiator: bool) -> Handshake:
        """Begin a handshake, bound to the link."""
        return Handshake(
            XX_PSK0,
            is_initiator=is_initiator,
            static_key=self.own_key,
            psk=self.psk,
            prologue=_prologue(bytes.fromhex(self.link_id)),
        )


def cluster_psk(token: str) -> bytes:
    """Derive what a handshake proves: 32 bytes, HKDF-SHA256 of the cluster token (RFC 5869)."""
    return HKDF(SHA256(), 32, salt=None, info=_CLUSTER_INFO).derive(token.encode())


def parse_link_key(text: str) -> X25519PublicKey:
    """Read a peer's key as offers have it.

    Raises:
        ValueError: it is not one.
    """
    return X25519PublicKey.from_public_bytes(decode(text))


async def initiate(transport: Transport, introduction: Introduction, own: Resume) -> Agreed:
    """Shake hands as the side that dialled.

    Raises:
        TransportLostError: the transport ended, or who answers is not the peer. It is closed then.
    """
    handshake = introduction.handshake(is_initiator=True)
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            transport.send(handshake.write_message(own.encode()))
            answer = handshake.read_message(await transport.receive())
            peer, told = Resume.decode(answer[:RESUME_BYTES]), answer[RESUME_BYTES:]
            if introduction.peer is None:
                transport.send(handshake.write_message(introduction.own.encode()))
        machine = _machine(introduction, told)
        return _agreed(handshake, introduction, own, peer, machine)
    except (NoiseError, SessionError, TimeoutError) as error:
        raise await _failed(transport, error) from error


async def respond(
    transport: Transport, introduction: Introduction, answer: Callable[[Resume], Resume]
) -> Agreed:
    """Shake hands as the side that was dialled; ``answer`` tells what to say of the session.

    Whoever recorded a first message can send it again, so nothing may be done before the first
    record has come, which only the peer itself can make.

    Raises:
        TransportLostError: the transport ended, or who asks is not the peer. It is closed then.
    """
    handshake = introduction.handshake(is_initiator=False)
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            peer = Resume.decode(handshake.read_message(await transport.receive()))
            own = answer(peer)
            machine = introduction.peer
            if machine is not None:
                transport.send(handshake.write_message(own.encode()))
            else:
                told = own.encode() + introduction.own.encode()
                transport.send(handshake.write_message(told))
                machine = Machine.decode(handshake.read_message(await transport.receive()))
        return _agreed(handshake, introduction, own, peer, machine)
    except (NoiseError, SessionError, TimeoutError) as error:
        raise await _failed(transport, error) from error


def _machine(introduction: Introduction, told: bytes) -> Machine:
    if introduction.peer is None:
        return Machine.decode(told)
    if told:
        raise SessionError("a handshake says more than its pattern has")
    return introduction.peer


def _agreed(
    handshake: Handshake, introduction: Introduction, own: Resume, peer: Resume, machine: Machine
) -> Agreed:
    peer_key = handshake.peer_static_key
    assert peer_key is not None  # noqa: S101 - the handshake is finished
    return Agreed(handshake.finish(), own, peer, machine, peer_key)


def _prologue(*parts: bytes) -> bytes:
    """What both sides must agree on besides the keys."""
    return b"".join(len(part).to_bytes(2, "little") + part for part in (_PROLOGUE, *parts))


async def _failed(transport: Transport, error: Exception) -> TransportLostError:
    code = RelayCloseCode.HANDSHAKE_FAILED
    reason = f"the handshake failed: {error or 'no answer in time'}"
    await transport.close(code, reason)
    return TransportLostError(reason, code)
