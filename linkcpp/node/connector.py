"""Clients of nodes, whatever way leads to each: an address on a network, or a hub.

An address at a hub (``hub+https://hub.example#ID``) stands for an edge: a port on this machine's
loopback behind which the node's agent seems to be, over a direct link or a relay.
"""

import asyncio
import contextlib

from linkcpp.cluster.identity import load_identity
from linkcpp.cluster.records import NodeId
from linkcpp.cluster.token import load_token
from linkcpp.common.errors import LinkcppError
from linkcpp.link.endpoint import EdgeEndpoint
from linkcpp.link.offers import EdgeEndedError, HubOffers
from linkcpp.link.status import EdgeState, EdgeStatus
from linkcpp.node.client import EdgePort, NodeClient, NodeUnreachableError, WrongTokenError
from linkcpp.registry.client import HubClient, joined_client
from linkcpp.registry.connection import HubError
from linkcpp.registry.hub_discovery import parse_hub_node_url
from linkcpp.registry.keys import load_keys
from linkcpp.registry.relay_rtt import relay_rtts_ms


class NodeConnector:
    """Opens clients; edges and connections to hubs are shared by them and end with ``aclose``."""

    def __init__(self) -> None:
        self._hubs: dict[str, HubClient] = {}
        self._rtts_ms: dict[str, dict[str, float]] = {}
        self._edges: dict[str, EdgeEndpoint] = {}
        self._opening: dict[str, asyncio.Lock] = {}

    async def open(self, url: str, *, timeout_seconds: float = 10.0) -> NodeClient:
        """Make the client of the node at ``url``; the caller closes it.

        Raises:
            WrongTokenError: this machine has no cluster token, or did not join the hub.
            NodeUnreachableError: the edge does not come about.
        """
        through = parse_hub_node_url(url)
        if through is None:
            return NodeClient(url, _cluster_token(), timeout_seconds=timeout_seconds)
        # Of several who want the same node at once, one opens the edge.
        async with self._opening.setdefault(url, asyncio.Lock()):
            edge = self._edges.get(url)
            if edge is None or edge.status().state in (EdgeState.FAILED, EdgeState.CLOSED):
                edge = self._edges[url] = await self._edge(*through)
        return NodeClient(
            url,
            edge.token,
            timeout_seconds=timeout_seconds,
            edge=EdgePort(edge.port, through[1]),
            way=lambda: edge_way(edge.status()),
        )

    async def aclose(self) -> None:
        """End the edges, and the connections to hubs."""
        edges, hubs = list(self._edges.values()), list(self._hubs.values())
        self._edges.clear()
        self._hubs.clear()
        await asyncio.gather(*(edge.aclose() for edge in edges))
        await asyncio.gather(*(hub.aclose() for hub in hubs))

    async def _edge(self, hub_url: str, node_id: NodeId) -> EdgeEndpoint:
        hub = self._hub(hub_url)
        rtts_ms = await self._relay_rtts_ms(hub)
        endpoint = EdgeEndpoint(
            HubOffers(hub, node_id, lambda: rtts_ms),
            own_key=load_keys().edge,
            own_node_id=load_identity().node_id,
        )
        try:
            return await endpoint.open()
        except LinkcppError as error:
            code = error.code if isinstance(error, EdgeEndedError) else "no_edge"
            raise NodeUnreachableError(error.message, hint=error.hint, code=code) from error

    async def _relay_rtts_ms(self, hub: HubClient) -> dict[str, float]:
        """Measure the way to the hub's gateways, once."""
        if hub.url not in self._rtts_ms:
            self._rtts_ms[hub.url] = {}
            with contextlib.suppress(HubError):
                listed = await hub.gateways()
                self._rtts_ms[hub.url] = await relay_rtts_ms(listed.gateways)
        return self._rtts_ms[hub.url]

    def _hub(self, hub_url: str) -> HubClient:
        known = self._hubs.get(hub_url)
        if known is None:
            try:
                known = self._hubs[hub_url] = joined_client(hub_url)
            except LinkcppError as error:
                raise WrongTokenError(error.message, hint=error.hint, code="not_joined") from error
        return known


def edge_way(status: EdgeStatus) -> str:
    """Say in words which way an edge takes now, and why. Pure."""
    if status.state is EdgeState.UP:
        again = f", {status.reconnect_count} times anew" if status.reconnect_count else ""
        return f"{status.why or status.path}{again}"
    return f"{status.state.value}: {status.problem or 'no path yet'}"


def _cluster_token() -> str:
    try:
        return load_token()
    except LinkcppError as error:
        raise WrongTokenError(error.message, hint=error.hint, code="no_token") from error
