"""``linkcpp gateway`` as a process, with a real hub: joins, relays, cuts what the hub ends."""

import asyncio
import contextlib
import math
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from websockets.asyncio.client import ClientConnection, connect

from linkcpp.cli.gateway import _public_url
from linkcpp.cluster.records import NodeId
from linkcpp.common.errors import LinkcppError
from linkcpp.registry.credentials import HubCredentials
from linkcpp.registry.edges import EdgeOffer, EdgeRequest
from linkcpp.registry.records import Heartbeat, NodeToken, Role
from linkcpp.registry.relay import PAIRED, Hello, RelayCloseCode, encode_hello
from tests.gateway.gateways import closed_with
from tests.hub.hubs import Machine, RunningHub, running_hub
from tests.support.ports import free_port

pytestmark = pytest.mark.slow

SECONDS = 60


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[RunningHub]:
    async with running_hub(tmp_path / "hub", None) as running:
        yield running


@contextlib.asynccontextmanager
async def gateway_verb(home: Path, url: str, port: int, token: str = "") -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "linkcpp.cli.main", "gateway", "--hub", url, "--port", str(port)),
        stdout=PIPE,
        stderr=PIPE,
        env={**os.environ, "LINKCPP_HOME": str(home), "LINKCPP_JOIN_TOKEN": token},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.communicate()


async def until_online(hub: RunningHub, asking: Machine, count: int = 1) -> None:
    async with asyncio.timeout(SECONDS):
        while True:
            gateways = (await asking.client.gateways()).gateways
            if sum(gateway.is_online for gateway in gateways) == count:
                return
            await asyncio.sleep(0.1)


async def offers(node: Machine, backbone: Machine) -> tuple[EdgeOffer, EdgeOffer]:
    # A node that the hub has not just heard of would be asked first, and answers nothing here.
    await node.client.heartbeat(Heartbeat(sequence=1))
    mine = await backbone.client.create_edge(EdgeRequest(node_id=node.node_id))
    answer = await node.client.heartbeat(Heartbeat(sequence=2))
    (theirs,) = (offer for offer in answer.offers if offer.edge_id == mine.edge_id)
    return mine, theirs


@contextlib.asynccontextmanager
async def dialled(offer: EdgeOffer) -> AsyncIterator[ClientConnection]:
    assert offer.relay_url is not None
    async with connect(offer.relay_url, compression=None, proxy=None) as connection:
        await connection.send(encode_hello(Hello(offer.role, offer.edge_id, offer.ticket)))
        yield connection


@contextlib.asynccontextmanager
async def paired(
    node: Machine, backbone: Machine
) -> AsyncIterator[tuple[ClientConnection, ClientConnection]]:
    mine, theirs = await offers(node, backbone)
    async with dialled(mine) as one, dialled(theirs) as other:
        assert await one.recv() == PAIRED
        assert await other.recv() == PAIRED
        yield one, other


async def test_a_gateway_joins_relays_and_goes_on_while_the_hub_is_away(tmp_path: Path) -> None:
    home, port = tmp_path / "home", free_port()
    async with contextlib.AsyncExitStack() as stack:
        async with running_hub(tmp_path / "hub", None) as hub:
            token = await hub.join_token(Role.GATEWAY)
            await stack.enter_async_context(gateway_verb(home, hub.url, port, token))
            node, backbone = await hub.online_node(), await hub.machine(Role.BACKBONE, name="desk")
            await until_online(hub, backbone)
            one, other = await stack.enter_async_context(paired(node, backbone))
            later = await offers(node, backbone)
        await one.send(b"the hub is gone")
        assert await other.recv() == b"the hub is gone"
        async with dialled(later[0]) as first, dialled(later[1]) as second:
            assert await first.recv() == PAIRED
            assert await second.recv() == PAIRED


async def test_a_revoked_machine_is_cut_within_five_seconds(
    hub: RunningHub, tmp_path: Path
) -> None:
    token = await hub.join_token(Role.GATEWAY)
    async with gateway_verb(tmp_path / "home", hub.url, free_port(), token):
        backbone = await hub.machine(Role.BACKBONE, name="desk")
        admin = await hub.machine(Role.ADMIN, name="admin")
        await until_online(hub, backbone)
        took_seconds: list[float] = []
        # The best of some: a machine that is busy elsewhere is late now and then.
        while min(took_seconds, default=math.inf) >= 5:
            assert len(took_seconds) < 4, took_seconds
            node = await hub.online_node(f"attic {len(took_seconds)}")
            async with paired(node, backbone) as (one, other):
                begin = time.monotonic()
                await admin.client.revoke_node(node.node_id)
                for connection in (one, other):
                    with closed_with(RelayCloseCode.REVOKED):
                        await connection.recv()
                took_seconds.append(time.monotonic() - begin)


async def test_a_revoked_gateway_ends_and_says_why(hub: RunningHub, tmp_path: Path) -> None:
    token = await hub.join_token(Role.GATEWAY)
    async with gateway_verb(tmp_path / "home", hub.url, free_port(), token) as process:
        admin = await hub.machine(Role.ADMIN, name="admin")
        await until_online(hub, admin)
        (gateway,) = (await admin.client.gateways()).gateways
        await admin.client.revoke_node(gateway.gateway_id)
        async with asyncio.timeout(SECONDS):
            _, told = await process.communicate()
        assert process.returncode == 2
        assert b"revoked" in told


async def test_a_second_start_needs_no_token_and_another_role_is_refused(
    hub: RunningHub, tmp_path: Path
) -> None:
    asking = await hub.machine(Role.BACKBONE, name="desk")
    home, token = tmp_path / "home", await hub.join_token(Role.GATEWAY)
    async with gateway_verb(home, hub.url, free_port(), token) as process:
        await until_online(hub, asking)
        process.send_signal(signal.SIGTERM)
        _, told = await process.communicate()
        assert process.returncode == 0, told
    async with gateway_verb(home, hub.url, port := free_port()) as process:
        assert process.stdout is not None
        assert str(port).encode() in await process.stdout.readline()
    wrong = await hub.join_token(Role.NODE)
    async with gateway_verb(tmp_path / "other", hub.url, free_port(), wrong) as process:
        _, told = await process.communicate()
        assert process.returncode == 2
        assert b"is for the role node, not gateway; it keeps its use" in told
    assert token.encode() not in told


def test_a_gateway_without_tls_is_refused_where_its_hub_has_tls() -> None:
    token = NodeToken(token="a.b.c", role=Role.GATEWAY, expires_at=1.8e9)
    credentials = HubCredentials(
        url="https://hub.example",
        hub_id=NodeId("00000000-0000-4000-8000-00000000000a"),
        hub_public_key="A" * 43,
        node_token=token,
    )
    with pytest.raises(LinkcppError, match="a gateway needs TLS"):
        _public_url("http://gw.example", "http://127.0.0.1:1", credentials, plain=True)
