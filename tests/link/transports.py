"""A transport in memory, whose messages a test may alter as a hostile relay would."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from linkcpp.link.channel import SecureChannel
from linkcpp.link.core import EdgeCore, Resume
from linkcpp.link.handshake import EdgeKeys, initiate, respond
from linkcpp.link.pump import StreamPump, open_loopback
from linkcpp.link.records import EdgeLimits
from linkcpp.link.transport import TransportLostError
from tests.link.edges import BACKBONE_ID, NODE_ID

EDGE_ID = "ab" * 16
EPOCHS = (b"B" * 16, b"N" * 16)

# Gets a message and returns those that are passed on in its place.
Meddler = Callable[[bytes], list[bytes]]


class MemoryTransport:
    """One end; what it sends goes through ``meddler``."""

    def __init__(self, inbox: asyncio.Queue[bytes | None], outbox: asyncio.Queue[bytes | None]):
        self._inbox = inbox
        self._outbox = outbox
        self.meddler: Meddler | None = None
        self.sent: list[bytes] = []
        self.closed: tuple[int, str] | None = None

    async def send(self, message: bytes) -> None:
        self.sent.append(message)
        for passed in self.meddler(message) if self.meddler else [message]:
            await self._outbox.put(passed)

    async def receive(self) -> bytes:
        message = await self._inbox.get()
        if message is None:
            raise TransportLostError("the other side closed it", 1000)
        return message

    async def close(self, code: int = 1000, reason: str = "") -> None:
        if self.closed is None:
            self.closed = (code, reason)
            with contextlib.suppress(asyncio.QueueFull):
                self._outbox.put_nowait(None)
                self._inbox.put_nowait(None)


def transports() -> tuple[MemoryTransport, MemoryTransport]:
    there: asyncio.Queue[bytes | None] = asyncio.Queue()
    back: asyncio.Queue[bytes | None] = asyncio.Queue()
    return MemoryTransport(back, there), MemoryTransport(there, back)


def edge_keys() -> tuple[EdgeKeys, EdgeKeys]:
    backbone, node = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    ids = (EDGE_ID, BACKBONE_ID, NODE_ID)
    return EdgeKeys(backbone, node.public_key(), *ids), EdgeKeys(node, backbone.public_key(), *ids)


class LinkPair:
    """Two channels that carry a session each; the node's streams lead to a port of loopback."""

    def __init__(self, agent_port: int) -> None:
        self.agent_port = agent_port
        self.transports = transports()
        self.keys = edge_keys()
        cores = [
            EdgeCore(epoch=EPOCHS[0], peer_epoch=EPOCHS[1], opens=True, limits=EdgeLimits()),
            EdgeCore(epoch=EPOCHS[1], peer_epoch=EPOCHS[0], opens=False, limits=EdgeLimits()),
        ]
        self.backbone = StreamPump(cores[0])
        self.node = StreamPump(cores[1], connect=lambda: open_loopback("127.0.0.1", agent_port))
        self.channels: tuple[SecureChannel, SecureChannel]
        self.port = 0
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        """Open the loopback port whose connections are carried."""
        self._server = await asyncio.start_server(self.backbone.carry, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def connect(self) -> None:
        agreed = await asyncio.gather(
            initiate(self.transports[0], self.keys[0], self.backbone.core.resume),
            respond(self.transports[1], self.keys[1], self._answer),
        )
        self.channels = (
            SecureChannel(self.transports[0], agreed[0], path="test"),
            SecureChannel(self.transports[1], agreed[1], path="test", on_attach=self._attach),
        )
        self.backbone.carried_by(self.channels[0], agreed[0].peer.wanted)
        self.channels[0].attach(self.backbone, self.backbone.core.resume.wanted)

    def _answer(self, _: Resume) -> Resume:
        return self.node.core.resume

    def _attach(self, channel: SecureChannel, wanted: int) -> None:
        self.node.carried_by(channel, wanted)
        channel.carry(self.node)

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
        for channel in self.channels:
            await channel.close()
        await self.backbone.aclose()
        await self.node.aclose()


@contextlib.asynccontextmanager
async def link_pair(agent_port: int) -> AsyncIterator[LinkPair]:
    """Shake hands over transports in memory."""
    pair = LinkPair(agent_port)
    await pair.connect()
    await pair.listen()
    try:
        yield pair
    finally:
        await pair.aclose()
