"""What to do next in mode ``experts``, whether it is as planned, and how to say it. Pure."""

from collections.abc import Mapping, Sequence, Set
from datetime import datetime

from linkcpp.common.units import format_bytes
from linkcpp.launch.decisions import PADDING_SHARE, ROUNDING_BYTES, Step
from linkcpp.launch.experts.events import count_holders, units_of
from linkcpp.launch.experts.records import ExpertsState, WorkerPhase, WorkerState
from linkcpp.planning.records import ExpertShare

CHAIN = (
    Step.CHECK_MODEL,
    Step.CHECK_ENGINE,
    Step.MAKE_BACKBONE,
    Step.START_DISPATCH,
    Step.START_WORKERS,
    Step.START_ENGINE,
    Step.AWAIT_ENGINE,
    Step.ASK,
    Step.PROVE_SPLIT,
)


def next_step_of(done: Set[Step]) -> Step:
    """Return the first step of the chain that is not done."""
    return next((step for step in CHAIN if step not in done), Step.SERVE)


def lost_sentence(experts: ExpertsState, index: int, reason: str) -> str:
    """Say that a worker went away, and who computes its experts from now on."""
    lost = experts.workers[index]
    others = [
        worker
        for worker in experts.workers
        if worker.index != index and worker.phase is WorkerPhase.UP
    ]
    holders = count_holders([worker.segments for worker in others])
    wanted = units_of(lost.segments)
    alone = sum(unit not in holders for unit in wanted)
    if not alone:
        names = sorted({w.node_name for w in others if units_of(w.segments) & wanted})
        heirs = f"{_joined(names)} compute{'s' if len(names) == 1 else ''} its experts"
    elif experts.has_fallback:
        heirs = "what nobody else holds is computed here"
    else:
        part = "its experts" if alone == len(wanted) else f"{alone} of its {len(wanted)} experts"
        heirs = f"requests that need {part} wait for it, and fail where it stays away"
    return f"{_who(lost)} went away ({reason.rstrip('.')}); {heirs}"


def back_sentence(share: ExpertShare) -> str:
    """Say that a worker computes again."""
    return f"{_who(share)} is back and computes again"


def _who(member: WorkerState | ExpertShare) -> str:
    """Name who computes a share: a node, or this machine's own part of it."""
    return f"the worker here ({member.device})" if member.is_coordinator else member.node_name


def absence_clause(left_at: datetime | None, now: datetime) -> str:
    """Say since when a share's node is away, in local time; ``None`` where it never served."""
    if left_at is None:
        return "its node cannot be found; it takes part as soon as the node is there"
    day = "" if left_at.date() == now.date() else f"on {left_at:%Y-%m-%d} "
    return f"its node left {day}at {left_at:%H:%M}; it comes back by itself with the node"


def unproved_experts(experts: ExpertsState) -> list[str]:
    """Say what is not as the plan has it, after a first completion.

    Three witnesses must agree: the nodes say what their workers hold, the dispatch process what it
    asked of whom, and by the sum of both llama-server computed no expert by itself.
    """
    seen = experts.dispatch
    problems = []
    if not seen.call_count:
        problems.append("llama-server sent no experts to the virtual device")
    if seen.failed_call_count:
        problems.append(f"{seen.failed_call_count} calls had nobody to compute them")
    computed = sum(worker.total.pair_count for worker in experts.workers)
    if computed + seen.fallback_pair_count < seen.pair_count - seen.failed_pair_count:
        problems.append(
            f"{computed + seen.fallback_pair_count} of {seen.pair_count} pairs are accounted for"
        )
    for worker in experts.workers:
        planned, held = worker.planned_weight_bytes, worker.slab_bytes
        if worker.phase is not WorkerPhase.UP or held is None:
            continue
        slack = ROUNDING_BYTES + PADDING_SHARE * planned
        if abs(held - planned) > slack:
            problems.append(
                f"{worker.node_name} holds {format_bytes(held)} instead of {format_bytes(planned)}"
            )
    return problems


def uncovered_sentence(missing_count: int, reasons: Mapping[str, str]) -> str:
    """Say that some experts have no worker, and why not."""
    why = "; ".join(f"{name}: {reason.rstrip('.')}" for name, reason in sorted(reasons.items()))
    return f"{missing_count} experts have no worker ({why or 'no node was planned for them'})."


def coverage_hint(replicas: int, *, has_experts: bool, hints: Sequence[str] = ()) -> str:
    """Say what helps where some experts have no worker; ``has_experts``: this machine could.

    ``hints`` are what helps with nodes that are there and refuse; without any they are away.
    """
    ways = ["bring those nodes back (`linkcpp node`, or `linkcpp join` for one of a hub)"]
    if hints:
        ways.clear()
    if replicas < 2:
        ways.append("plan with --replicas 2")
    if has_experts:
        ways.append("plan again without them (`linkcpp plan`)")
    else:
        ways.append("give the whole model as --model, for this machine to compute what is missing")
    if hints:
        return f"{' '.join(dict.fromkeys(hints))} Or: {_either(ways)}."
    text = _either(ways)
    return f"{text[0].upper()}{text[1:]}."


def _either(ways: Sequence[str]) -> str:
    return ", or ".join(filter(None, (", ".join(ways[:-1]), ways[-1])))


def _joined(names: list[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
