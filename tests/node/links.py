"""Links of tests to agents: ports that lead to programs, and paths that break."""

from linkcpp.link.endpoint import LinkEndpoint
from linkcpp.link.forward import Forward
from linkcpp.link.transport import WebSocketTransport
from linkcpp.node.client import NodeClient
from linkcpp.node.records import ServerRecord, WorkerId, server_target, worker_target


async def server_forward(client: NodeClient, server: ServerRecord) -> Forward:
    """Have a port of loopback lead to an rpc-server."""
    return await Forward.open(client.link, server_target(server.server_id))


async def worker_forward(client: NodeClient, worker_id: WorkerId) -> Forward:
    """Have a port of loopback lead to an expert worker."""
    return await Forward.open(client.link, worker_target(worker_id))


def break_path(link: LinkEndpoint) -> None:
    """Lose the connection that carries a link, as a network does that fails."""
    pump = link._paths._pump
    assert pump is not None
    assert pump.channel is not None
    transport = pump.channel._transport
    assert isinstance(transport, WebSocketTransport)
    transport._transport.abort()
