"""How the state of a deployment's experts follows from what happens, and what is said of it."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from linkcpp.cluster.records import NodeId
from linkcpp.dispatch.checks import AdmissionStatus
from linkcpp.dispatch.control import DispatchStatus, FallbackStatus, WorkerStatus
from linkcpp.launch.decisions import Step
from linkcpp.launch.events import Noticed
from linkcpp.launch.experts.decisions import (
    CHAIN,
    absence_clause,
    coverage_hint,
    lost_sentence,
    next_step_of,
    uncovered_sentence,
    unproved_experts,
)
from linkcpp.launch.experts.events import (
    BackboneCopied,
    DispatchSeen,
    FallbackChosen,
    SliceSeen,
    WorkerFound,
    WorkerMoved,
    WorkerStarted,
    apply_to_experts,
    count_holders,
    min_holders,
    word_of_check,
)
from linkcpp.launch.experts.records import (
    DispatchCounts,
    ExpertsState,
    WorkerPhase,
    WorkerState,
)
from linkcpp.launch.experts.watching import _Links
from linkcpp.model.slices.segments import Segment
from linkcpp.node.records import WorkerId
from linkcpp.worker.agreement import Agreement, Verdict

MEBIBYTE = 2**20


def worker(index: int, name: str, *ranges: tuple[int, int], **fields: Any) -> WorkerState:
    return WorkerState(
        index=index,
        node_id=NodeId(f"{index:032x}"),
        node_name=name,
        is_coordinator=False,
        device="CPU",
        segments=tuple(Segment(layer=0, first=first, last=last) for first, last in ranges),
        planned_weight_bytes=100 * MEBIBYTE,
        **fields,
    )


@pytest.fixture
def two() -> ExpertsState:
    """Attic holds experts 0 to 9, cellar 6 to 15; both are up as ``w0`` and ``w1``."""
    up = WorkerPhase.UP
    return ExpertsState(
        workers=(
            worker(0, "attic", (0, 9), phase=up, holder="w0", slab_bytes=100 * MEBIBYTE),
            worker(1, "cellar", (6, 15), phase=up, holder="w1", slab_bytes=100 * MEBIBYTE),
        )
    )


def seen(name: str, *ranges: tuple[int, int], state: str = "up", **fields: Any) -> WorkerStatus:
    counts = {"pair_count": 8, "request_count": 2, "mean_wait_ms": 3.0, "mean_compute_ms": 1.0}
    return WorkerStatus(
        name=name,
        state=state,
        segments=tuple(Segment(layer=0, first=first, last=last) for first, last in ranges),
        **{"detail": "", "sent_bytes": 10, "received_bytes": 20, "failure_count": 0, **counts},
        **fields,
    )


def told(*workers: WorkerStatus, fallback: FallbackStatus | None = None, **counts: Any) -> Any:
    numbers = dict.fromkeys(
        set(DispatchStatus.model_fields) - {"workers", "fallback", "failures", "differences"}, 0
    )
    return DispatchSeen(
        DispatchStatus(workers=workers, fallback=fallback, failures=(), **{**numbers, **counts})
    )


def test_each_event_changes_what_it_is_about_and_nothing_else(two: ExpertsState) -> None:
    state = apply_to_experts(two, BackboneCopied(Path("/b.gguf"), 900, 90, 45))
    assert (state.backbone_bytes, state.backbone_copied_bytes, state.backbone_done_bytes) == (
        900,
        90,
        45,
    )
    assert state.workers == two.workers
    state = apply_to_experts(two, FallbackChosen(5, None))
    assert (state.has_fallback, state.fallback_bytes) == (True, 5)
    state = apply_to_experts(state, FallbackChosen(0, "the model is hollow"))
    assert (state.has_fallback, state.fallback_absence) == (False, "the model is hollow")
    for event, field, value in (
        (SliceSeen(1, 700, 300, 200), "slice_done_bytes", 300),
        (WorkerMoved(1, WorkerPhase.AWAY, "cut"), "detail", "cut"),
        (WorkerFound(1, "http://cellar", 2.5), "rtt_ms", 2.5),
    ):
        state = apply_to_experts(two, event)
        assert getattr(state.workers[1], field) == value
        assert state.workers[0] == two.workers[0]


def test_a_worker_started_again_keeps_what_its_forerunners_did(two: ExpertsState) -> None:
    state = apply_to_experts(two, told(seen("w0", (0, 9)), seen("w1", (6, 15))))
    assert state.workers[0].total.pair_count == 8
    assert state.workers[0].mean_wait_ms == 3.0
    again = WorkerStarted(0, "w0b", WorkerId("a" * 32), 100 * MEBIBYTE)
    state = apply_to_experts(state, again)
    assert (state.workers[0].start_count, state.workers[0].earlier.pair_count) == (1, 8)
    state = apply_to_experts(state, told(seen("w0b", (0, 9)), seen("w1", (6, 15))))
    assert state.workers[0].total.pair_count == 16
    assert state.workers[0].mean_wait_ms == 3.0
    # Counted since its own start, not twice.
    state = apply_to_experts(state, told(seen("w0b", (0, 9)), seen("w1", (6, 15))))
    assert state.workers[0].total.pair_count == 16


def test_replicas_count_only_workers_that_are_linked(two: ExpertsState) -> None:
    state = apply_to_experts(two, told(seen("w0", (0, 9)), seen("w1", (6, 15), state="checking")))
    # Experts 0 to 5 are with attic alone.
    assert [w.replica_count for w in state.workers] == [1, 1]
    assert [w.is_linked for w in state.workers] == [True, True]
    refused = seen("w1", (6, 15), state="refused")
    state = apply_to_experts(two, told(seen("w0", (0, 9)), refused))
    assert [w.replica_count for w in state.workers] == [1, 0]
    assert [w.link for w in state.workers] == ["up", "refused"]
    state = apply_to_experts(two, told(seen("w0", (0, 9))))
    assert (state.workers[1].is_linked, state.workers[1].link) == (False, None)


def test_the_fallback_and_the_counts_are_taken_over(two: ExpertsState) -> None:
    fallback = FallbackStatus(pair_count=4, loaded_count=3, failure="out of memory")
    state = apply_to_experts(two, told(fallback=fallback, pair_count=20, late_count=2))
    assert (state.dispatch.pair_count, state.dispatch.late_count) == (20, 2)
    assert (state.dispatch.fallback_pair_count, state.dispatch.fallback_loaded_count) == (4, 3)
    assert state.fallback_failure == "out of memory"


def test_holders_are_counted_once_for_overlapping_segments() -> None:
    overlapping = [Segment(layer=0, first=0, last=2), Segment(layer=0, first=2, last=3)]
    holders = count_holders([overlapping, [Segment(layer=0, first=3, last=3)]])
    assert holders == {(0, 0): 1, (0, 1): 1, (0, 2): 1, (0, 3): 2}
    assert min_holders([Segment(layer=0, first=3, last=4)], holders) == 0
    assert min_holders([], holders) == 0


def test_the_word_of_a_check_tells_what_was_compared() -> None:
    exact = Agreement(
        verdict=Verdict.EXACT,
        row_count=1,
        least_cosine=1.0,
        largest_difference=0.0,
        relative_error=0.0,
    )
    compared = AdmissionStatus(layer_count=1, against=("the model",), agreement=exact)
    nothing = AdmissionStatus(layer_count=1, against=("nobody",), agreement=None)
    assert [word_of_check(c) for c in (None, compared, nothing)] == [None, "exact", "unchecked"]


def test_steps_come_in_order_and_then_it_serves() -> None:
    done: set[Step] = set()
    for step in CHAIN:
        assert next_step_of(done) is step
        done.add(step)
    assert next_step_of(done) is Step.SERVE


def test_a_loss_names_who_computes_instead(two: ExpertsState) -> None:
    alone = lost_sentence(two, 0, "the link was cut.")
    assert alone == (
        "attic went away (the link was cut); requests that need 6 of its 10 experts wait for it, "
        "and fail where it stays away"
    )
    with_fallback = two.model_copy(update={"has_fallback": True})
    assert "what nobody else holds is computed here" in lost_sentence(with_fallback, 0, "cut")
    full = (*two.workers, worker(2, "shed", (0, 15), phase=WorkerPhase.UP))
    three = two.model_copy(update={"workers": full})
    assert "cellar and shed compute its experts" in lost_sentence(three, 0, "cut")
    away = worker(2, "shed", (0, 15), phase=WorkerPhase.AWAY)
    gone = two.model_copy(update={"workers": (*two.workers, away)})
    assert "fail where it stays away" in lost_sentence(gone, 0, "cut")
    only = two.model_copy(update={"workers": two.workers[:1]})
    assert "requests that need its experts wait" in lost_sentence(only, 0, "cut")
    here = two.workers[0].model_copy(update={"is_coordinator": True})
    own = two.model_copy(update={"workers": (here, *two.workers[1:])})
    assert lost_sentence(own, 0, "cut").startswith("the worker here (CPU) went away (cut)")


def test_a_sound_split_has_nothing_to_complain_of(two: ExpertsState) -> None:
    state = apply_to_experts(
        two, told(seen("w0", (0, 9)), seen("w1", (6, 15)), call_count=2, pair_count=16)
    )
    assert unproved_experts(state) == []


@pytest.mark.parametrize(
    ("counts", "complaint"),
    [
        ({"call_count": 0}, "llama-server sent no experts"),
        ({"call_count": 2, "failed_call_count": 1}, "1 calls had nobody"),
        ({"call_count": 2, "pair_count": 17}, "0 of 17 pairs are accounted for"),
    ],
)
def test_what_is_not_as_planned_is_named(
    two: ExpertsState, counts: dict[str, int], complaint: str
) -> None:
    state = two.model_copy(update={"dispatch": DispatchCounts(**counts)})
    assert any(complaint in problem for problem in unproved_experts(state))


def test_a_worker_that_holds_less_than_planned_is_named_unless_it_is_away(
    two: ExpertsState,
) -> None:
    sound = DispatchCounts(call_count=1)
    short = two.workers[1].model_copy(update={"slab_bytes": 50 * MEBIBYTE})
    state = two.model_copy(update={"workers": (two.workers[0], short), "dispatch": sound})
    assert [p.split(" holds ")[0] for p in unproved_experts(state)] == ["cellar"]
    away = short.model_copy(update={"phase": WorkerPhase.AWAY})
    state = state.model_copy(update={"workers": (two.workers[0], away)})
    assert unproved_experts(state) == []


def test_uncovered_experts_are_counted_with_all_reasons() -> None:
    told_why = uncovered_sentence(12, {"cellar": "not found.", "attic": "no room"})
    assert told_why == "12 experts have no worker (attic: no room; cellar: not found)."
    assert "no node was planned for them" in uncovered_sentence(1, {})


def test_the_hint_names_only_what_helps() -> None:
    assert "--replicas" in coverage_hint(1, has_experts=True)
    assert "--replicas" not in coverage_hint(2, has_experts=True)
    assert "--model" not in coverage_hint(2, has_experts=True)
    assert "give the whole model as --model" in coverage_hint(2, has_experts=False)
    assert coverage_hint(2, has_experts=True).startswith("Bring those nodes back")
    limit = "Raise the owner's limit (`linkcpp node --slices`)."
    told = coverage_hint(1, has_experts=True, hints=[limit, limit])
    assert told.startswith(f"{limit} Or: plan with --replicas 2, or plan again")
    assert "Bring" not in told


def test_a_node_that_left_is_told_with_the_time_it_left() -> None:
    left_at = datetime(2026, 3, 1, 20, 48, tzinfo=UTC)
    assert absence_clause(left_at, left_at).startswith("its node left at 20:48; it comes back")
    next_day = absence_clause(left_at, left_at + timedelta(hours=9))
    assert "left on 2026-03-01 at 20:48" in next_day
    assert "cannot be found" in absence_clause(None, left_at)


def test_a_difference_between_workers_is_in_the_state_and_told_once(two: ExpertsState) -> None:
    sentence = "Worker w0 is no longer used: its rows differ."
    event = told(seen("w0", (0, 9)), seen("w1", (6, 15)), spot_pair_count=70, difference_count=1)
    event = DispatchSeen(event.status.model_copy(update={"differences": (sentence,)}))
    state = apply_to_experts(two, event)
    assert (state.dispatch.spot_pair_count, state.dispatch.difference_count) == (70, 1)
    emitted: list[object] = []
    links = _Links(emitted.append, lambda: state)
    links.look()
    links.look()
    assert emitted == [Noticed(sentence.rstrip("."))]
