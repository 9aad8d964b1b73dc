"""Distributions of the next token against each other."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linkcpp.dispatch.checks import RowCheck
from linkcpp.dispatch.control import WorkerStatus
from linkcpp.launch.experts.records import ExpertsState, WorkerPhase
from linkcpp.verify.records import WorkerReport
from linkcpp.verify.rows import report_of
from linkcpp.verify.run import absence_note
from linkcpp.verify.statistics import (
    MAX_MEAN_DIVERGENCE,
    Position,
    compare,
    divergence,
    same_beginning,
    summarize,
    summary_of,
    verdict_of,
)
from linkcpp.worker.agreement import Agreement, Verdict
from tests.launch.test_experts_events import worker as share

LOGITS = st.lists(st.floats(-20, 20), min_size=2, max_size=30)


def distribution(logits: list[float]) -> dict[int, float]:
    top = max(logits)
    total = top + math.log(sum(math.exp(logit - top) for logit in logits))
    return {token: logit - total for token, logit in enumerate(logits)}


def position(logits: list[float], keep: int = 64) -> Position:
    ranked = sorted(distribution(logits).items(), key=lambda entry: -entry[1])
    return Position(ranked[0][0], tuple(ranked[:keep]))


def true_divergence(one: dict[int, float], other: dict[int, float]) -> float:
    return sum(math.exp(one[token]) * (one[token] - other[token]) for token in one)


@given(LOGITS)
def test_a_run_against_itself_is_exact(logits: list[float]) -> None:
    found = compare(position(logits), position(logits))
    assert found.is_equal and found.is_same_top1
    assert (found.top8_share, found.difference) == (1.0, 0.0)
    assert found.divergence == pytest.approx(0, abs=1e-9)
    assert summarize([found], 1).verdict == Verdict.EXACT


@given(st.data(), LOGITS)
def test_the_divergence_is_never_more_than_the_true_one(
    data: st.DataObject, logits: list[float]
) -> None:
    size = len(logits)
    others = data.draw(st.lists(st.floats(-20, 20), min_size=size, max_size=size))
    keep = data.draw(st.integers(1, size))
    one, other = distribution(logits), distribution(others)
    part = {token: one[token] for token, _ in position(logits, keep).best}
    rest = {token: other[token] for token, _ in position(others, keep).best}
    found = divergence(part, rest)
    assert 0 <= found <= true_divergence(one, other) + 1e-5


def test_with_all_tokens_told_the_divergence_is_the_true_one() -> None:
    one, other = distribution([1.0, 2.0, 3.0]), distribution([1.5, 2.0, 2.5])
    assert divergence(one, other) == pytest.approx(true_divergence(one, other), rel=1e-4)


def test_runs_are_compared_up_to_where_their_texts_part() -> None:
    a, b, c = (Position(token, ((token, -0.1),)) for token in (1, 2, 3))
    assert same_beginning([a, b, c], [a, b, c]) == 3
    assert same_beginning([a, b, c], [a, c, c]) == 2
    assert same_beginning([b], [a, b]) == 1
    assert same_beginning([], [a]) == 0


def noisy(noise: float, count: int = 200) -> list[tuple[Position, Position]]:
    pairs = []
    for number in range(count):
        logits = [math.sin(number * (k + 1)) * 4 for k in range(20)]
        moved = [logit + noise * math.cos(3 * k + number) for k, logit in enumerate(logits)]
        pairs.append((position(moved), position(logits)))
    return pairs


@pytest.mark.parametrize(
    ("noise", "verdict"),
    [(0.0, Verdict.EXACT), (1e-4, Verdict.EQUIVALENT), (2.0, Verdict.DIFFERS)],
)
def test_small_noise_is_equivalent_and_large_noise_differs(noise: float, verdict: Verdict) -> None:
    found = summarize([compare(*pair) for pair in noisy(noise)], 1)
    assert found.verdict == verdict
    assert (found.equal_count == found.position_count) == (verdict == Verdict.EXACT)
    if verdict == Verdict.EQUIVALENT:
        assert 0 < found.largest_difference < 3e-4
        assert found.mean_divergence < MAX_MEAN_DIVERGENCE


def test_one_wrong_position_among_a_thousand_differs() -> None:
    pairs = noisy(0.0, 1000)
    wrong = position([0.0] * 19 + [9.0]), position([9.0] + [0.0] * 19)
    found = summarize([compare(*pair) for pair in [*pairs, wrong]], 1)
    assert found.mean_divergence > 0
    assert found.verdict == Verdict.DIFFERS


def test_tokens_that_no_run_shares_differ_without_an_error() -> None:
    found = compare(Position(1, ((1, -0.1),)), Position(2, ((2, -0.1),)))
    assert found.difference == math.inf
    assert found.top8_share == 0
    assert summarize([found], 1).verdict == Verdict.DIFFERS


def agreement(verdict: Verdict) -> Agreement:
    return Agreement(
        verdict=verdict,
        row_count=4,
        least_cosine=0.99995,
        largest_difference=0.1,
        relative_error=0.01,
    )


def worker(verdict: Verdict | None, state: str = "up", detail: str = "") -> WorkerReport:
    found = agreement(verdict) if verdict else None
    complaint = "its rows are wrong" if verdict == Verdict.DIFFERS else None
    against = "the model" if verdict else "nobody"
    check = RowCheck(layer=0, experts=(1,), against=against, agreement=found, complaint=complaint)
    status = WorkerStatus(
        name="w",
        state=state,
        detail=detail,
        segments=(),
        pair_count=0,
        request_count=0,
        sent_bytes=0,
        received_bytes=0,
        failure_count=0,
        mean_wait_ms=0,
        mean_compute_ms=0,
    )
    return report_of(status, [check], detail or complaint)


def test_the_verdict_is_the_worst_and_names_who_is_wrong() -> None:
    good, close, wrong = map(worker, Verdict)
    exact = summarize([compare(position([1, 2]), position([1, 2]))], 1)
    assert verdict_of(exact, [good]) == Verdict.EXACT
    assert verdict_of(exact, [good, close]) == Verdict.EQUIVALENT
    assert verdict_of(exact, [good, wrong]) == Verdict.DIFFERS
    assert verdict_of(None, [worker(None)]) is None
    assert verdict_of(None, [worker(None), good]) == Verdict.EXACT
    assert summary_of(Verdict.EXACT, exact, [good]) == "exact: difference 0"
    workers_only = "workers agree: difference 0; the text was not compared"
    assert summary_of(Verdict.EXACT, None, [good, good]) == workers_only
    assert summary_of(Verdict.EXACT, None, [good, worker(None)]) == f"1 of 2 {workers_only}"
    assert summary_of(Verdict.EQUIVALENT, None, [close]).startswith("workers agree: within a cos")
    assert "cosine of 0.999950" in summary_of(Verdict.EQUIVALENT, exact, [close])
    assert summary_of(Verdict.DIFFERS, exact, [good, wrong]) == "differs: the rows of w"


def test_a_worker_without_a_reference_is_unchecked() -> None:
    found = worker(None)
    assert found.verdict is None
    assert found.against == ()


def test_nodes_whose_worker_is_away_are_named_as_unchecked() -> None:
    up = share(0, "attic", (0, 3), phase=WorkerPhase.UP)
    away = share(1, "cellar", (4, 7), phase=WorkerPhase.AWAY)
    assert absence_note(ExpertsState(workers=(up,))) is None
    assert absence_note(ExpertsState(workers=(up, away))) == (
        "No rows of cellar were checked: no worker is up there."
    )
