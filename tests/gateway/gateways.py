"""A gateway on a port of loopback, with a hub's key that tests sign tickets with."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from linkcpp.common.sockets import listen
from linkcpp.gateway.relay import Relay, RelayLimits
from linkcpp.gateway.server import serve_gateway
from linkcpp.registry.edges import EdgeRole
from linkcpp.registry.relay import PAIRED, RELAY_PATH, Hello, encode_hello
from linkcpp.registry.tickets import EdgeClaims, HubKey, sign_edge_ticket

HUB_ID = "11111111-1111-4111-8111-111111111111"
GATEWAY_ID = "22222222-2222-4222-8222-222222222222"
MACHINE_IDS = {
    EdgeRole.BACKBONE: "33333333-3333-4333-8333-333333333333",
    EdgeRole.NODE: "44444444-4444-4444-8444-444444444444",
}
METRICS_TOKEN = "metrics-token-of-a-test"
BOTH = (EdgeRole.BACKBONE, EdgeRole.NODE)


def new_edge() -> str:
    return secrets.token_hex(16)


class Signer:
    """A hub's key."""

    def __init__(self, key: Ed25519PrivateKey | None = None) -> None:
        self.private = key or Ed25519PrivateKey.generate()
        self.key = HubKey(HUB_ID, self.private.public_key())

    def ticket(
        self,
        edge_id: str,
        role: EdgeRole,
        *,
        gateway: str | None = GATEWAY_ID,
        lifetime_seconds: float = 600.0,
    ) -> str:
        claims = EdgeClaims(
            iss=HUB_ID,
            sub=MACHINE_IDS[role],
            edge=edge_id,
            role=role,
            gateway=gateway,
            exp=time.time() + lifetime_seconds,
        )
        return sign_edge_ticket(self.private, claims)

    def hello(self, edge_id: str, role: EdgeRole) -> bytes:
        return encode_hello(Hello(role, edge_id, self.ticket(edge_id, role)))


class Gateway(NamedTuple):
    """A gateway that runs in this process, or in another one where there is no ``relay``."""

    port: int
    signer: Signer
    relay: Relay | None = None
    process_id: int | None = None

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}{RELAY_PATH}"

    @contextlib.asynccontextmanager
    async def dial(self) -> AsyncIterator[ClientConnection]:
        async with connect(
            self.url,
            compression=None,
            proxy=None,
            max_size=None,
            ping_interval=None,
            close_timeout=1,
        ) as connection:
            yield connection

    @contextlib.asynccontextmanager
    async def side(self, edge_id: str, role: EdgeRole) -> AsyncIterator[ClientConnection]:
        """Dial and say hello."""
        async with self.dial() as connection:
            await connection.send(self.signer.hello(edge_id, role))
            yield connection

    @contextlib.asynccontextmanager
    async def pair(
        self, edge_id: str | None = None
    ) -> AsyncIterator[tuple[ClientConnection, ClientConnection]]:
        """Dial both sides of an edge: backbone, node."""
        edge_id = edge_id or new_edge()
        async with self.side(edge_id, BOTH[0]) as backbone, self.side(edge_id, BOTH[1]) as node:
            assert await backbone.recv() == PAIRED
            assert await node.recv() == PAIRED
            yield backbone, node


@contextlib.asynccontextmanager
async def running_gateway(limits: RelayLimits | None = None) -> AsyncIterator[Gateway]:
    signer = Signer()
    relay = Relay(gateway_id=GATEWAY_ID, hub=signer.key, limits=limits)
    sockets = listen("127.0.0.1", 0)
    stop = asyncio.Event()
    serving = asyncio.create_task(serve_gateway(relay, METRICS_TOKEN, sockets, stop))
    try:
        yield Gateway(sockets[0].getsockname()[1], signer, relay)
    finally:
        stop.set()
        await serving
        for opened in sockets:
            opened.close()


@contextlib.contextmanager
def closed_with(code: int) -> Iterator[None]:
    """Expect that a connection is closed from the other end with a code."""
    with pytest.raises(ConnectionClosed) as caught:
        yield
    assert caught.value.rcvd is not None, "closed without a close frame"
    assert caught.value.rcvd.code == code, caught.value.rcvd
