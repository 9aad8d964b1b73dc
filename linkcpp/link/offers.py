"""Where the coordinator's end of an edge gets its offers from."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from linkcpp.common.errors import LinkcppError
from linkcpp.registry.client import HubClient
from linkcpp.registry.connection import HubRefusedError
from linkcpp.registry.edges import NODE_GONE, NODE_REVOKED, EdgeOffer, EdgeRequest, OfferRequest

_NO_SUCH_EDGE = 404


class LinkEndedError(LinkcppError):
    """There is no edge to this node any more, and asking again is of no use.

    ``code`` is the hub's where it refused.
    """

    def __init__(self, message: str, *, hint: str | None = None, code: str = "no_edge") -> None:
        super().__init__(message, hint=hint)
        self.code = code


class Dialled(NamedTuple):
    """Whom an edge is asked for: a machine's id, at the hub with this id."""

    hub_id: str
    node_id: str


class OfferSource(Protocol):
    """Gives offers for one edge."""

    @property
    def dialled(self) -> Dialled:
        """Whom the edge has to lead to, whatever the offers say."""
        ...

    async def offer(self, not_gateways: tuple[str, ...]) -> EdgeOffer:
        """Return a fresh offer; gateways that just failed are left out where there are others.

        Raises:
            LinkEndedError: the edge, the node or this machine is not wanted any more.
            LinkcppError: there is none now; a later call may give one.
        """
        ...

    def another(self) -> "OfferSource":
        """Return a source for one more edge to the same machine."""
        ...

    async def close(self) -> None:
        """Tell that the edge is not needed any more; never fails."""
        ...


class HubOffers:
    """Offers of a hub for an edge to one node; ``hub`` must stay open.

    ``relay_rtts_ms`` gives this machine's round trips to gateways, by which the hub chooses one.
    """

    def __init__(
        self,
        hub: HubClient,
        node_id: str,
        relay_rtts_ms: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._hub = hub
        self._node_id = node_id
        self._relay_rtts_ms = relay_rtts_ms
        self._edge_id: str | None = None

    @property
    def dialled(self) -> Dialled:
        """The node, at the hub that was joined."""
        return Dialled(self._hub.hub_id, self._node_id)

    async def offer(self, not_gateways: tuple[str, ...]) -> EdgeOffer:
        """Ask for the edge at first, for another way later."""
        wishes = {"not_gateways": not_gateways, "relay_rtts_ms": self._relay_rtts_ms()}
        try:
            if self._edge_id is None:
                request = EdgeRequest.model_validate({"node_id": self._node_id, **wishes})
                offer = await self._hub.create_edge(request)
                self._edge_id = offer.edge_id
                return offer
            again = OfferRequest.model_validate(wishes)
            return await self._hub.renew_offer(self._edge_id, again)
        except HubRefusedError as error:
            is_over = error.code in (NODE_GONE, NODE_REVOKED) or error.status == _NO_SUCH_EDGE
            if error.is_final or is_over:
                raise LinkEndedError(error.message, hint=error.hint, code=error.code) from error
            raise

    def another(self) -> "HubOffers":
        """Return a source for one more edge to the node."""
        return HubOffers(self._hub, self._node_id, self._relay_rtts_ms)

    async def close(self) -> None:
        """Have the hub close the edge."""
        if self._edge_id is None:
            return
        try:
            await self._hub.close_edge(self._edge_id)
        except LinkcppError:
            return  # the hub forgets an edge without connections by itself
