"""Everything that an attempt holds on this machine and on the nodes, and how it is given back."""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from linkcpp.cluster.records import NodeId
from linkcpp.common.errors import LinkcppError
from linkcpp.launch.finding import FoundNode
from linkcpp.launch.llamaserver import LlamaServer
from linkcpp.link.forward import Forward
from linkcpp.node.records import ServerRecord

log = logging.getLogger("linkcpp.launch")

# A node that does not answer ends its server by the lease; waiting longer would only delay others.
GIVE_BACK_SECONDS = 10.0


@dataclass
class Resources:
    """What was found and started so far; stages are named by their index in the plan."""

    nodes: dict[NodeId, FoundNode] = field(default_factory=dict)
    servers: dict[int, tuple[FoundNode, ServerRecord]] = field(default_factory=dict)
    forwards: dict[int, Forward] = field(default_factory=dict)
    llama_server: LlamaServer | None = None

    async def give_back(self) -> None:
        """Stop and close everything, the user of each thing before the thing itself."""
        if self.llama_server is not None:
            await self.llama_server.stop()
            self.llama_server = None
        await _all(forward.aclose() for forward in self.forwards.values())
        await _all(node.client.delete(server.server_id) for node, server in self.servers.values())
        await _all(node.client.aclose() for node in self.nodes.values())
        self.forwards.clear()
        self.servers.clear()
        self.nodes.clear()


async def _all(tasks: Any) -> None:
    await asyncio.gather(*(_quietly(task) for task in tasks))


async def _quietly(task: Coroutine[Any, Any, None]) -> None:
    try:
        with contextlib.suppress(LinkcppError, OSError):
            async with asyncio.timeout(GIVE_BACK_SECONDS):
                await task
    except TimeoutError:
        log.info("a node did not answer while the deployment was being stopped")
