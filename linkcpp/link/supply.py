"""The offers that a coordinator's end of an edge has had, and what it learned from using them."""

import time
from collections.abc import Callable
from time import monotonic

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from linkcpp.common.errors import LinkcppError
from linkcpp.link.handshake import EdgeKeys, parse_edge_key
from linkcpp.link.offers import Dialled, EdgeEndedError, OfferSource
from linkcpp.registry.edges import EdgeOffer, EdgeRole
from linkcpp.registry.encoding import encode
from linkcpp.registry.fields import MAX_GATEWAYS

_TICKET_RESERVE_SECONDS = 30.0
_AVOID_SECONDS = 30.0

# Raises LinkcppError where (hub id, node id, edge key) is not what it was before.
Pin = Callable[[str, str, str], None]


class OfferSupply:
    """Fresh offers while there are any, the last one while its ticket holds."""

    def __init__(
        self, source: OfferSource, *, own_key: X25519PrivateKey, own_node_id: str, pin: Pin
    ) -> None:
        self._source = source
        self._own_key = own_key
        self._own_node_id = own_node_id
        self._pin = pin
        self._offer: EdgeOffer | None = None
        self._keys: EdgeKeys | None = None
        self._avoided: dict[str, float] = {}

    @property
    def keys(self) -> EdgeKeys | None:
        """Keys and ids of the edge; ``None`` before the first offer."""
        return self._keys

    def avoid(self, gateway_id: str | None) -> None:
        """Take another gateway for a while, where there is one."""
        if gateway_id is not None:
            self._avoided[gateway_id] = monotonic() + _AVOID_SECONDS

    async def usable(self) -> EdgeOffer:
        """Return the last offer while its ticket holds, else a fresh one; raises as ``fresh``."""
        if self._offer is not None and self._holds(self._offer):
            return self._offer
        return await self.fresh()

    async def fresh(self) -> EdgeOffer:
        """Ask for an offer; where none can be had, return the last one while its ticket holds.

        Raises:
            EdgeEndedError: there will be none any more, or the node is not the one it was.
            LinkcppError: there is none now.
        """
        now = monotonic()
        self._avoided = {known: until for known, until in self._avoided.items() if until > now}
        try:
            offer = await self._source.offer(tuple(self._avoided)[:MAX_GATEWAYS])
        except EdgeEndedError:
            raise
        except LinkcppError:
            # The hub may be away for a moment; its gateways and the node need not be.
            if self._offer is not None and self._holds(self._offer):
                return self._offer
            raise
        self._take(offer)
        return offer

    async def close(self) -> None:
        """Tell the source that the edge is not needed any more."""
        await self._source.close()

    def _take(self, offer: EdgeOffer) -> None:
        # A key is pinned for a hub and a machine: both are what was dialled, not what is told.
        offered = Dialled(offer.hub_id, offer.peer_node_id)
        if offered != self._source.dialled or offer.role is not EdgeRole.BACKBONE:
            raise EdgeEndedError(
                "The hub offers an edge to another machine than the one that was asked for.",
                hint="Ask whoever runs the hub; until then do not use it.",
            )
        try:
            self._pin(offer.hub_id, offer.peer_node_id, offer.peer_public_key)
            peer_key = parse_edge_key(offer.peer_public_key)
        except LinkcppError as error:
            raise EdgeEndedError(error.message, hint=error.hint) from error
        except ValueError:
            raise LinkcppError("The hub gave a key for the node that is none.") from None
        keys = EdgeKeys(
            self._own_key, peer_key, offer.edge_id, self._own_node_id, offer.peer_node_id
        )
        if self._keys is not None and _names(self._keys) != _names(keys):
            raise EdgeEndedError("The hub offers another edge than before.")
        self._offer, self._keys = offer, keys

    @staticmethod
    def _holds(offer: EdgeOffer) -> bool:
        return offer.expires_at > time.time() + _TICKET_RESERVE_SECONDS


def _names(keys: EdgeKeys) -> tuple[str, str, str]:
    return keys.edge_id, keys.node_id, encode(keys.peer_key.public_bytes_raw())
