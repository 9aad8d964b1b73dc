"""Clusters made by hand."""

import random

from linkcpp.cluster.records import (
    Cluster,
    DiscoveredNode,
    LinkSpeed,
    NodeDevice,
    NodeId,
    NodeRecord,
    NodeStatus,
)
from linkcpp.engine.records import EngineFeatures, EngineFingerprint, RpcVersion
from linkcpp.planning.costs import HOST_PROGRAM_BYTES

MEGABYTE = 10**6
GIGABYTE = 10**9


def fingerprint(major: int = 4) -> EngineFingerprint:
    version = (
        RpcVersion(major=4, minor=0, patch=3)
        if major == 4
        else RpcVersion(major=7, minor=0, patch=0)
    )
    return EngineFingerprint(
        build=10068 if major == 4 else None,
        commit=None,
        ggml_version=None,
        rpc_version=version,
        features=EngineFeatures(rpc=True, override_tensor=True, no_repack=True, fit=True),
    )


def device(name: str, offered: float, rate: float | None = None) -> NodeDevice:
    size = int(offered)
    return NodeDevice(
        name=name,
        description="",
        is_cpu=name == "CPU",
        total_bytes=size,
        free_bytes=size,
        offered_bytes=size,
        read_bytes_per_second=rate,
    )


def machine(name: str, *devices: NodeDevice, major: int = 4) -> NodeRecord:
    return NodeRecord(
        node_id=NodeId(f"id-of-{name}"),
        name=name,
        agent_version="0",
        platform="test",
        core_count=2,
        memory_limit_bytes=None,
        devices=devices,
        engine=fingerprint(major),
        engine_problem=None,
    )


def node(
    name: str,
    *devices: NodeDevice,
    rtt_ms: float = 1.0,
    rate: float | None = 100e6,
    status: NodeStatus = NodeStatus.READY,
    major: int = 4,
) -> DiscoveredNode:
    return DiscoveredNode(
        name=name,
        urls=(f"http://{name}:1",),
        found_by="test",
        status=status,
        reason=None if status is NodeStatus.READY else "a reason",
        record=machine(name, *devices, major=major),
        link=LinkSpeed(rtt_ms=rtt_ms, bytes_per_second=rate),
    )


def cluster(
    coordinator_bytes: float, *nodes: DiscoveredNode, rate: float = 20e9, major: int = 4
) -> Cluster:
    """A coordinator with a CPU only, which has so much besides its programs, and nodes."""
    here = machine("here", device("CPU", coordinator_bytes + HOST_PROGRAM_BYTES, rate), major=major)
    return Cluster(coordinator=here, nodes=nodes)


def random_cluster(count: int, *, seed: int, coordinator_bytes: float, major: int = 4) -> Cluster:
    """Unlike machines: laptops to servers, with or without a GPU, near and far."""
    draw = random.Random(seed)  # noqa: S311 - test data
    nodes = []
    for number in range(count):
        size = draw.choice([4, 6, 8, 8, 12, 16, 16, 24, 32, 64])
        is_gpu = size <= 24 and draw.random() < 0.5
        nodes.append(
            node(
                f"n{number:04}",
                device(
                    "CUDA0" if is_gpu else "CPU",
                    size * GIGABYTE * draw.uniform(0.6, 0.95),
                    draw.uniform(200e9, 1000e9) if is_gpu else draw.uniform(10e9, 80e9),
                ),
                rtt_ms=draw.uniform(0.2, 40),
                rate=draw.uniform(2e6, 120e6),
                major=major,
            )
        )
    return cluster(coordinator_bytes, *nodes, rate=30e9, major=major)
