"""Clients of nodes, whatever way leads to each: an address on a network, or a hub.

An address at a hub (``hub+https://hub.example#ID``) names a node that the hub introduces; any other
one is a node of this machine's cluster, and the cluster token introduces the two.
"""

import asyncio
import contextlib

from linkcpp.cluster.config import load_config, node_url
from linkcpp.cluster.identity import load_identity
from linkcpp.cluster.mdns import browse
from linkcpp.cluster.token import load_token
from linkcpp.common.errors import LinkcppError
from linkcpp.link.endpoint import LinkEndpoint
from linkcpp.link.handshake import Machine, cluster_psk
from linkcpp.link.offers import HubOffers, LinkEndedError
from linkcpp.link.records import LinkTimes
from linkcpp.link.supply import ClusterSupply, OfferSupply
from linkcpp.node.client import NodeClient, NodeUnreachableError, WrongTokenError
from linkcpp.registry.client import HubClient, joined_client
from linkcpp.registry.connection import HubError
from linkcpp.registry.credentials import pin_peer
from linkcpp.registry.hub_location import parse_hub_node_url
from linkcpp.registry.keys import load_keys
from linkcpp.registry.relay_rtt import relay_rtts_ms

_LISTEN_SECONDS = 2.0
_HINT_REACH = "See that `linkcpp node` runs there and that no firewall blocks its port."
_HINT_TOKEN = (
    "Give both machines one token: `linkcpp token --show | ssh OTHER linkcpp token set`, "  # noqa: S105
    "then restart `linkcpp node` there."
)


class NodeConnector:
    """Opens clients; links and connections to hubs are shared by them and end with ``aclose``."""

    def __init__(self) -> None:
        self._hubs: dict[str, HubClient] = {}
        self._rtts_ms: dict[str, dict[str, float]] = {}
        self._links: dict[str, LinkEndpoint] = {}
        self._opening: dict[str, asyncio.Lock] = {}

    async def open(self, url: str, *, timeout_seconds: float = 10.0) -> NodeClient:
        """Make the client of the node at ``url``; the caller closes it.

        Raises:
            WrongTokenError: this machine has no cluster token or another one, or did not join the
                hub.
            NodeUnreachableError: the link does not come about.
        """
        # Of several who want the same node at once, one opens the link.
        async with self._opening.setdefault(url, asyncio.Lock()):
            link = self._links.get(url)
            if link is None or link.has_ended:
                link = self._links[url] = await self._shared(await self._link(url, timeout_seconds))
        return NodeClient(url, link, timeout_seconds=timeout_seconds)

    async def aclose(self) -> None:
        """End the links, and the connections to hubs."""
        links, hubs = list(self._links.values()), list(self._hubs.values())
        self._links.clear()
        self._hubs.clear()
        await asyncio.gather(*(link.aclose() for link in links))
        await asyncio.gather(*(hub.aclose() for hub in hubs))

    async def _shared(self, link: LinkEndpoint) -> LinkEndpoint:
        """Return the link that there is to this node already, at another of its addresses."""
        for known in self._links.values():
            if not known.has_ended and known.peer == link.peer:
                await link.aclose()
                return known
        return link

    async def _link(self, url: str, timeout_seconds: float) -> LinkEndpoint:
        through = parse_hub_node_url(url)
        if through is None:
            return await open_link(url, _cluster_token(), timeout_seconds=timeout_seconds)
        hub = self._hub(through[0])
        rtts_ms = await self._relay_rtts_ms(hub)
        supply = OfferSupply(
            HubOffers(hub, through[1], lambda: rtts_ms),
            own_key=load_keys().edge,
            own=_this_machine(),
            pin=pin_peer,
        )
        try:
            return await LinkEndpoint(supply).open()
        except LinkcppError as error:
            code = error.code if isinstance(error, LinkEndedError) else "no_edge"
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


async def open_link(
    url: str, token: str, *, timeout_seconds: float = 10.0, times: LinkTimes | None = None
) -> LinkEndpoint:
    """Link to the node of this cluster at ``url``; the caller closes it.

    Raises:
        WrongTokenError: the node has another token.
        NodeUnreachableError: nothing answers there, or it is not a node.
    """
    supply = ClusterSupply(
        (url,),
        own_key=load_keys().edge,
        own=_this_machine(),
        psk=cluster_psk(token),
        find=_advertised_urls,
    )
    try:
        return await LinkEndpoint(supply, times=times).open(timeout_seconds=timeout_seconds)
    except LinkEndedError as error:
        if error.code == "not_introduced":
            raise WrongTokenError(
                f"The node at {url} has another cluster token.",
                hint=_HINT_TOKEN,
                code="wrong_token",
            ) from error
        raise NodeUnreachableError(
            f"The node at {url} does not answer: {error.message}.",
            hint=_HINT_REACH,
            code="unreachable",
            told=error.message,
        ) from error
    except LinkcppError as error:
        raise NodeUnreachableError(error.message, hint=_HINT_REACH, code="unreachable") from error


async def _advertised_urls(node_id: str) -> tuple[str, ...]:
    """Listen for a moment where a node is advertised now; nowhere if mDNS cannot be used."""
    with contextlib.suppress(LinkcppError, TimeoutError):
        if load_config().mdns:
            async with (
                asyncio.timeout(_LISTEN_SECONDS),
                contextlib.aclosing(browse()) as advertised,
            ):
                async for service in advertised:
                    if service.node_id == node_id:
                        return tuple(node_url(host, service.port) for host in service.hosts)
    return ()


async def open_client(url: str, token: str, *, timeout_seconds: float = 10.0) -> NodeClient:
    """Make a client with a link of its own, which ends with it; raises as ``open_link``."""
    link = await open_link(url, token, timeout_seconds=timeout_seconds)
    return NodeClient(url, link, timeout_seconds=timeout_seconds, owns_link=True)


def _this_machine() -> Machine:
    identity = load_identity()
    return Machine(identity.node_id, identity.name)


def _cluster_token() -> str:
    try:
        return load_token()
    except LinkcppError as error:
        raise WrongTokenError(error.message, hint=error.hint, code="no_token") from error
