"""Machines that are not there: what if there were three more with 24 GB?"""

import re
from collections.abc import Iterable

from linkcpp.cluster.records import (
    Cluster,
    DiscoveredNode,
    Link,
    NodeDevice,
    NodeId,
    NodeRecord,
    NodeStatus,
)
from linkcpp.common.errors import LinkcppError
from linkcpp.common.units import parse_bytes

ASSUMED = "assumed"
# A wired home network.
ASSUMED_LINK = Link(rtt_ms=1.0, bytes_per_second=110e6)
_MOST_ASSUMED = 1000
_SPECIFICATION = re.compile(r"\s*(?:(\d{1,4})\s*[x*]\s*)?(\d[^@]*?)\s*(@\s*gpu)?\s*", re.IGNORECASE)


def assumed_nodes(
    cluster: Cluster, specification: str, *, batch: int = 0
) -> tuple[DiscoveredNode, ...]:
    """Read ``3x24GB`` (CPU nodes) or ``24GB@gpu`` as nodes on a wired network.

    ``batch`` tells apart the nodes of several specifications.

    Raises:
        LinkcppError: the text is not of that form.
    """
    match = _SPECIFICATION.fullmatch(specification)
    count = int(match[1] or 1) if match else 0
    if match is None or not 1 <= count <= _MOST_ASSUMED:
        raise LinkcppError(
            f"{specification!r} does not say which machines to assume.",
            hint="Write it like 24GB, 3x24GB or 2x8GB@gpu.",
        )
    size = parse_bytes(match[2])
    kind = "gpu" if match[3] else "cpu"
    title = f"{ASSUMED} {match[2].strip()} {kind}"
    return tuple(
        assumed_node(cluster, f"{title} {batch + 1}.{number}", size, is_gpu=bool(match[3]))
        for number in range(1, count + 1)
    )


def assumed_node(
    cluster: Cluster, name: str, offered_bytes: int, *, is_gpu: bool
) -> DiscoveredNode:
    """Make up a node with the coordinator's engine that offers ``offered_bytes``."""
    device = NodeDevice(
        name="GPU0" if is_gpu else "CPU",
        description=ASSUMED,
        is_cpu=not is_gpu,
        total_bytes=offered_bytes,
        free_bytes=offered_bytes,
        offered_bytes=offered_bytes,
        read_bytes_per_second=None,
    )
    record = NodeRecord(
        node_id=NodeId(name),
        name=name,
        agent_version=ASSUMED,
        platform=ASSUMED,
        core_count=8,
        memory_limit_bytes=None,
        devices=(device,),
        engine=cluster.coordinator.engine,
        engine_problem=None,
    )
    return DiscoveredNode(
        name=name,
        urls=(),
        found_by=ASSUMED,
        status=NodeStatus.READY,
        reason=None,
        record=record,
        link=ASSUMED_LINK,
    )


def with_nodes(cluster: Cluster, nodes: Iterable[DiscoveredNode]) -> Cluster:
    """Return the cluster with more nodes."""
    return Cluster(coordinator=cluster.coordinator, nodes=(*cluster.nodes, *nodes))


def with_coordinator_memory(cluster: Cluster, offered_bytes: int) -> Cluster:
    """Return the cluster with a coordinator whose RAM offers ``offered_bytes``."""
    devices = tuple(
        device.model_copy(
            update={
                "offered_bytes": offered_bytes,
                "free_bytes": max(device.free_bytes, offered_bytes),
                "total_bytes": max(device.total_bytes, offered_bytes),
            }
        )
        if device.is_cpu
        else device
        for device in cluster.coordinator.devices
    )
    coordinator = cluster.coordinator.model_copy(update={"devices": devices})
    return Cluster(coordinator=coordinator, nodes=cluster.nodes)
