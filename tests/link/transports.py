"""A transport in memory, whose messages a test may alter as a hostile relay would."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from linkcpp.link.acceptor import LinkUser
from linkcpp.link.channel import SecureChannel
from linkcpp.link.core import LinkCore, Resume
from linkcpp.link.handshake import (
    ClusterMember,
    Introduction,
    KnownPeer,
    cluster_psk,
    initiate,
    respond,
)
from linkcpp.link.pump import StreamPump
from linkcpp.link.records import LinkLimits
from linkcpp.link.stream_transport import StreamTransport
from linkcpp.link.tcp_handler import Streams
from linkcpp.link.transport import Receiver, TransportLostError
from tests.link.edges import BACKBONE, NODE, TARGET, behind

LINK_ID = "ab" * 16
TOKEN = "a-cluster-token-of-a-test"
EPOCHS = (b"B" * 16, b"N" * 16)

# Gets a message and returns those that are passed on in its place.
Meddler = Callable[[bytes], list[bytes]]


class MemoryTransport:
    """One end; what it sends goes through ``meddler``."""

    is_full = False
    descriptor = None

    def __init__(self, inbox: asyncio.Queue[bytes | None], outbox: asyncio.Queue[bytes | None]):
        self._inbox = inbox
        self._outbox = outbox
        self._passing: asyncio.Task[None] | None = None
        self.meddler: Meddler | None = None
        self.sent: list[bytes] = []
        self.closed: tuple[int, str] | None = None

    def send(self, message: bytes) -> None:
        self.sent.append(message)
        for passed in self.meddler(message) if self.meddler else [message]:
            self._outbox.put_nowait(passed)

    async def receive(self) -> bytes:
        message = await self._inbox.get()
        if message is None:
            raise TransportLostError("the other side closed it", 1000)
        return message

    def deliver_to(self, receiver: Receiver) -> None:
        self._passing = asyncio.create_task(self._pass_on(receiver))

    async def _pass_on(self, receiver: Receiver) -> None:
        try:
            while True:
                receiver.received(await self.receive())
        except TransportLostError as error:
            receiver.lost(error)

    def read_now(self) -> bool:
        return False

    async def close(self, code: int = 1000, reason: str = "") -> None:
        if self.closed is None:
            self.closed = (code, reason)
            self._outbox.put_nowait(None)
            self._inbox.put_nowait(None)
        if self._passing is not None:
            await asyncio.gather(self._passing, return_exceptions=True)


def transports() -> tuple[MemoryTransport, MemoryTransport]:
    there: asyncio.Queue[bytes | None] = asyncio.Queue()
    back: asyncio.Queue[bytes | None] = asyncio.Queue()
    return MemoryTransport(back, there), MemoryTransport(there, back)


def known_peers() -> tuple[KnownPeer, KnownPeer]:
    """What both sides know whom a hub introduced to each other."""
    backbone, node = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    return (
        KnownPeer(backbone, node.public_key(), LINK_ID, BACKBONE, NODE),
        KnownPeer(node, backbone.public_key(), LINK_ID, NODE, BACKBONE),
    )


def members(*tokens: str) -> tuple[ClusterMember, ClusterMember]:
    """What two machines of a cluster know; they may be given two tokens."""
    backbone, node = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    psks = [cluster_psk(token) for token in tokens or (TOKEN,)]
    return (
        ClusterMember(backbone, psks[0], LINK_ID, BACKBONE),
        ClusterMember(node, psks[-1], LINK_ID, NODE),
    )


INTRODUCTIONS: dict[str, Callable[[], tuple[Introduction, Introduction]]] = {
    "by a hub": known_peers,
    "by the cluster's token": members,
}


class LinkPair:
    """Two channels that carry a session each; the node's streams lead to a port of loopback."""

    def __init__(
        self, program_port: int, introductions: tuple[Introduction, Introduction] | None = None
    ) -> None:
        self.transports = transports()
        self.introductions = introductions or known_peers()
        cores = [
            LinkCore(epoch=EPOCHS[0], peer_epoch=EPOCHS[1], opens=True, limits=LinkLimits()),
            LinkCore(epoch=EPOCHS[1], peer_epoch=EPOCHS[0], opens=False, limits=LinkLimits()),
        ]
        user = LinkUser(LINK_ID, BACKBONE)
        serve = behind(program_port)
        self.backbone = StreamPump(cores[0])
        self.node = StreamPump(cores[1], serve=lambda target, port: serve(user, target, port))
        self.goodbye_count = 0
        self.channels: tuple[SecureChannel, SecureChannel]

    def open(self) -> Streams:
        """Open a stream to the program."""
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport = self.backbone.open(
            TARGET, lambda port: StreamTransport(port, lambda: protocol, {})
        )
        assert isinstance(transport, StreamTransport)
        return reader, asyncio.StreamWriter(transport, protocol, reader, asyncio.get_running_loop())

    async def connect(self) -> None:
        agreed = await asyncio.gather(
            initiate(self.transports[0], self.introductions[0], self.backbone.core.resume),
            respond(self.transports[1], self.introductions[1], self._answer),
        )
        self.channels = (
            SecureChannel(self.transports[0], agreed[0], path="test"),
            SecureChannel(
                self.transports[1],
                agreed[1],
                path="test",
                on_attach=self.attach,
                on_goodbye=self._said_goodbye,
            ),
        )
        self.backbone.carried_by(self.channels[0], agreed[0].peer.wanted)
        self.channels[0].attach(self.backbone, self.backbone.core.resume.wanted)

    def _answer(self, _: Resume) -> Resume:
        return self.node.core.resume

    def attach(self, channel: SecureChannel, wanted: int) -> None:
        """Let a channel carry the node's session."""
        self.node.carried_by(channel, wanted)
        channel.carry(self.node)

    def _said_goodbye(self) -> None:
        self.goodbye_count += 1

    async def aclose(self) -> None:
        for channel in self.channels:
            await channel.close()
        await self.backbone.aclose()
        await self.node.aclose()


@contextlib.asynccontextmanager
async def link_pair(
    program_port: int, introductions: tuple[Introduction, Introduction] | None = None
) -> AsyncIterator[LinkPair]:
    """Shake hands over transports in memory."""
    pair = LinkPair(program_port, introductions)
    await pair.connect()
    try:
        yield pair
    finally:
        await pair.aclose()
