"""Messages of the hub's HTTP API, version 1.

| call | role | body | answer |
| --- | --- | --- | --- |
| ``GET /v1/health`` | open | | ``HubHealth`` |
| ``POST /v1/join`` | open | ``JoinRequest`` | ``JoinAnswer`` |
| ``POST /v1/tokens`` | open | ``RenewRequest`` | ``NodeToken`` |
| ``POST /v1/heartbeat`` | node | ``Heartbeat`` | ``HeartbeatAnswer`` |
| ``POST /v1/leave`` | node | | 204: it stops, and is gone at once |
| ``GET /v1/events`` | node, backbone | WebSocket | text messages, each a ``HubEvent`` |
| ``GET /v1/nodes``, ``/v1/nodes/{id}`` | backbone, admin | | ``NodeList``, ``RegisteredNode`` |
| ``GET /v1/nodes?ask=true`` | backbone, admin | | ``NodeList``, its nodes asked before |
| ``DELETE /v1/nodes/{id}`` | admin | | 204: the node is revoked |
| ``POST /v1/edges`` | backbone | ``EdgeRequest`` | 201 ``EdgeOffer`` |
| ``POST /v1/edges/{id}/offer`` | backbone | ``OfferRequest`` | ``EdgeOffer`` of the same edge |
| ``DELETE /v1/edges/{id}`` | backbone | | 204, also when it is already closed |
| ``GET /v1/edges`` | admin | | ``EdgeList`` |
| ``GET /v1/gateways`` | node, backbone, admin | | ``GatewayList`` |
| ``POST /v1/gateways/heartbeat`` | gateway | ``GatewayHeartbeat`` | ``GatewayHeartbeatAnswer`` |
| ``POST /v1/join-tokens`` | admin | ``JoinTokenRequest`` | 201 ``NewJoinToken`` |
| ``GET /v1/join-tokens`` | admin | | ``JoinTokenList`` |
| ``DELETE /v1/join-tokens/{id}`` | admin | | 204: it is revoked |

Authentication: ``Authorization: Bearer <node token>``. Errors: ``ErrorBody`` with a 4xx status.
The records of edges and gateways are in ``linkcpp.registry.edges``.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from linkcpp.cluster.records import NodeRecord
from linkcpp.common.records import WireRecord
from linkcpp.model.slices.segments import Segment
from linkcpp.registry.edges import EdgeOffer
from linkcpp.registry.fields import (
    MAX_ADDRESSES,
    MAX_EDGES_PER_NODE,
    MAX_MODELS_HELD,
    MAX_SEGMENTS,
    EdgeId,
    Label,
    MachineId,
    ModelDigest,
    Name,
    Nonce,
    PublicKey,
    RttsByGateway,
    Signature,
    Token,
    UnixTime,
    Url,
)

HEARTBEAT_SECONDS = 10.0


class Role(StrEnum):
    """What a token allows: serve, coordinate, manage the hub, or relay."""

    NODE = "node"
    BACKBONE = "backbone"
    ADMIN = "admin"
    GATEWAY = "gateway"


class Presence(StrEnum):
    """Whether a node's heartbeats come: none of the last three missed, three missed, ten missed."""

    ONLINE = "online"
    STALE = "stale"
    GONE = "gone"


class HubHealth(WireRecord):
    """Who the hub is. ``public_key`` (Ed25519) verifies its tokens; ``time`` is its clock."""

    service: Literal["linkcpp-hub"] = "linkcpp-hub"
    version: str
    hub_id: MachineId
    public_key: PublicKey
    time: UnixTime


class Proof(WireRecord):
    """A machine's proof that it has the Ed25519 key that it names (``linkcpp.registry.proofs``)."""

    time: UnixTime
    nonce: Nonce
    signature: Signature


class JoinRequest(WireRecord):
    """Exchange a join token for a node token; the proof covers all that stands here but ``roles``.

    A token for none of ``roles`` is refused and keeps its use; with none named any role will do.
    """

    token: Token
    node_id: MachineId
    name: Name
    signing_key: PublicKey
    edge_key: PublicKey
    proof: Proof
    roles: Annotated[tuple[Role, ...], Field(max_length=len(Role))] = ()


class RenewRequest(WireRecord):
    """Exchange a proof for a new node token."""

    node_id: MachineId
    proof: Proof


class NodeToken(WireRecord):
    """A short-lived token of one machine, and the hub's time at which it ends."""

    token: Token
    role: Role
    expires_at: UnixTime


class JoinAnswer(WireRecord):
    """A machine has joined."""

    hub_id: MachineId
    hub_public_key: PublicKey
    node_token: NodeToken


class HeldUnits(WireRecord):
    """What a node holds of one model."""

    model_digest: ModelDigest
    segments: Annotated[tuple[Segment, ...], Field(max_length=MAX_SEGMENTS)]


class NodeState(WireRecord):
    """What a node tells of itself.

    ``direct_urls`` are WebSocket addresses (``ws://10.0.0.5:8716/v1/edge``) at which its agent may
    be reached without a relay; ``relay_rtts_ms`` are measured round trips to gateways, by their id.
    """

    record: NodeRecord
    direct_urls: Annotated[tuple[Url, ...], Field(max_length=MAX_ADDRESSES)] = ()
    held: Annotated[tuple[HeldUnits, ...], Field(max_length=MAX_MODELS_HELD)] = ()
    relay_rtts_ms: RttsByGateway = Field(default_factory=dict)


class Heartbeat(WireRecord):
    """A node is alive. ``state`` only when it changed, or when the last answer asked for it.

    ``sequence`` counts the heartbeats of one run of the node's program. ``edges`` are those that
    the node takes part in now, over whatever way.
    """

    sequence: Annotated[int, Field(ge=0, lt=2**53)]
    state: NodeState | None = None
    edges: Annotated[tuple[EdgeId, ...], Field(max_length=MAX_EDGES_PER_NODE)] = ()


class HeartbeatAnswer(WireRecord):
    """When to come again, whether the hub wants the whole state, and what became of edges.

    ``offers`` are those that were not told before; the same may come over the events as well.
    ``close_edges`` are those of the node's edges that the hub does not know any more.
    """

    interval_seconds: Annotated[float, Field(gt=0, le=3600)]
    wants_state: bool = False
    offers: tuple[EdgeOffer, ...] = ()
    close_edges: tuple[EdgeId, ...] = ()


class RegisteredNode(WireRecord):
    """A machine as the hub knows it; ``state`` is ``None`` before its first whole heartbeat.

    ``last_seen`` is ``None`` for a machine that never sent a heartbeat, such as a coordinator.
    A node that ``has_left`` is gone because it said so; one that ``is_silent`` was asked just now
    whether it is there, and did not answer.
    """

    node_id: MachineId
    name: str
    role: Role
    edge_key: PublicKey
    key_fingerprint: str
    joined_at: UnixTime
    is_revoked: bool
    presence: Presence
    has_left: bool = False
    is_silent: bool = False
    last_seen: UnixTime | None
    state: NodeState | None


class NodeList(WireRecord):
    """All machines that joined; ``hub_time`` is what ``last_seen`` is to be compared with."""

    nodes: tuple[RegisteredNode, ...]
    hub_time: UnixTime


class JoinTokenRequest(WireRecord):
    """Make a join token."""

    role: Role
    lifetime_seconds: Annotated[float, Field(gt=0, le=10 * 365 * 86400, allow_inf_nan=False)]
    use_limit: Annotated[int, Field(ge=1, le=10**6)] = 1
    label: Label = ""


class JoinTokenRecord(WireRecord):
    """A join token without its secret."""

    token_id: MachineId
    role: Role
    label: str
    created_at: UnixTime
    expires_at: UnixTime
    use_limit: int
    use_count: int
    is_revoked: bool


class NewJoinToken(WireRecord):
    """A join token that was just made. Only this answer ever tells its secret."""

    token: Token
    record: JoinTokenRecord


class JoinTokenList(WireRecord):
    """All join tokens, also those that are used up, expired or revoked."""

    tokens: tuple[JoinTokenRecord, ...]
