"""What is known of a node."""

from enum import StrEnum
from typing import NewType

from linkcpp.common.records import Record, WireRecord
from linkcpp.engine.records import EngineFingerprint, EngineProblem

NodeId = NewType("NodeId", str)


class NodeDevice(WireRecord):
    """A device that a node offers.

    ``offered_bytes`` is what a deployment may use now: free memory, less what running engine
    processes were promised, below the owner's limit. ``read_bytes_per_second`` is the measured rate
    at which the device streams weights, which bounds decoding; ``None`` where not yet measured.
    """

    name: str
    description: str
    is_cpu: bool
    total_bytes: int
    free_bytes: int
    offered_bytes: int
    read_bytes_per_second: float | None


class NodeRecord(WireRecord):
    """What a node agent tells of its machine (``GET /v1/node``)."""

    node_id: NodeId
    name: str
    agent_version: str
    platform: str
    core_count: int
    memory_limit_bytes: int | None
    devices: tuple[NodeDevice, ...]
    engine: EngineFingerprint | None
    engine_problem: EngineProblem | None


class Link(WireRecord):
    """A measured link to a node: round trip over HTTP and sustained throughput."""

    rtt_ms: float
    bytes_per_second: float | None


class NodeStatus(StrEnum):
    """What discovery found at an address."""

    READY = "ready"
    OTHER_ENGINE = "other_engine"
    ENGINE_PROBLEM = "engine_problem"
    WRONG_TOKEN = "wrong_token"  # noqa: S105 - a status, not a credential
    UNREACHABLE = "unreachable"
    STALE = "stale"
    NOT_A_NODE = "not_a_node"


class DiscoveredNode(WireRecord):
    """One node as discovery shows it; ``reason`` says in words why it is not ready.

    ``urls`` lists every address that answered as this node, the nearest first.
    """

    name: str
    urls: tuple[str, ...]
    found_by: str
    status: NodeStatus
    reason: str | None
    record: NodeRecord | None
    link: Link | None


class Cluster(Record):
    """What a plan may use: the coordinator (the machine that runs llama-server) and the nodes."""

    coordinator: NodeRecord
    nodes: tuple[DiscoveredNode, ...]
