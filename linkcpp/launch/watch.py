"""What is watched while a deployment runs: links, leases, llama-server and its log."""

import asyncio
import time
from collections.abc import Callable

from linkcpp.launch.events import BytesCarried, Event, NodeFound, ServerSeen
from linkcpp.launch.failing import BrokenError
from linkcpp.launch.finding import FoundNode
from linkcpp.launch.llamaserver import LlamaServer
from linkcpp.node.client import NodeError, NodeRefusedError
from linkcpp.node.records import ServerId, ServerState
from linkcpp.node.tunnel import Tunnel

RENEW_SECONDS = 5.0
PROGRESS_SECONDS = 0.5
# With a pause and a deadline each, a node is given up after about the time that its lease runs.
SILENCES_FORGIVEN = 1

Emit = Callable[[Event], None]


async def watch_tunnel(tunnel: Tunnel, node: FoundNode) -> None:
    """Wait until a stage's link breaks.

    Raises:
        BrokenError: it broke.
    """
    reason = await tunnel.wait_lost()
    raise BrokenError(
        f"the rpc-server on {node.record.name} was lost: {reason}",
        nodes=frozenset({node.record.node_id}),
    )


async def watch_server(
    stage: int, node: FoundNode, server_id: ServerId, emit: Emit, *, interval: Callable[[], float]
) -> None:
    """Renew a server's lease for ever, and tell what the node says of the server.

    Raises:
        BrokenError: the node stays silent, or the server is gone.
    """
    silences = 0
    name, nodes = node.record.name, frozenset({node.record.node_id})
    while True:
        await asyncio.sleep(interval())
        asked_at = time.perf_counter()
        try:
            server = await node.client.renew(server_id)
        except NodeRefusedError as error:
            raise BrokenError(f"{name} lost its rpc-server: {error.message}", nodes=nodes) from None
        except NodeError:
            silences += 1
            if silences > SILENCES_FORGIVEN:
                raise BrokenError(f"{name} does not answer any more", nodes=nodes) from None
            continue
        silences = 0
        if server.state in (ServerState.FAILED, ServerState.STOPPED):
            detail = server.detail or server.state.value
            raise BrokenError(f"the rpc-server on {name} ended: {detail}", nodes=nodes)
        emit(ServerSeen(stage, server))
        rtt_ms = (time.perf_counter() - asked_at) * 1000
        emit(NodeFound(node.record.node_id, node.url, rtt_ms, node.client.way()))


async def watch_traffic(
    tunnels: dict[int, Tunnel], emit: Emit, *, interval: Callable[[], float]
) -> None:
    """Tell for ever what the tunnels carried."""
    while True:
        for stage, tunnel in tunnels.items():
            emit(BytesCarried(stage, tunnel.sent_bytes + tunnel.received_bytes))
        await asyncio.sleep(interval())


async def watch_engine(server: LlamaServer) -> None:
    """Wait until llama-server ends by itself.

    Raises:
        BrokenError: it ended.
    """
    raise BrokenError(await server.wait_for_end())
