"""How a node takes its place in a hub: its edges, its weights' source, and its membership."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

from linkcpp.cluster.addresses import own_addresses
from linkcpp.cluster.config import node_url
from linkcpp.cluster.identity import Identity
from linkcpp.cluster.records import NodeRecord
from linkcpp.link.acceptor import HubIntroduction, LinkAcceptor
from linkcpp.node.membership import Membership
from linkcpp.node.records import SliceState
from linkcpp.node.slice_store import SliceStore
from linkcpp.registry.client import joined_client
from linkcpp.registry.credentials import HubCredentials
from linkcpp.registry.fields import MAX_MODELS_HELD, MAX_SEGMENTS
from linkcpp.registry.keys import load_keys
from linkcpp.registry.records import HeldUnits


class _Joiner(Protocol):
    """What is needed of the agent that joins."""

    identity: Identity
    slices: SliceStore
    links: LinkAcceptor

    async def describe(self) -> NodeRecord:
        """Tell what this machine has and offers now."""
        ...


class Joining:
    """The hub to join, and where the agent listens for direct links, if it does.

    That is at ``direct_port`` of ``host`` (``None``: all interfaces).
    """

    def __init__(
        self,
        credentials: HubCredentials,
        *,
        host: str | None,
        direct_port: int | None,
    ) -> None:
        self._credentials = credentials
        self._host = host
        self._direct_port = direct_port

    @property
    def places(self) -> tuple[str, ...]:
        """Where the node is, in words: the hub, and the addresses for direct links."""
        return (f"at {self._credentials.url}", *self._addresses("http"))

    def direct_urls(self) -> tuple[str, ...]:
        """Where a coordinator may try without a relay."""
        return self._addresses("ws")

    @contextlib.asynccontextmanager
    async def membership(self, agent: _Joiner) -> AsyncIterator[Membership]:
        """Connect an agent with the hub while the block runs."""
        keys = load_keys()
        hub = joined_client(self._credentials.url, identity=agent.identity, keys=keys)
        agent.links.hub = HubIntroduction(self._credentials.hub_key, hub.ticket_time)
        agent.slices.hub = hub
        try:
            yield Membership(
                hub,
                agent.links,
                describe=agent.describe,
                held=lambda: _held(agent.slices),
                direct_urls=self.direct_urls,
            )
        finally:
            agent.links.hub = agent.slices.hub = None
            await hub.aclose()

    def _addresses(self, scheme: str) -> tuple[str, ...]:
        if self._direct_port is None:
            return ()
        try:
            addresses = own_addresses(self._host or "::")
        except OSError:
            return ()
        return tuple(node_url(address, self._direct_port, scheme=scheme) for address in addresses)


def _held(slices: SliceStore) -> Iterator[HeldUnits]:
    ready = [record for record in slices.records() if record.state is SliceState.READY]
    for record in ready[:MAX_MODELS_HELD]:
        yield HeldUnits.model_validate(
            {
                "model_digest": record.model_digest,
                "segments": record.segments[:MAX_SEGMENTS],
            }
        )
