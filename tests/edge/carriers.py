"""A carrier in memory, whose messages a test may alter as a hostile relay would."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from linkcpp.edge.carrier import CarrierLostError
from linkcpp.edge.core import EdgeCore, Resume
from linkcpp.edge.exchange import Exchange, open_loopback
from linkcpp.edge.handshake import EdgeKeys, initiate, respond
from linkcpp.edge.link import Link
from linkcpp.edge.records import EdgeLimits
from tests.edge.edges import BACKBONE_ID, NODE_ID

EDGE_ID = "ab" * 16
EPOCHS = (b"B" * 16, b"N" * 16)

# Gets a message and returns those that are passed on in its place.
Meddler = Callable[[bytes], list[bytes]]


class MemoryCarrier:
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
            raise CarrierLostError("the other side closed it", 1000)
        return message

    async def close(self, code: int = 1000, reason: str = "") -> None:
        if self.closed is None:
            self.closed = (code, reason)
            with contextlib.suppress(asyncio.QueueFull):
                self._outbox.put_nowait(None)
                self._inbox.put_nowait(None)


def carriers() -> tuple[MemoryCarrier, MemoryCarrier]:
    there: asyncio.Queue[bytes | None] = asyncio.Queue()
    back: asyncio.Queue[bytes | None] = asyncio.Queue()
    return MemoryCarrier(back, there), MemoryCarrier(there, back)


def edge_keys() -> tuple[EdgeKeys, EdgeKeys]:
    backbone, node = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    ids = (EDGE_ID, BACKBONE_ID, NODE_ID)
    return EdgeKeys(backbone, node.public_key(), *ids), EdgeKeys(node, backbone.public_key(), *ids)


class LinkPair:
    """Two links that carry a session each; the node's streams lead to a port of loopback."""

    def __init__(self, agent_port: int) -> None:
        self.agent_port = agent_port
        self.carriers = carriers()
        self.keys = edge_keys()
        cores = [
            EdgeCore(epoch=EPOCHS[0], peer_epoch=EPOCHS[1], opens=True, limits=EdgeLimits()),
            EdgeCore(epoch=EPOCHS[1], peer_epoch=EPOCHS[0], opens=False, limits=EdgeLimits()),
        ]
        self.backbone = Exchange(cores[0])
        self.node = Exchange(cores[1], connect=lambda: open_loopback("127.0.0.1", agent_port))
        self.links: tuple[Link, Link]
        self.port = 0
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        """Open the loopback port whose connections are carried."""
        self._server = await asyncio.start_server(self.backbone.carry, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def connect(self) -> None:
        agreed = await asyncio.gather(
            initiate(self.carriers[0], self.keys[0], self.backbone.core.resume),
            respond(self.carriers[1], self.keys[1], self._answer),
        )
        self.links = (
            Link(self.carriers[0], agreed[0], path="test"),
            Link(self.carriers[1], agreed[1], path="test", on_attach=self._attach),
        )
        self.backbone.carried_by(self.links[0], agreed[0].peer.wanted)
        self.links[0].attach(self.backbone, self.backbone.core.resume.wanted)

    def _answer(self, _: Resume) -> Resume:
        return self.node.core.resume

    def _attach(self, link: Link, wanted: int) -> None:
        self.node.carried_by(link, wanted)
        link.carry(self.node)

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
        for link in self.links:
            await link.close()
        await self.backbone.aclose()
        await self.node.aclose()


@contextlib.asynccontextmanager
async def link_pair(agent_port: int) -> AsyncIterator[LinkPair]:
    """Shake hands over carriers in memory."""
    pair = LinkPair(agent_port)
    await pair.connect()
    await pair.listen()
    try:
        yield pair
    finally:
        await pair.aclose()
