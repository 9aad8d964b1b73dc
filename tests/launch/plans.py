"""Plans made by hand, for tests of what follows from a plan."""

from linkcpp.cluster.records import NodeId
from linkcpp.engine.records import EngineFeatures, EngineFingerprint, RpcVersion
from linkcpp.planning.records import (
    DeviceMemory,
    Expectation,
    ModelReference,
    Plan,
    PlanMode,
    PlanOptions,
    Stage,
)

MEGABYTE = 10**6
FINGERPRINT = EngineFingerprint(
    build=10068,
    commit="571d0d5",
    ggml_version="0.17.0",
    rpc_version=RpcVersion(major=4, minor=0, patch=3),
    features=EngineFeatures(rpc=True, override_tensor=True, no_repack=True, fit=True),
)


def memory(weight_bytes: int) -> DeviceMemory:
    return DeviceMemory(
        weight_bytes=weight_bytes,
        kv_bytes=10 * MEGABYTE,
        recurrent_bytes=0,
        compute_bytes=15 * MEGABYTE,
        reserve_bytes=256 * MEGABYTE,
        available_bytes=4000 * MEGABYTE,
    )


def stage(node: str, first: int, count: int, *, coordinator: bool = False) -> Stage:
    return Stage(
        node_id=NodeId(node),
        node_name=f"node {node}",
        is_coordinator=coordinator,
        device="CPU",
        is_cpu=True,
        first_layer=first,
        layer_count=count,
        holds_output=False,
        memory=memory(count * 10 * MEGABYTE),
    )


def layers_plan(*nodes: str) -> Plan:
    """Five layers on the coordinator, five on each node."""
    stages = [stage("self", 0, 5, coordinator=True)]
    stages += [stage(node, 5 + 5 * rank, 5) for rank, node in enumerate(nodes)]
    return Plan(
        mode=PlanMode.LAYERS,
        model=ModelReference(
            name="SmolLM2 135M",
            source="/models/smol.gguf",
            digest="0" * 64,
            architecture="llama",
            layer_count=5 + 5 * len(nodes),
            weight_bytes=10**9,
        ),
        options=PlanOptions(),
        coordinator_id=NodeId("self"),
        coordinator_name="here",
        engine=FINGERPRINT,
        stages=tuple(stages),
        coordinator_memory=memory(60 * MEGABYTE),
        node_urls={NodeId(node): (f"http://10.0.0.1/{node}",) for node in nodes},
        expectation=Expectation(
            token_ms=10, compute_ms=8, network_ms=2, optimality_gap=0, objective="token time"
        ),
    )
