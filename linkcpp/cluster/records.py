"""What is known of a node."""

from enum import StrEnum
from typing import Annotated, NewType

from pydantic import Field

from linkcpp.common.records import Record, WireRecord
from linkcpp.engine.records import EngineFingerprint, EngineProblem

NodeId = NewType("NodeId", str)

# Records come from other machines: a size that no machine can have is refused, not computed with.
ByteCount = Annotated[int, Field(ge=0, lt=2**63)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Health(WireRecord):
    """Proof of life; tells nothing that mDNS does not tell."""

    service: str = "linkcpp-node"
    agent_version: str
    node_id: NodeId
    name: str


class NodeDevice(WireRecord):
    """A device that a node offers.

    ``offered_bytes`` is what a deployment may use now: free memory, less what running engine
    processes were promised, below the owner's limit. ``read_bytes_per_second`` is the measured rate
    at which the device streams weights, which bounds decoding; ``None`` where not yet measured.
    """

    name: str
    description: str
    is_cpu: bool
    total_bytes: ByteCount
    free_bytes: ByteCount
    offered_bytes: ByteCount
    read_bytes_per_second: Rate | None


class NodeRecord(WireRecord):
    """What a node agent tells of its machine (``GET /v1/node``).

    ``slice_bytes`` is what slices of models that a deployment brings may take of its disk, within
    its owner's limit; ``None`` where nothing bounds them. ``server_bytes`` is what every engine
    process takes of the main memory besides its promise; what the CPU offers leaves one of it out.
    """

    node_id: NodeId
    name: str
    agent_version: str
    platform: str
    core_count: Annotated[int, Field(ge=1, le=2**16)]
    memory_limit_bytes: ByteCount | None
    devices: Annotated[tuple[NodeDevice, ...], Field(max_length=64)]
    engine: EngineFingerprint | None
    engine_problem: EngineProblem | None
    slice_bytes: ByteCount | None = None
    server_bytes: ByteCount = 0


class LinkSpeed(WireRecord):
    """A measured link to a node: round trip over HTTP and sustained throughput."""

    rtt_ms: Rate
    bytes_per_second: Rate | None


class NodeStatus(StrEnum):
    """What discovery found at an address.

    ``DUPLICATE_ID`` shares its id with
    another machine; ``STALE`` is advertised but does not answer as what it is advertised as.
    """

    READY = "ready"
    OTHER_ENGINE = "other_engine"
    ENGINE_PROBLEM = "engine_problem"
    WRONG_TOKEN = "wrong_token"  # noqa: S105 - a status, not a credential
    DUPLICATE_ID = "duplicate_id"
    UNREACHABLE = "unreachable"
    STALE = "stale"
    NOT_A_NODE = "not_a_node"


class DiscoveredNode(WireRecord):
    """One node as discovery shows it; ``reason`` says in words why it is not ready.

    ``urls`` lists every address that answered as this node, the nearest first. The agent of the
    machine that asks is found like any other, and marked ``is_this_machine``.
    """

    name: str
    urls: tuple[str, ...]
    found_by: str
    status: NodeStatus
    reason: str | None
    record: NodeRecord | None
    link: LinkSpeed | None
    is_this_machine: bool = False


class Cluster(Record):
    """What a plan may use: the coordinator (the machine that runs llama-server) and the nodes.

    ``nodes`` has also those that are not ready, with the reason; not the coordinator's own agent.
    """

    coordinator: NodeRecord
    nodes: tuple[DiscoveredNode, ...]
