"""What to do next, and what to do after a failure. Pure: plain data in, a decision out."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from linkcpp.cluster.records import NodeId
from linkcpp.common.units import format_bytes
from linkcpp.launch.records import StageState
from linkcpp.planning.records import Plan

# Of a launch that never served, while its user waits for an answer.
FIRST_TRIES = 6
LINK_MEMORY_SECONDS = 900.0
FIRST_PAUSE_SECONDS = 0.5
# Also how long a deployment has to serve for its earlier failures to count as healed.
MAX_PAUSE_SECONDS = 30.0
# A link may hiccup once; a node whose link fails again is not worth another interruption.
LINK_LOSSES_FORGIVEN = 1

# llama-server logs sizes rounded to hundredths of a MiB, and a backend pads tensors and rows.
ROUNDING_BYTES = 16 * 2**10
PADDING_SHARE = 0.05


class Step(StrEnum):
    """What leads from a plan to an answer; each mode has a chain of these."""

    CHECK_MODEL = "check_model"
    CHECK_ENGINE = "check_engine"
    MAKE_BACKBONE = "make_backbone"
    START_DISPATCH = "start_dispatch"
    START_WORKERS = "start_workers"
    FIND_NODES = "find_nodes"
    START_SERVERS = "start_servers"
    OPEN_FORWARDS = "open_forwards"
    START_ENGINE = "start_engine"
    AWAIT_ENGINE = "await_engine"
    PROVE_SPLIT = "prove_split"
    ASK = "ask"
    SERVE = "serve"


@dataclass(frozen=True)
class Observed:
    """What is known to be true now. Stages are named by their index in the plan.

    In mode ``experts`` what was done does not come undone within an attempt: ``done`` tells all.
    """

    model_is_right: bool = False
    engine_is_right: bool = False
    found_nodes: frozenset[NodeId] = frozenset()
    served_stages: frozenset[int] = frozenset()
    forwarded_stages: frozenset[int] = frozenset()
    engine_runs: bool = False
    engine_is_healthy: bool = False
    split_is_proved: bool = False
    has_answered: bool = False
    done: frozenset[Step] = frozenset()


def remote_stages(plan: Plan) -> tuple[int, ...]:
    """Return the indices of the stages that need an rpc-server on a node."""
    return tuple(index for index, stage in enumerate(plan.stages) if not stage.is_coordinator)


def remote_nodes(plan: Plan) -> dict[NodeId, str]:
    """Return the nodes that hold stages, with their names."""
    return {stage.node_id: stage.node_name for stage in plan.stages if not stage.is_coordinator}


def next_step(plan: Plan, observed: Observed) -> Step:  # noqa: PLR0911 - one return a step
    """Return the first step of the chain whose result is not there yet."""
    stages = frozenset(remote_stages(plan))
    if not observed.model_is_right:
        return Step.CHECK_MODEL
    if not observed.engine_is_right:
        return Step.CHECK_ENGINE
    if not observed.found_nodes >= remote_nodes(plan).keys():
        return Step.FIND_NODES
    if not observed.served_stages >= stages:
        return Step.START_SERVERS
    if not observed.forwarded_stages >= stages:
        return Step.OPEN_FORWARDS
    if not observed.engine_runs:
        return Step.START_ENGINE
    if not observed.engine_is_healthy:
        return Step.AWAIT_ENGINE
    if not observed.split_is_proved:
        return Step.PROVE_SPLIT
    return Step.SERVE if observed.has_answered else Step.ASK


@dataclass(frozen=True)
class Failure:
    """Why an attempt ended.

    ``lost_nodes`` do not answer any more (or refused what they were asked); ``broken_links`` are
    nodes that answer though their link to a server broke. ``is_final`` marks what starting again
    cannot mend. ``served_seconds`` is for how long the attempt was ready. ``keeps_trying`` is false
    only of a launch that never served and whose user waits to be told.
    """

    at_seconds: float
    reason: str
    hint: str | None = None
    lost_nodes: frozenset[NodeId] = frozenset()
    broken_links: frozenset[NodeId] = frozenset()
    is_final: bool = False
    served_seconds: float = 0.0
    keeps_trying: bool = True


@dataclass(frozen=True)
class History:
    """The failures of a deployment so far, and the nodes that it does without since then.

    ``unhealed_count`` counts those since it last served for a while.
    """

    failures: tuple[Failure, ...] = ()
    excluded: frozenset[NodeId] = frozenset()
    unhealed_count: int = 0


@dataclass(frozen=True)
class GiveUp:
    """The deployment has failed."""

    reason: str
    hint: str | None


@dataclass(frozen=True)
class StartAgain:
    """Try once more after a pause, on a new plan where nodes were dropped."""

    pause_seconds: float
    needs_new_plan: bool
    sentence: str


@dataclass(frozen=True)
class Recovery:
    """The decision after a failure, and the history that the next one is judged by."""

    history: History
    action: GiveUp | StartAgain = field(kw_only=True)


def recover(plan: Plan, history: History, failure: Failure) -> Recovery:
    """Decide what to do after ``failure``.

    What has served is started again for as long as somebody wants it, ever more seldom while that
    does not help. Broken links are forgotten after a while.
    """
    recent = tuple(
        earlier
        for earlier in history.failures
        if failure.at_seconds - earlier.at_seconds < LINK_MEMORY_SECONDS
    )
    unreliable = {
        node
        for node in failure.broken_links
        if sum(node in earlier.broken_links for earlier in recent) >= LINK_LOSSES_FORGIVEN
    }
    dropped = failure.lost_nodes | unreliable
    has_healed = failure.served_seconds >= MAX_PAUSE_SECONDS
    unhealed_count = 1 if has_healed else history.unhealed_count + 1
    after = History((*recent, failure), history.excluded | dropped, unhealed_count)
    if failure.is_final:
        return Recovery(after, action=GiveUp(failure.reason, failure.hint))
    if not failure.keeps_trying:
        if unhealed_count >= FIRST_TRIES:
            reason = f"{failure.reason}; that was try {unhealed_count}"
            return Recovery(after, action=GiveUp(reason, failure.hint))
        if recent and _is_alike(failure, recent[-1]):
            reason = f"{failure.reason}, and the same again at the second try"
            return Recovery(after, action=GiveUp(reason, failure.hint))
    names = remote_nodes(plan)
    without = ", ".join(sorted(names.get(node, node) for node in dropped))
    again = f"starting again without {without}" if without else "starting again"
    pause = pause_seconds(unhealed_count)
    soon = f" in {pause:.0f} s" if pause >= MAX_PAUSE_SECONDS else ""
    action = StartAgain(pause, bool(dropped), f"{failure.reason.rstrip('.')}; {again}{soon}")
    return Recovery(after, action=action)


def pause_seconds(unhealed_count: int) -> float:
    """Return how long to wait after that many failures in a row."""
    # Larger exponents overflow a float in the course of years.
    pause = FIRST_PAUSE_SECONDS * 2.0 ** min(unhealed_count - 1, 64)
    return min(pause, MAX_PAUSE_SECONDS)


def _is_alike(failure: Failure, earlier: Failure) -> bool:
    """Whether an earlier try ended in the same way. Ports and sizes in the words may differ."""
    words, words_before = (re.sub(r"\d+", "0", each.reason) for each in (failure, earlier))
    return words == words_before and not failure.lost_nodes


def unproved_stages(plan: Plan, stages: Sequence[StageState]) -> list[str]:
    """Say of each device that does not hold what the plan gave it, what it holds instead.

    Two witnesses must agree with the plan: the bytes that the node's agent counted, and the buffer
    that llama-server logged for the node's endpoint. A window that silently went to the coordinator
    shows as a device that holds nothing. The coordinator's CPU is not asked: it maps the file.
    """
    problems = []
    for stage, seen in zip(plan.stages, stages, strict=True):
        if stage.is_coordinator and stage.is_cpu:
            continue
        planned = stage.memory.weight_bytes
        witnesses = [seen.model_buffer_bytes or 0]
        if not stage.is_coordinator:
            witnesses.append(seen.held_weight_bytes or 0)
        slack = ROUNDING_BYTES + PADDING_SHARE * planned
        wrong = [held for held in witnesses if not -ROUNDING_BYTES <= held - planned <= slack]
        if wrong:
            problems.append(
                f"{stage.node_name} holds {format_bytes(wrong[0])} on {stage.device} "
                f"instead of {format_bytes(planned)}"
            )
    return problems
