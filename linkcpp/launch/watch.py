"""What is watched while a deployment runs: links, leases, llama-server and its log."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from linkcpp.launch.events import BytesCarried, Event, NodeFound, ServerSeen
from linkcpp.launch.failing import BrokenError
from linkcpp.launch.finding import FoundNode
from linkcpp.launch.llamaserver import LlamaServer
from linkcpp.link.endpoint import LinkEndpoint
from linkcpp.link.forward import Forward
from linkcpp.node.client import NodeError, NodeRefusedError
from linkcpp.node.records import ServerId, ServerState

RENEW_SECONDS = 5.0
PROGRESS_SECONDS = 0.5

Emit = Callable[[Event], None]


async def watch_link(link: LinkEndpoint, forward: Forward, node: FoundNode) -> None:
    """Wait until a stage's rpc-server ends, or its connections do with the agent or the link.

    Raises:
        BrokenError: it did.
    """
    reason = await first_result(forward.wait_refused(), link.wait_session_lost())
    raise BrokenError(
        f"the rpc-server on {node.record.name} was lost: {reason}",
        nodes=frozenset({node.record.node_id}),
    )


async def watch_server(
    stage: int, node: FoundNode, server_id: ServerId, emit: Emit, *, interval: Callable[[], float]
) -> None:
    """Renew a server's lease for ever, and tell what the node says of the server.

    Raises:
        BrokenError: the server is gone.
    """
    name, nodes = node.record.name, frozenset({node.record.node_id})
    while True:
        await asyncio.sleep(interval())
        asked_at = time.perf_counter()
        try:
            server = await node.client.renew(server_id)
        except NodeRefusedError as error:
            raise BrokenError(f"{name} lost its rpc-server: {error.message}", nodes=nodes) from None
        except NodeError:
            # The link tells when the node is gone (``watch_link``); until then it may come back.
            continue
        if server.state in (ServerState.FAILED, ServerState.STOPPED):
            detail = server.detail or server.state.value
            raise BrokenError(f"the rpc-server on {name} ended: {detail}", nodes=nodes)
        emit(ServerSeen(stage, server))
        rtt_ms = (time.perf_counter() - asked_at) * 1000
        emit(NodeFound(node.record.node_id, node.url, rtt_ms, node.client.way()))


async def watch_traffic(
    forwards: dict[int, Forward], emit: Emit, *, interval: Callable[[], float]
) -> None:
    """Tell for ever what went to the stages and came from them."""
    while True:
        for stage, forward in forwards.items():
            emit(BytesCarried(stage, forward.sent_bytes + forward.received_bytes))
        await asyncio.sleep(interval())


async def watch_engine(server: LlamaServer) -> None:
    """Wait until llama-server ends by itself.

    Raises:
        BrokenError: it ended.
    """
    raise BrokenError(await server.wait_for_end())


async def first_result(*ways: Coroutine[Any, Any, str]) -> str:
    """Return what comes first, and give the others up."""
    tasks = [asyncio.create_task(way) for way in ways]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
