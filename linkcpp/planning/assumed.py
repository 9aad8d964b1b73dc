"""Machines that are not there: what if there were three more with 24 GB?"""

import re
from collections.abc import Iterable

from linkcpp.cluster.records import (
    Cluster,
    DiscoveredNode,
    LinkSpeed,
    NodeDevice,
    NodeId,
    NodeRecord,
    NodeStatus,
)
from linkcpp.common.errors import LinkcppError
from linkcpp.common.units import parse_bytes

ASSUMED = "assumed"
# A wired home network.
ASSUMED_LINK = LinkSpeed(rtt_ms=1.0, bytes_per_second=110e6)
_MAX_ASSUMED = 1000
_SPECIFICATION = re.compile(
    r"\s*(?:(?P<count>\d{1,4})\s*[x*]\s*)?(?P<size>\d[^@]*?)\s*"
    r"(?:@\s*(?P<kind>cpu|gpu)\s*(?::\s*(?P<rate>\d[^/]*)/s)?)?\s*",
    re.IGNORECASE,
)


def assumed_nodes(
    cluster: Cluster, specification: str, *, batch: int = 0
) -> tuple[DiscoveredNode, ...]:
    """Read ``3x24GB`` (CPU nodes), ``24GB@gpu`` or ``24GB@gpu:936GB/s`` as wired nodes.

    The rate is that at which the device reads its memory. ``batch`` tells apart the nodes of
    several specifications.

    Raises:
        LinkcppError: the text is not of that form.
    """
    match = _SPECIFICATION.fullmatch(specification)
    count = int(match["count"] or 1) if match else 0
    size = parse_bytes(match["size"]) if match else 0
    rate = parse_bytes(match["rate"]) if match and match["rate"] else None
    if match is None or not 1 <= count <= _MAX_ASSUMED or size == 0 or rate == 0:
        raise LinkcppError(
            f"{specification!r} does not say which machines to assume.",
            hint="Write it like 24GB, 3x24GB, 2x8GB@gpu or 24GB@gpu:936GB/s.",
        )
    kind = (match["kind"] or "cpu").lower()
    title = f"{ASSUMED} {match['size'].strip()} {kind}"
    return tuple(
        assumed_node(
            cluster,
            f"{title} {batch + 1}.{number}",
            size,
            is_gpu=kind == "gpu",
            read_bytes_per_second=rate,
        )
        for number in range(1, count + 1)
    )


def assumed_node(
    cluster: Cluster,
    name: str,
    offered_bytes: int,
    *,
    is_gpu: bool,
    read_bytes_per_second: float | None = None,
) -> DiscoveredNode:
    """Make up a node with the coordinator's engine that offers ``offered_bytes``.

    Without a rate it counts as a device that was not measured.
    """
    device = NodeDevice(
        name="GPU0" if is_gpu else "CPU",
        description=ASSUMED,
        is_cpu=not is_gpu,
        total_bytes=offered_bytes,
        free_bytes=offered_bytes,
        offered_bytes=offered_bytes,
        read_bytes_per_second=read_bytes_per_second,
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
