"""Links for tests: a hub that makes offers, gateways, a program behind the node, both ends."""

import asyncio
import contextlib
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from linkcpp.common.errors import LinkcppError
from linkcpp.common.sockets import listen
from linkcpp.gateway.relay import Relay
from linkcpp.gateway.server import serve_gateway
from linkcpp.link.acceptor import HubIntroduction, LinkAcceptor, LinkUser
from linkcpp.link.endpoint import LinkEndpoint
from linkcpp.link.forward import Forward
from linkcpp.link.handlers import StreamHandler, StreamPort, StreamRefusedError
from linkcpp.link.handshake import Machine
from linkcpp.link.offers import Dialled, LinkEndedError
from linkcpp.link.records import LinkLimits, LinkTimes
from linkcpp.link.status import LinkStatus
from linkcpp.link.supply import OfferSupply, Pin
from linkcpp.link.tcp_handler import Streams, TcpHandler
from linkcpp.registry.edges import EdgeOffer, EdgeRole
from linkcpp.registry.keys import MachineKeys, make_keys
from linkcpp.registry.relay import RELAY_PATH
from linkcpp.registry.tickets import EdgeClaims, sign_edge_ticket
from tests.gateway.gateways import HUB_ID, METRICS_TOKEN, Signer
from tests.link.programs import Echo, echo_server
from tests.support.slow_relay import SlowRelay, slow_relay

BACKBONE_ID = "33333333-3333-4333-8333-333333333333"
NODE_ID = "44444444-4444-4444-8444-444444444444"
DIALLED = Dialled(HUB_ID, NODE_ID)
BACKBONE = Machine(BACKBONE_ID, "coordinator")
NODE = Machine(NODE_ID, "attic")
# What streams of tests lead to, unless a test says otherwise.
TARGET = "program"
# Everything happens sooner than with people.
QUICK = LinkTimes(
    ping=0.1,
    dead=1.0,
    dial=2.0,
    pairing=2.0,
    head_start=0.1,
    first_probe=0.3,
    probe=0.5,
    first_pause=0.02,
    longest_pause=0.2,
    forgotten=30.0,
)


def no_pin(hub_id: str, node_id: str, edge_key: str) -> None:
    """Trust every key."""


@dataclass
class GatewayAt:
    """A gateway that can be stopped and started again on its port."""

    signer: Signer
    gateway_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    port: int = 0
    public_port: int = 0
    relay: Relay | None = None
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.public_port or self.port}{RELAY_PATH}"

    async def start(self) -> None:
        sockets = listen("127.0.0.1", self.port)
        self.port = sockets[0].getsockname()[1]
        self._stop = asyncio.Event()
        self.relay = Relay(gateway_id=self.gateway_id, hub=self.signer.key)
        self._serving = asyncio.create_task(
            serve_gateway(self.relay, METRICS_TOKEN, sockets, self._stop)
        )

    async def stop(self) -> None:
        if self._serving is not None:
            self._stop.set()
            await self._serving
            self._serving = None


@dataclass
class HubOfTest:
    """Makes offers as a hub does: for the coordinator by return, for the node by push."""

    signer: Signer = field(default_factory=Signer)
    gateways: list[GatewayAt] = field(default_factory=list)
    direct_urls: tuple[str, ...] = ()
    edge_id: str = field(default_factory=lambda: secrets.token_hex(16))
    backbone_keys: MachineKeys = field(default_factory=make_keys)
    node_keys: MachineKeys = field(default_factory=make_keys)
    acceptor: LinkAcceptor | None = None
    asked: list[tuple[str, ...]] = field(default_factory=list)
    problem: LinkcppError | None = None
    is_closed: bool = False
    tells_node: bool = True
    dialled: Dialled = DIALLED

    def revoke(self) -> None:
        self.problem = LinkEndedError("The hub does not know this machine any more.")

    async def offer(self, not_gateways: tuple[str, ...]) -> EdgeOffer:
        self.asked.append(not_gateways)
        if self.problem is not None:
            raise self.problem
        ranked = sorted(self.gateways, key=lambda one: one.gateway_id in not_gateways)
        gateway = ranked[0] if ranked else None
        if self.acceptor is not None and self.tells_node:
            with contextlib.suppress(LinkcppError):  # as a node that is told by push
                await self.acceptor.offer(self.make(EdgeRole.NODE, gateway))
        return self.make(EdgeRole.BACKBONE, gateway)

    def another(self) -> "HubOfTest":
        return self

    async def close(self) -> None:
        self.is_closed = True

    def make(
        self, role: EdgeRole, gateway: GatewayAt | None, *, lifetime_seconds: float = 600.0
    ) -> EdgeOffer:
        is_node = role is EdgeRole.NODE
        peer_key = (self.backbone_keys if is_node else self.node_keys).edge_public
        expires_at = time.time() + lifetime_seconds
        claims = EdgeClaims(
            iss=HUB_ID,
            sub=NODE_ID if is_node else BACKBONE_ID,
            edge=self.edge_id,
            role=role,
            gateway=gateway.gateway_id if gateway else None,
            exp=expires_at,
        )
        return EdgeOffer(
            edge_id=self.edge_id,
            role=role,
            gateway_id=gateway.gateway_id if gateway else None,
            relay_url=gateway.url if gateway else None,
            ticket=sign_edge_ticket(self.signer.private, claims),
            peer_node_id=BACKBONE_ID if is_node else NODE_ID,
            peer_name="coordinator" if is_node else "attic",
            peer_public_key=peer_key,
            direct_urls=() if is_node else self.direct_urls,
            hub_id=HUB_ID,
            expires_at=expires_at,
        )


@contextlib.asynccontextmanager
async def gateways(hub: HubOfTest, count: int = 1) -> AsyncIterator[list[GatewayAt]]:
    """Run gateways that the hub offers."""
    made = [GatewayAt(hub.signer) for _ in range(count)]
    hub.gateways += made
    try:
        for gateway in made:
            await gateway.start()
        yield made
    finally:
        for gateway in made:
            await gateway.stop()


def behind(program_port: int) -> Callable[[LinkUser, str, StreamPort], StreamHandler]:
    """Have streams to ``TARGET`` lead to a program on this machine, and others nowhere."""

    async def connect() -> Streams:
        return await asyncio.open_connection("127.0.0.1", program_port)

    def serve(_: LinkUser, target: str, port: StreamPort) -> StreamHandler:
        if target != TARGET:
            raise StreamRefusedError(f"there is no {target!r} here")
        return TcpHandler(port, connect)

    return serve


@contextlib.asynccontextmanager
async def accepting(
    hub: HubOfTest,
    program_port: int,
    *,
    times: LinkTimes = QUICK,
    limits: LinkLimits | None = None,
) -> AsyncIterator[LinkAcceptor]:
    """Run the node's end in front of a program."""
    acceptor = LinkAcceptor(
        own_key=hub.node_keys.edge,
        own=NODE,
        serve=behind(program_port),
        hub=HubIntroduction(hub.signer.key),
        pin=no_pin,
        times=times,
        limits=limits,
    )
    hub.acceptor = acceptor
    try:
        yield acceptor
    finally:
        await acceptor.aclose()


class Node(NamedTuple):
    """A node's end, the program behind it, and the gateways of its hub."""

    acceptor: LinkAcceptor
    echo: Echo
    gateways: list[GatewayAt]


@contextlib.asynccontextmanager
async def node_beyond(
    hub: HubOfTest, *, rtt_seconds: float, loss: float = 0.0, times: LinkTimes = QUICK
) -> AsyncIterator[tuple[SlowRelay, Node]]:
    """Run a node whose gateway both sides reach through a slow network only."""
    async with (
        gateways(hub) as made,
        slow_relay(made[0].port, rtt_seconds=rtt_seconds, loss=loss) as network,
        echo_server() as echo,
        accepting(hub, echo.port, times=times) as acceptor,
    ):
        made[0].public_port = network.port
        yield network, Node(acceptor, echo, made)


@contextlib.asynccontextmanager
async def running_node(
    hub: HubOfTest, *, gateway_count: int = 1, limits: LinkLimits | None = None
) -> AsyncIterator[Node]:
    """Run an echo behind a node's end, and gateways."""
    async with (
        gateways(hub, gateway_count) as made,
        echo_server() as echo,
        accepting(hub, echo.port, limits=limits) as acceptor,
    ):
        yield Node(acceptor, echo, made)


class End(NamedTuple):
    """The coordinator's end, and a port of loopback that leads to the program at the other."""

    link: LinkEndpoint
    forward: Forward

    @property
    def port(self) -> int:
        return self.forward.port

    def status(self) -> LinkStatus:
        return self.link.status()


def dialling(hub: HubOfTest, *, pin: Pin = no_pin, times: LinkTimes = QUICK) -> LinkEndpoint:
    """Make the coordinator's end of a link that a hub introduces."""
    supply = OfferSupply(hub, own_key=hub.backbone_keys.edge, own=BACKBONE, pin=pin)
    return LinkEndpoint(supply, times=times)


@contextlib.asynccontextmanager
async def edge(
    hub: HubOfTest, *, times: LinkTimes = QUICK, timeout_seconds: float = 120.0
) -> AsyncIterator[End]:
    """Run the coordinator's end, and wait until it has reached the node."""
    async with (
        await dialling(hub, times=times).open(timeout_seconds=timeout_seconds) as link,
        await Forward.open(link, TARGET) as forward,
    ):
        yield End(link, forward)
