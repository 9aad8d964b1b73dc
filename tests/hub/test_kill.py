"""A hub that is killed at any moment has lost nothing that it acknowledged."""

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from sqlalchemy import Engine, select

from linkcpp.hub.schema import MACHINES
from linkcpp.registry.client import HubClient
from linkcpp.registry.connection import HubError, HubUnreachableError
from linkcpp.registry.edges import EdgeRequest, GatewayHeartbeat
from linkcpp.registry.records import Heartbeat, JoinTokenRequest, Role
from tests.hub.hubs import Machine, RunningHub, gateway_url, node_state, running_hub

pytestmark = pytest.mark.slow

PORT_SECONDS = 300
ENOUGH = 20
ENOUGH_SECONDS = 300


@asynccontextmanager
async def hub_process(data: Path, database_url: str | None, port: int) -> AsyncIterator[str]:
    """Run `linkcpp hub`, and kill it at the end."""
    environment = os.environ | ({"LINKCPP_DATABASE": database_url} if database_url else {})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "linkcpp", "hub", "--data", str(data), "--port", str(port)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PORT_SECONDS):
            line = await process.stdout.readline()
        yield line.decode().split()[0]
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()


async def write_until_killed(client: HubClient, acknowledged: list[str]) -> None:
    """Make join tokens, and note those that the hub acknowledged."""
    request = JoinTokenRequest(role=Role.NODE, lifetime_seconds=3600)
    try:
        while True:
            made = await client.create_join_token(request)
            acknowledged.append(made.record.token_id)
    except HubError:
        return


async def beat_until_killed(node: Machine, url: str, acknowledged: list[float]) -> None:
    """Send heartbeats, and note when those were sent that the hub acknowledged."""
    async with httpx.AsyncClient(base_url=url, headers=node.headers, timeout=60) as http:
        while True:
            sent_at = time.time()
            body = Heartbeat(sequence=len(acknowledged))
            try:
                response = await http.post("/v1/heartbeat", content=body.model_dump_json())
            except httpx.HTTPError:
                return
            assert response.status_code == 200
            acknowledged.append(sent_at)


async def test_what_was_acknowledged_is_there_after_kill_9_at_any_moment(
    tmp_path: Path, database_url: str | None
) -> None:
    data = tmp_path / "hub"
    async with running_hub(data, database_url) as before:
        admin = await before.machine(Role.ADMIN)
        node = await before.online_node("attic", direct_urls=("ws://10.0.0.5:8716/v1/edge",))
        backbone = await before.machine(Role.BACKBONE)
        gateway = await before.online_gateway()
        edge = await backbone.client.create_edge(EdgeRequest(node_id=node.node_id))
        port = int(before.url.rpartition(":")[2])
    tokens: list[str] = []
    beats: list[float] = []
    for kill in (1, 2):
        async with HubClient(before.url, renew=admin.client._renew) as client:
            async with hub_process(data, database_url, port) as url:
                tasks = [
                    asyncio.create_task(write_until_killed(client, tokens)),
                    asyncio.create_task(write_until_killed(client, tokens)),
                    asyncio.create_task(beat_until_killed(node, url, beats)),
                ]
                async with asyncio.timeout(ENOUGH_SECONDS):
                    while min(len(tokens), len(beats)) < ENOUGH * kill:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                await asyncio.sleep(random.uniform(0, 0.1))  # noqa: S311
            await asyncio.gather(*tasks)
    async with running_hub(data, database_url) as after:
        listed = (await after.http.get("/v1/join-tokens", headers=admin.headers)).json()["tokens"]
        assert set(tokens) <= {one["token_id"] for one in listed}
        told = (await after.http.get("/v1/nodes", headers=admin.headers)).json()["nodes"]
        attic = next(one for one in told if one["node_id"] == node.node_id)
        assert attic["state"]["direct_urls"] == ["ws://10.0.0.5:8716/v1/edge"]
        assert await last_seen_of(after, node) >= beats[-1]
        # The edge is still one, and its gateway may keep it.
        body = GatewayHeartbeat(url=gateway_url("relay"), edges=(edge.edge_id,))
        kept = await after.http.post(
            "/v1/gateways/heartbeat", json=body.model_dump(mode="json"), headers=gateway.headers
        )
        assert kept.json()["close_edges"] == []


async def last_seen_of(hub: RunningHub, node: Machine) -> float:
    query = select(MACHINES.c.last_seen).where(MACHINES.c.node_id == node.node_id)

    def read(engine: Engine) -> float:
        with engine.connect() as connection:
            return float(connection.execute(query).scalar_one())

    return await hub.hub.read(read)


async def test_machines_come_back_by_themselves_when_a_hub_runs_again(tmp_path: Path) -> None:
    data = tmp_path / "hub"
    async with running_hub(data, None) as first:
        node = await first.machine(Role.NODE)
        port = int(first.url.rpartition(":")[2])
    async with HubClient(first.url, renew=node.client._renew) as client:
        async with hub_process(data, None, port):
            state = node_state(node)
            assert not (await client.heartbeat(Heartbeat(sequence=0, state=state))).wants_state
        with pytest.raises(HubUnreachableError):
            await client.heartbeat(Heartbeat(sequence=1))
        async with hub_process(data, None, port):
            answer = await client.heartbeat(Heartbeat(sequence=2))
    assert not answer.wants_state
