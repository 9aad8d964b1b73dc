"""Where the end of a link that dials learns how to reach its peer, and who that is."""

import os
import time
from collections.abc import Awaitable, Callable, Iterable
from time import monotonic
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from linkcpp.common.errors import LinkcppError
from linkcpp.common.text import printable
from linkcpp.link.choosing import Path, PathKind
from linkcpp.link.dialing import Way, Ways, direct_ways
from linkcpp.link.handshake import (
    LINK_ID_BYTES,
    ClusterMember,
    Introduction,
    KnownPeer,
    Machine,
    parse_link_key,
)
from linkcpp.link.offers import Dialled, LinkEndedError, OfferSource
from linkcpp.registry.edges import EdgeOffer, EdgeRole
from linkcpp.registry.encoding import encode
from linkcpp.registry.fields import MAX_GATEWAYS
from linkcpp.registry.relay import Hello, encode_cluster_hello, encode_hello

_TICKET_RESERVE_SECONDS = 30.0
_AVOID_SECONDS = 30.0
_MAX_ADDRESSES = 16

# Raises LinkcppError where (hub id, node id, edge key) is not what it was before.
Pin = Callable[[str, str, str], None]


class Supply(Protocol):
    """Tells how to reach one peer, again whenever a path was lost."""

    @property
    def introduction(self) -> Introduction | None:
        """What the handshake needs; ``None`` before the first ways are known."""
        ...

    @property
    def is_awaited(self) -> bool:
        """Whether the peer is told to come, so that the first attempt may fail."""
        ...

    @property
    def direct_urls(self) -> tuple[str, ...]:
        """The peer's own addresses, as they were told last; HTTP or WebSocket ones."""
        ...

    def another(self) -> OfferSource | None:
        """Return where offers for one more edge to the peer come from; ``None``: from nowhere."""
        ...

    async def usable(self) -> Ways:
        """Return ways that are not known to be outdated; raises as ``fresh``."""
        ...

    async def fresh(self) -> Ways:
        """Find out how to reach the peer now.

        Raises:
            LinkEndedError: there will be no way any more.
            LinkcppError: there is none now; a later call may give one.
        """
        ...

    def avoid(self, gateway_id: str | None) -> None:
        """Take another gateway for a while, where there is one."""
        ...

    def check(self, machine: Machine, key: X25519PublicKey) -> None:
        """See that whoever shook hands is the one that the link leads to.

        Raises:
            LinkEndedError: it is another machine.
        """
        ...

    async def close(self) -> None:
        """Tell whoever introduced the two that the link is not needed any more; never fails."""
        ...


class ClusterSupply:
    """A node of this machine's cluster at addresses that a person or mDNS named.

    ``find`` looks for the node again by its id, once none of the addresses works any more.
    """

    def __init__(
        self,
        urls: Iterable[str],
        *,
        own_key: X25519PrivateKey,
        own: Machine,
        psk: bytes,
        find: Callable[[str], Awaitable[tuple[str, ...]]] | None = None,
    ) -> None:
        self._urls = tuple(urls)
        self._find = find
        self._introduction = ClusterMember(own_key, psk, os.urandom(LINK_ID_BYTES).hex(), own)
        self._met: tuple[str, bytes] | None = None
        self._ask_count = 0

    @property
    def is_awaited(self) -> bool:
        """It is there, or it is not."""
        return False

    @property
    def direct_urls(self) -> tuple[str, ...]:
        """The addresses."""
        return self._urls

    def another(self) -> None:
        """Nobody offers edges in a cluster."""
        return

    @property
    def introduction(self) -> Introduction:
        """The cluster's secret, and an id that this end chose."""
        return self._introduction

    async def usable(self) -> Ways:
        """Return the addresses."""
        return Ways(direct_ways(self._urls, encode_cluster_hello(self._introduction.link_id)))

    async def fresh(self) -> Ways:
        """Return the addresses; from the second lost attempt on, with those found anew."""
        self._ask_count += 1
        if self._find is not None and self._met is not None and self._ask_count > 1:
            found = await self._find(self._met[0])
            self._urls = tuple(dict.fromkeys((*found, *self._urls)))[:_MAX_ADDRESSES]
        return await self.usable()

    def avoid(self, gateway_id: str | None) -> None:
        """Do nothing: there are no gateways."""

    def check(self, machine: Machine, key: X25519PublicKey) -> None:
        """Hold to the machine that was met first."""
        self._ask_count = 0
        met = (machine.node_id, key.public_bytes_raw())
        if self._met is None:
            self._met = met
        if self._met != met:
            raise LinkEndedError(
                f"Another machine answers at {self._urls[0]} than before: it says that it is "
                f"{printable(machine.node_id, 64)}.",
                hint="Look for nodes again with `linkcpp discover`.",
                code="other_node",
            )

    async def close(self) -> None:
        """Do nothing: the peer learns it over the link."""


class OfferSupply:
    """Fresh offers of a hub while there are any, the last one while its ticket holds."""

    def __init__(
        self, source: OfferSource, *, own_key: X25519PrivateKey, own: Machine, pin: Pin
    ) -> None:
        self._source = source
        self._own_key = own_key
        self._own = own
        self._pin = pin
        self._offer: EdgeOffer | None = None
        self._introduction: KnownPeer | None = None
        self._avoided: dict[str, float] = {}

    @property
    def is_awaited(self) -> bool:
        """The hub tells it to come."""
        return True

    @property
    def direct_urls(self) -> tuple[str, ...]:
        """What the last offer says."""
        return self._offer.direct_urls if self._offer else ()

    def another(self) -> OfferSource:
        """The hub offers as many as are asked for."""
        return self._source.another()

    @property
    def introduction(self) -> Introduction | None:
        """Keys and ids of the edge; ``None`` before the first offer."""
        return self._introduction

    def avoid(self, gateway_id: str | None) -> None:
        """Take another gateway for a while, where there is one."""
        if gateway_id is not None:
            self._avoided[gateway_id] = monotonic() + _AVOID_SECONDS

    async def usable(self) -> Ways:
        """Return the last offer while its ticket holds, else a fresh one; raises as ``fresh``."""
        if self._offer is not None and self._holds(self._offer):
            return _ways(self._offer)
        return await self.fresh()

    async def fresh(self) -> Ways:
        """Ask for an offer; where none can be had, return the last one while its ticket holds.

        Raises:
            LinkEndedError: there will be none any more, or the node is not the one it was.
            LinkcppError: there is none now.
        """
        now = monotonic()
        self._avoided = {known: until for known, until in self._avoided.items() if until > now}
        try:
            offer = await self._source.offer(tuple(self._avoided)[:MAX_GATEWAYS])
        except LinkEndedError:
            raise
        except LinkcppError:
            # The hub may be away for a moment; its gateways and the node need not be.
            if self._offer is not None and self._holds(self._offer):
                return _ways(self._offer)
            raise
        self._take(offer)
        return _ways(offer)

    def check(self, machine: Machine, key: X25519PublicKey) -> None:
        """Do nothing: the handshake is with the key that the hub named."""

    async def close(self) -> None:
        """Tell the source that the edge is not needed any more."""
        await self._source.close()

    def _take(self, offer: EdgeOffer) -> None:
        # A key is pinned for a hub and a machine: both are what was dialled, not what is told.
        offered = Dialled(offer.hub_id, offer.peer_node_id)
        if offered != self._source.dialled or offer.role is not EdgeRole.BACKBONE:
            raise LinkEndedError(
                "The hub offers an edge to another machine than the one that was asked for.",
                hint="Ask whoever runs the hub; until then do not use it.",
            )
        try:
            self._pin(offer.hub_id, offer.peer_node_id, offer.peer_public_key)
            peer_key = parse_link_key(offer.peer_public_key)
        except LinkcppError as error:
            raise LinkEndedError(error.message, hint=error.hint) from error
        except ValueError:
            raise LinkcppError("The hub gave a key for the node that is not usable.") from None
        peer = Machine(offer.peer_node_id, offer.peer_name)
        known = KnownPeer(self._own_key, peer_key, offer.edge_id, self._own, peer)
        if self._introduction is not None and _names(self._introduction) != _names(known):
            raise LinkEndedError("The hub offers another edge than before.")
        self._offer, self._introduction = offer, known

    @staticmethod
    def _holds(offer: EdgeOffer) -> bool:
        return offer.expires_at > time.time() + _TICKET_RESERVE_SECONDS


def _ways(offer: EdgeOffer) -> Ways:
    hello = encode_hello(Hello(offer.role, offer.edge_id, offer.ticket))
    return Ways(
        direct_ways(offer.direct_urls, hello),
        relay_ways(offer),
        gateway_id=offer.gateway_id,
        gateway_name=offer.gateway_name,
    )


def relay_ways(offer: EdgeOffer) -> tuple[Way, ...]:
    """Return the way through the gateway that an offer names, if it names one."""
    if offer.relay_url is None:
        return ()
    path = Path(PathKind.RELAY, offer.gateway_id, offer.gateway_name)
    hello = encode_hello(Hello(offer.role, offer.edge_id, offer.ticket))
    return (Way(path, offer.relay_url, hello),)


def _names(known: KnownPeer) -> tuple[str, str, str]:
    return known.link_id, known.peer.node_id, encode(known.peer_key.public_bytes_raw())
