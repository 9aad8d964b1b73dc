"""How far a launch is, as bars. Pure."""

from dataclasses import dataclass

from linkcpp.launch.experts.records import ExpertsState, WorkerPhase
from linkcpp.launch.records import DeploymentState, Phase

_ORDER = (
    Phase.CHECKING,
    Phase.PREPARING,
    Phase.FINDING_NODES,
    Phase.STARTING_SERVERS,
    Phase.LOADING,
    Phase.WARMING_UP,
    Phase.PROVING,
    Phase.READY,
)


@dataclass(frozen=True)
class Bar:
    """One stage of a launch. ``total`` counts bytes if ``is_bytes``, else things to do."""

    label: str
    done: int
    total: int
    is_bytes: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether nothing of this stage is left to do."""
        return self.done >= self.total


def bars_of(state: DeploymentState) -> list[Bar]:
    """Return the stages of a launch in order; the same stages at any moment of it."""
    if state.experts is not None:
        return _bars_of_experts(state, state.experts)
    remote = [stage for stage in state.stages if not stage.is_coordinator]
    nodes = {stage.node_id: stage.url is not None for stage in remote}
    bars = [_step("model's header and engine checked", state, Phase.CHECKING)]
    if remote:
        bars.append(Bar("nodes found", sum(nodes.values()), len(nodes)))
        started = sum(stage.server_id is not None for stage in remote)
        bars.append(Bar("servers started", started, len(remote)))
    bars += [
        Bar(
            f"weights on {stage.node_name} {stage.device}",
            _loaded(stage.held_weight_bytes or 0, stage.planned_weight_bytes, state),
            stage.planned_weight_bytes,
            is_bytes=True,
        )
        for stage in remote
    ]
    return [
        *bars,
        _step("model loaded", state, Phase.LOADING),
        _step("warmed up", state, Phase.WARMING_UP),
        _step("split proved and first completion", state, Phase.PROVING),
    ]


def _bars_of_experts(state: DeploymentState, experts: ExpertsState) -> list[Bar]:
    copied = max(experts.backbone_copied_bytes, 1)
    done = copied if _is_past(state, Phase.PREPARING) else experts.backbone_done_bytes
    bars = [
        _step("model's header and engine checked", state, Phase.CHECKING),
        Bar("hollow backbone", min(done, copied), copied, is_bytes=True),
    ]
    for worker in experts.workers:
        total = worker.slice_bytes or worker.planned_weight_bytes
        label = f"experts on {worker.node_name} {worker.device}"
        done = worker.slice_done_bytes
        if worker.is_coordinator:
            label = f"experts here, {worker.device}"
            done = total if worker.phase is WorkerPhase.UP else worker.loaded_bytes
        bars.append(Bar(label, min(done, total), total, is_bytes=True))
    up = sum(worker.phase is WorkerPhase.UP for worker in experts.workers)
    return [
        *bars,
        Bar("workers compute", up, len(experts.workers)),
        _step("model loaded", state, Phase.LOADING),
        _step("warmed up", state, Phase.WARMING_UP),
        _step("first completion, split proved", state, Phase.PROVING),
    ]


def _loaded(held: int, planned: int, state: DeploymentState) -> int:
    # The node counts what is written to it, padding included.
    return planned if _is_past(state, Phase.LOADING) else min(held, planned)


def _step(label: str, state: DeploymentState, phase: Phase) -> Bar:
    return Bar(label, int(_is_past(state, phase)), 1)


def _is_past(state: DeploymentState, phase: Phase) -> bool:
    return state.phase in _ORDER and _ORDER.index(state.phase) > _ORDER.index(phase)
