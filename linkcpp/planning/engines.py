"""A plan for a machine without a llama.cpp engine: what is assumed of the one that will run it."""

from linkcpp.cluster.records import NodeRecord
from linkcpp.engine.records import EngineFeatures, EngineFingerprint

UNKNOWN_ENGINE = EngineFingerprint(
    build=None,
    commit=None,
    ggml_version=None,
    rpc_version=None,
    features=EngineFeatures(rpc=True, override_tensor=True, no_repack=True, fit=True),
)


def planned_engine(coordinator: NodeRecord) -> tuple[EngineFingerprint, tuple[str, ...]]:
    """Return the build that a plan is for, and what had to be assumed about it.

    Without an engine its graphics cards are not known either: only engines list them.
    """
    if coordinator.engine is not None and coordinator.engine.rpc_version is not None:
        return coordinator.engine, ()
    note = (
        f"{coordinator.name}: no working llama.cpp engine yet; sizes are those of the build that "
        "takes most, graphics cards are not counted, and launch checks the engine"
    )
    return coordinator.engine or UNKNOWN_ENGINE, (note,)
