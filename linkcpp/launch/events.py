"""The state of a deployment as a fold over what happened. Pure."""

from dataclasses import dataclass
from typing import Any

from linkcpp.common.processes import ProcessIdentity
from linkcpp.launch.enginelog import Buffer, Speed
from linkcpp.launch.experts.events import ExpertsEvent, apply_to_experts, first_experts
from linkcpp.launch.records import (
    DeploymentState,
    LaunchRequest,
    Notice,
    Phase,
    StageState,
)
from linkcpp.node.records import ServerRecord
from linkcpp.planning.records import Plan

NOTICE_LIMIT = 50


@dataclass(frozen=True)
class PhaseEntered:
    """The deployment went on to ``phase``; ``detail`` and ``hint`` say why, where that matters."""

    phase: Phase
    detail: str | None = None
    hint: str | None = None


@dataclass(frozen=True)
class Noticed:
    """Something that a person would want to read later."""

    text: str


@dataclass(frozen=True)
class PlanAdopted:
    """Stages were laid out anew; nothing of an earlier layout is known any more."""

    plan: Plan
    excluded_nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeFound:
    """A node of the plan answered at ``url``; ``way`` says how an edge gets there, and why so."""

    node_id: str
    url: str
    rtt_ms: float | None
    way: str | None = None


@dataclass(frozen=True)
class ServerSeen:
    """A node's agent told about the rpc-server of a stage."""

    stage: int
    server: ServerRecord


@dataclass(frozen=True)
class ForwardOpened:
    """The rpc-server of a stage can be reached at a loopback endpoint."""

    stage: int
    endpoint: str


@dataclass(frozen=True)
class BytesCarried:
    """What a stage's tunnel carried since it was opened."""

    stage: int
    total_bytes: int


@dataclass(frozen=True)
class SupervisorStarted:
    """This process looks after the deployment from now on."""

    process: ProcessIdentity


@dataclass(frozen=True)
class EngineStarted:
    """llama-server runs."""

    process: ProcessIdentity


@dataclass(frozen=True)
class EngineStopped:
    """llama-server does not run any more."""


@dataclass(frozen=True)
class ChatPageSeen:
    """This build of llama-server serves a chat page at the API's root."""


@dataclass(frozen=True)
class Restarted:
    """The deployment is being started again after a failure."""


@dataclass(frozen=True)
class Logged:
    """llama-server logged a fact about itself."""

    fact: Buffer | Speed


Event = (
    PhaseEntered
    | Noticed
    | PlanAdopted
    | NodeFound
    | ServerSeen
    | ForwardOpened
    | BytesCarried
    | SupervisorStarted
    | EngineStarted
    | EngineStopped
    | ChatPageSeen
    | Restarted
    | Logged
    | ExpertsEvent
)


def first_state(request: LaunchRequest, *, now: float) -> DeploymentState:
    """Return the state of a deployment that nothing was done for yet."""
    empty = DeploymentState(
        name=request.name,
        model_name=request.plan.model.name,
        mode=request.plan.mode.value,
        phase=Phase.CHECKING,
        api_url=api_url(request.host, request.port),
        api_key_file=request.api_key_file,
        created_at=now,
        updated_at=now,
    )
    return apply(empty, PlanAdopted(request.plan), now=now)


def api_url(host: str, port: int) -> str:
    """Return the address under which this machine itself reaches the API."""
    name = reachable(host)
    return f"http://{f'[{name}]' if ':' in name else name}:{port}"


def reachable(host: str) -> str:
    """Return where this machine connects to what listens on ``host``: not to a wildcard address."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def apply(state: DeploymentState, event: Event, *, now: float) -> DeploymentState:
    """Return the state after ``event`` happened at ``now`` (seconds since 1970)."""
    changed = {**_changes(state, event, now), "updated_at": now}
    return state.model_copy(update=changed)


def _changes(state: DeploymentState, event: Event, now: float) -> dict[str, Any]:  # noqa: PLR0911, PLR0912 - one case an event
    match event:
        case PhaseEntered(phase, detail, hint):
            return _enter(state, phase, detail, hint, now)
        case Noticed(text):
            return {"notices": _noticed(state, text, now)}
        case PlanAdopted(plan, excluded):
            return {
                "mode": plan.mode.value,
                "stages": _stages(plan),
                "experts": first_experts(plan),
                "excluded_nodes": excluded,
                "coordinator_buffer_bytes": 0,
            }
        case NodeFound(node_id, url, rtt_ms, way):
            found = {"url": url, "rtt_ms": rtt_ms, "way": way}
            indices = [stage.index for stage in state.stages if stage.node_id == node_id]
            return {"stages": _with(state.stages, indices, found)}
        case ServerSeen(stage, server):
            seen = {
                "server_id": server.server_id,
                "held_weight_bytes": server.tensor_bytes,
                "allocated_bytes": server.allocated_bytes,
                "resident_bytes": server.resident_bytes,
            }
            return {"stages": _with(state.stages, [stage], seen)}
        case ForwardOpened(stage, endpoint):
            return {"stages": _with(state.stages, [stage], {"endpoint": endpoint})}
        case BytesCarried(stage, total_bytes):
            return {"stages": _with(state.stages, [stage], {"carried_bytes": total_bytes})}
        case SupervisorStarted(process):
            return {"supervisor": process}
        case EngineStarted(process):
            return {"llama_server": process, "has_loaded": True}
        case EngineStopped():
            return {"llama_server": None}
        case ChatPageSeen():
            return {"chat_url": f"{state.api_url}/"}
        case Restarted():
            return {"restart_count": state.restart_count + 1}
        case Logged(fact):
            return _logged(state, fact)
        case _:
            return {"experts": apply_to_experts(state.experts, event)} if state.experts else {}


def _enter(
    state: DeploymentState, phase: Phase, detail: str | None, hint: str | None, now: float
) -> dict[str, Any]:
    changes: dict[str, Any] = {"phase": phase, "detail": detail, "hint": hint}
    changes["ready_at"] = now if phase is Phase.READY else None
    if detail:
        changes["notices"] = _noticed(state, detail, now)
    return changes


def _noticed(state: DeploymentState, text: str, now: float) -> tuple[Notice, ...]:
    if state.notices and state.notices[-1].text == text:
        # Said since then, and true again or still.
        return state.notices
    return (*state.notices, Notice(at=now, text=text))[-NOTICE_LIMIT:]


def _stages(plan: Plan) -> tuple[StageState, ...]:
    return tuple(
        StageState(
            index=index,
            node_id=stage.node_id,
            node_name=stage.node_name,
            is_coordinator=stage.is_coordinator,
            device=stage.device,
            first_layer=stage.first_layer,
            layer_count=stage.layer_count,
            holds_output=stage.holds_output,
            planned_weight_bytes=stage.memory.weight_bytes,
            planned_memory_bytes=stage.memory.used_bytes,
        )
        for index, stage in enumerate(plan.stages)
    )


def _with(
    stages: tuple[StageState, ...], indices: list[int], changes: dict[str, Any]
) -> tuple[StageState, ...]:
    return tuple(
        stage.model_copy(update=changes) if stage.index in indices else stage for stage in stages
    )


def _logged(state: DeploymentState, fact: Buffer | Speed) -> dict[str, Any]:
    if isinstance(fact, Speed):
        name = "prompt_tokens_per_second" if fact.of_prompt else "tokens_per_second"
        return {name: fact.tokens_per_second}
    indices = [stage.index for stage in state.stages if _is_buffer_of(fact, stage)]
    if not indices:
        return {"coordinator_buffer_bytes": state.coordinator_buffer_bytes + fact.size_bytes}
    field = f"{fact.kind.value}_buffer_bytes"
    known = getattr(state.stages[indices[0]], field) or 0
    return {"stages": _with(state.stages, indices[:1], {field: known + fact.size_bytes})}


def _is_buffer_of(buffer: Buffer, stage: StageState) -> bool:
    if buffer.kind.value == "output":
        return False
    if buffer.endpoint is not None:
        return stage.endpoint == buffer.endpoint
    return stage.is_coordinator and stage.device == buffer.device
