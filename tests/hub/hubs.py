"""Running hubs and machines that join them, for tests."""

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

from linkcpp.cluster.records import NodeDevice, NodeId, NodeRecord
from linkcpp.common.access import RateLimit
from linkcpp.common.sockets import listen
from linkcpp.hub.app import create_app
from linkcpp.hub.join_tokens import create_join_token
from linkcpp.hub.server import serve_hub
from linkcpp.hub.service import Hub, open_hub
from linkcpp.registry.client import HubClient, machine_renewal
from linkcpp.registry.credentials import HubCredentials
from linkcpp.registry.edges import GatewayHeartbeat
from linkcpp.registry.encoding import nonce
from linkcpp.registry.keys import MachineKeys, make_keys
from linkcpp.registry.proofs import join_request
from linkcpp.registry.records import (
    Heartbeat,
    JoinAnswer,
    JoinRequest,
    JoinTokenRequest,
    NodeState,
    Role,
)


class Clock:
    """The hub's clock: tests let time go by (``offset``), or set it (``error``)."""

    def __init__(self) -> None:
        self.offset = 0.0
        self.error = 0.0

    def __call__(self) -> float:
        return time.time() + self.offset + self.error

    def steady(self) -> float:
        return time.monotonic() + self.offset


class Machine(NamedTuple):
    """A machine that joined."""

    node_id: NodeId
    name: str
    keys: MachineKeys
    client: HubClient
    token: str

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}


class RunningHub(NamedTuple):
    """A hub that serves on loopback, and a client for calls of every kind."""

    hub: Hub
    url: str
    clock: Clock
    http: httpx.AsyncClient
    clients: list[HubClient]

    async def join_token(
        self, role: Role = Role.NODE, *, uses: int = 1, lifetime_seconds: float = 3600
    ) -> str:
        request = JoinTokenRequest(role=role, lifetime_seconds=lifetime_seconds, use_limit=uses)
        now = self.clock()
        made = await self.hub.writer.write(
            lambda connection: create_join_token(connection, request, now)
        )
        return made.token

    def join_body(
        self,
        token: str,
        *,
        node_id: str | None = None,
        keys: MachineKeys | None = None,
        name: str = "attic",
    ) -> JoinRequest:
        keys = keys or make_keys()
        return join_request(
            keys.signing,
            hub_id=self.hub.identity.hub_id,
            token=token,
            node_id=node_id or str(uuid.uuid4()),
            name=name,
            signing_key=keys.signing_public,
            edge_key=keys.edge_public,
            time=self.hub.registrar.told_time(),
            nonce=nonce(),
        )

    async def join(self, body: JoinRequest) -> httpx.Response:
        return await self.http.post("/v1/join", json=body.model_dump(mode="json"))

    async def machine(
        self,
        role: Role,
        *,
        name: str = "attic",
        node_id: str | None = None,
        keys: MachineKeys | None = None,
    ) -> Machine:
        """Let a machine join, by the calls that a real one makes."""
        keys = keys or make_keys()
        body = self.join_body(await self.join_token(role), node_id=node_id, keys=keys, name=name)
        response = await self.join(body)
        assert response.status_code == 200, response.text
        answer = JoinAnswer.model_validate_json(response.content)
        credentials = HubCredentials(
            url=self.url,
            hub_id=answer.hub_id,
            hub_public_key=answer.hub_public_key,
            node_token=answer.node_token,
        )
        client = HubClient(
            self.url,
            renew=machine_renewal(credentials, body.node_id, keys),
            hub_id=credentials.hub_id,
        )
        self.clients.append(client)
        return Machine(NodeId(body.node_id), name, keys, client, answer.node_token.token)

    async def online_node(self, name: str = "attic", **state: object) -> Machine:
        node = await self.machine(Role.NODE, name=name)
        await node.client.heartbeat(Heartbeat(sequence=0, state=node_state(node, **state)))
        return node

    async def online_gateway(self, name: str = "relay") -> Machine:
        gateway = await self.machine(Role.GATEWAY, name=name)
        await gateway.client.gateway_heartbeat(GatewayHeartbeat(url=gateway_url(name)))
        return gateway


def gateway_url(name: str) -> str:
    return f"wss://{name}.example/v1/relay"


def node_state(node: Machine, **state: object) -> NodeState:
    """What a small node tells of itself."""
    record = NodeRecord(
        node_id=node.node_id,
        name=node.name,
        agent_version="0.1.0",
        platform="linux",
        core_count=4,
        memory_limit_bytes=None,
        devices=(
            NodeDevice(
                name="CPU",
                description="CPU",
                is_cpu=True,
                total_bytes=2**33,
                free_bytes=2**32,
                offered_bytes=2**31,
                read_bytes_per_second=None,
            ),
        ),
        engine=None,
        engine_problem=None,
    )
    return NodeState.model_validate({"record": record, **state})


@asynccontextmanager
async def running_hub(
    data: Path, database_url: str | None, *, open_calls: RateLimit | None = None
) -> AsyncIterator[RunningHub]:
    """Serve a hub on a free port of loopback; its clock can be turned forward."""
    clock = Clock()
    # Tests join many machines at once from one address.
    open_calls = open_calls or RateLimit(tries=1000, seconds_per_try=0.001)
    stop = asyncio.Event()
    sockets = listen("127.0.0.1", 0)
    async with await open_hub(data, database_url, clock=clock, steady=clock.steady) as hub:
        # Most machines of tests listen to no events: whoever told of itself is there.
        hub.presence_probe.fresh_seconds = 3600.0
        app = create_app(hub, open_calls=open_calls, failures=RateLimit(tries=1000))
        serving = asyncio.create_task(serve_hub(hub, app, sockets, stop))
        url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            running = RunningHub(hub, url, clock, http, [])
            try:
                yield running
            finally:
                await asyncio.gather(*(client.aclose() for client in running.clients))
                stop.set()
                await serving


def new_database_name() -> str:
    return f"hub_{secrets.token_hex(6)}"
