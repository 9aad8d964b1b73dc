"""Links of tests to agents: ports that lead to programs, and paths that break."""

import asyncio

from linkcpp.common.closing import AsyncClosing
from linkcpp.link.endpoint import LinkEndpoint
from linkcpp.link.forward import Forward, Lease
from linkcpp.link.introduced import PROGRAM_TARGET, DialledEnd, IntroducedSupply, new_key
from linkcpp.link.records import LinkTimes
from linkcpp.link.transport import WebSocketTransport
from linkcpp.node.client import NodeClient
from linkcpp.node.records import (
    NewWorker,
    ServerRecord,
    lease_target,
    server_target,
    worker_target,
)

# Who links to the workers of tests.
OWN_KEY, LINK_KEY = new_key()


async def server_forward(client: NodeClient, server: ServerRecord) -> Forward:
    """Have a port of loopback lead to an rpc-server."""
    return await Forward.open(client.link, server_target(server.server_id))


def end_of(client: NodeClient, made: NewWorker, relayed_port: int | None) -> DialledEnd:
    """Say how a worker is dialled: directly, or at a port that leads to it over a link."""
    is_relayed = relayed_port is not None
    return DialledEnd(
        link_id=made.worker.worker_id,
        own_key=OWN_KEY,
        peer_key=made.link_key,
        direct_urls=() if is_relayed else client.link.direct_urls,
        relayed_url=f"http://127.0.0.1:{relayed_port}" if is_relayed else None,
    )


class WorkerPort(AsyncClosing):
    """A port of loopback that leads to an expert worker over a link of its own."""

    def __init__(self, lease: Lease, relay: Forward, link: LinkEndpoint, forward: Forward) -> None:
        self.port = forward.port
        self.lease = lease
        self.link = link
        self.forward = forward
        self._relay = relay

    async def wait_ended(self) -> str:
        """Wait until the node tells that the worker ended, and why."""
        return await self.lease.wait_ended()

    async def aclose(self) -> None:
        """End the link and give the lease back."""
        await self.forward.aclose()
        await self.link.aclose()
        await self._relay.aclose()
        self.lease.close()


async def worker_port(
    client: NodeClient, made: NewWorker, *, is_relayed: bool = False
) -> WorkerPort:
    """Link to a worker; with ``is_relayed`` over the link to its node only."""
    worker_id = made.worker.worker_id
    relay = await Forward.open(client.link, worker_target(worker_id))
    end = end_of(client, made, relay.port if is_relayed else None)
    link = LinkEndpoint(IntroducedSupply(end), times=LinkTimes(refused=0.0))
    await link.open(timeout_seconds=10)
    lease = Lease.open(client.link, lease_target(worker_id))
    await asyncio.sleep(0)
    return WorkerPort(lease, relay, link, await Forward.open(link, PROGRAM_TARGET))


def break_path(link: LinkEndpoint) -> None:
    """Lose the connection that carries a link, as a network does that fails."""
    pump = link._paths._pump
    assert pump is not None
    assert pump.channel is not None
    transport = pump.channel._transport
    assert isinstance(transport, WebSocketTransport)
    transport._transport.abort()
