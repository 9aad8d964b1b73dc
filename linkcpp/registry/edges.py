"""Messages about edges and gateways: the part of the hub's API that relays take part in.

An edge is one authenticated link between two machines that both dial out. The machine that asks for
it has the role backbone; the other one has the role node. ``linkcpp.registry.records`` lists the
calls.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from linkcpp.common.records import WireRecord
from linkcpp.registry.fields import (
    MAX_ADDRESSES,
    MAX_EDGES_PER_GATEWAY,
    MAX_GATEWAYS,
    EdgeId,
    MachineId,
    Name,
    PublicKey,
    RttsByGateway,
    Token,
    UnixTime,
    Url,
)

GATEWAY_HEARTBEAT_SECONDS = 2.0
# Codes of refusals: the hub makes no edge to a node that is not there, or was turned out.
NODE_GONE = "node_gone"
NODE_REVOKED = "node_revoked"


class EdgeRole(StrEnum):
    """The two sides of an edge: who asked for it, and who was asked."""

    BACKBONE = "backbone"
    NODE = "node"


class EdgeOffer(WireRecord):
    """What one side needs to know to take part in an edge.

    Both sides get one with the same ``edge_id``. ``gateway_id`` and ``relay_url`` are ``None``
    while there is no gateway; its name is for people. ``direct_urls`` are WebSocket addresses of
    the node's agent, none in the node's own offer. ``peer_public_key`` is the other side's X25519
    key. The ticket is the side's own, for the gateway that is named, and ends at ``expires_at``.
    """

    edge_id: EdgeId
    role: EdgeRole
    gateway_id: MachineId | None
    gateway_name: Name | None = None
    relay_url: Url | None
    ticket: Token
    peer_node_id: MachineId
    peer_name: str
    peer_public_key: PublicKey
    direct_urls: Annotated[tuple[Url, ...], Field(max_length=MAX_ADDRESSES)] = ()
    hub_id: MachineId
    expires_at: UnixTime


class OfferRequest(WireRecord):
    """Ask for another way; gateways that just failed are left out where there are others.

    ``relay_rtts_ms`` are the round trips to gateways as the caller measured them, by their id.
    """

    not_gateways: Annotated[tuple[MachineId, ...], Field(max_length=MAX_GATEWAYS)] = ()
    relay_rtts_ms: RttsByGateway = Field(default_factory=dict)


class EdgeRequest(OfferRequest):
    """Ask for an edge to a node."""

    node_id: MachineId


class EdgeRecord(WireRecord):
    """An edge as the hub knows it."""

    edge_id: EdgeId
    backbone_node_id: MachineId
    node_id: MachineId
    gateway_id: MachineId | None
    created_at: UnixTime
    closed_at: UnixTime | None


class EdgeList(WireRecord):
    """All edges that are not closed."""

    edges: tuple[EdgeRecord, ...]


class EdgeEvent(WireRecord):
    """Take part in an edge, or take another way for one that you know."""

    type: Literal["edge"] = "edge"
    offer: EdgeOffer


class CloseEvent(WireRecord):
    """An edge ends."""

    type: Literal["close"] = "close"
    edge_id: EdgeId


class RevokedEvent(WireRecord):
    """This machine is no longer wanted: end all edges, and do not come back by yourself."""

    type: Literal["revoked"] = "revoked"


class ProbeEvent(WireRecord):
    """Somebody wants to count on this node: tell at once, by a heartbeat, that it is there."""

    type: Literal["look"] = "look"


HubEvent = EdgeEvent | CloseEvent | RevokedEvent | ProbeEvent
HUB_EVENT: TypeAdapter[HubEvent] = TypeAdapter(Annotated[HubEvent, Field(discriminator="type")])


class GatewayRecord(WireRecord):
    """A gateway; ``url`` is its WebSocket address for relays (``wss://gw.example/v1/relay``).

    The hub's own gateway has the hub's id and no address: it is at the hub's, however a machine
    names that. ``linkcpp.registry.client`` fills it in, here and in offers.
    """

    gateway_id: MachineId
    name: str
    url: Url | None
    edge_count: int
    is_online: bool
    last_seen: UnixTime


class GatewayList(WireRecord):
    """All gateways, online or not."""

    gateways: tuple[GatewayRecord, ...]


class GatewayHeartbeat(WireRecord):
    """A gateway is alive, and these edges have a connection there (one side or both)."""

    url: Url
    edges: Annotated[tuple[EdgeId, ...], Field(max_length=MAX_EDGES_PER_GATEWAY)] = ()


class GatewayHeartbeatAnswer(WireRecord):
    """When to come again, and which of the edges told may not stay."""

    interval_seconds: Annotated[float, Field(gt=0, le=3600)]
    close_edges: tuple[EdgeId, ...] = ()
