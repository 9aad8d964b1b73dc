"""When a program counts as hung, and what does not make it so."""

from linkcpp.engine.liveness import (
    MAX_GAP_SECONDS,
    SILENT_SECONDS,
    STOPPED_SECONDS,
    Liveness,
    LivenessSample,
    judge,
)

LOOK_SECONDS = 2.0


def _samples(
    seconds: float,
    *,
    since: float = 0.0,
    cpu_share: float = 0.0,
    is_stopped: bool = False,
    is_silent: bool = False,
) -> list[LivenessSample]:
    count = int(seconds / LOOK_SECONDS) + 1
    times = [since + LOOK_SECONDS * number for number in range(count)]
    return [LivenessSample(at, cpu_share * at, is_stopped, is_silent) for at in times]


def test_a_program_that_answers_is_fine_whatever_it_computes() -> None:
    assert judge(_samples(3600, cpu_share=2.0)).liveness is Liveness.FINE
    assert judge(_samples(3600)).liveness is Liveness.FINE
    assert judge([]).liveness is Liveness.FINE


def test_a_stopped_program_is_suspect_first_and_hung_soon() -> None:
    well = _samples(60)
    assert judge(well + _samples(2, since=62, is_stopped=True)).liveness is Liveness.SUSPECT
    verdict = judge(well + _samples(STOPPED_SECONDS, since=62, is_stopped=True))
    assert verdict.liveness is Liveness.HUNG
    assert verdict.reason == "a signal stopped it 10 s ago"


def test_a_program_that_goes_on_is_fine_again() -> None:
    stopped = _samples(STOPPED_SECONDS, is_stopped=True)
    assert judge(stopped + _samples(2, since=20)).liveness is Liveness.FINE


def test_a_silent_program_that_computes_is_busy_and_not_hung() -> None:
    assert judge(_samples(3600, cpu_share=0.5, is_silent=True)).liveness is Liveness.SUSPECT


def test_a_silent_program_that_does_nothing_is_hung_after_a_while() -> None:
    assert judge(_samples(SILENT_SECONDS / 2, is_silent=True)).liveness is Liveness.SUSPECT
    verdict = judge(_samples(SILENT_SECONDS, is_silent=True))
    assert verdict.liveness is Liveness.HUNG
    assert "neither answered nor computed" in verdict.reason


def test_a_machine_that_slept_makes_no_program_a_hung_one() -> None:
    woken = MAX_GAP_SECONDS + 3600
    for what in ({"is_stopped": True}, {"is_silent": True}):
        before = _samples(STOPPED_SECONDS / 2, **what)
        assert judge([*before, *_samples(2, since=woken, **what)]).liveness is Liveness.SUSPECT
        assert judge([*before, *_samples(2, since=woken)]).liveness is Liveness.FINE
