from dataclasses import replace
from itertools import pairwise

from linkcpp.cluster.records import NodeId
from linkcpp.launch.decisions import (
    FIRST_TRIES,
    LINK_MEMORY_SECONDS,
    MAX_PAUSE_SECONDS,
    Failure,
    GiveUp,
    History,
    Observed,
    StartAgain,
    Step,
    next_step,
    recover,
    unproved_stages,
)
from linkcpp.launch.events import first_state
from linkcpp.launch.records import LaunchRequest, StageState
from tests.launch.plans import MEGABYTE, layers_plan

A, B = NodeId("a"), NodeId("b")
PLAN = layers_plan("a", "b")
ALL_DONE = Observed(
    model_is_right=True,
    engine_is_right=True,
    found_nodes=frozenset({A, B}),
    served_stages=frozenset({1, 2}),
    forwarded_stages=frozenset({1, 2}),
    engine_runs=True,
    engine_is_healthy=True,
    split_is_proved=True,
    has_answered=True,
)


def _stages(*witnesses: tuple[int, int]) -> list[StageState]:
    request = LaunchRequest(
        name="x",
        plan=PLAN,
        model_path="/m.gguf",
        host="127.0.0.1",
        port=8080,
        api_key_file=None,
        templates_folder=None,
    )
    stages = first_state(request, now=0).stages
    held = [(None, None), *witnesses]
    return [
        stage.model_copy(update={"held_weight_bytes": agent, "model_buffer_bytes": log})
        for stage, (agent, log) in zip(stages, held, strict=True)
    ]


def test_nothing_starts_before_model_and_engine_are_checked() -> None:
    assert next_step(PLAN, Observed()) is Step.CHECK_MODEL
    assert next_step(PLAN, Observed(model_is_right=True)) is Step.CHECK_ENGINE


def test_one_missing_piece_is_done_before_everything_behind_it() -> None:
    assert next_step(PLAN, ALL_DONE) is Step.SERVE
    for missing, step in (
        ({"found_nodes": frozenset({A})}, Step.FIND_NODES),
        ({"served_stages": frozenset({1})}, Step.START_SERVERS),
        ({"forwarded_stages": frozenset({2})}, Step.OPEN_FORWARDS),
        ({"engine_runs": False}, Step.START_ENGINE),
        ({"engine_is_healthy": False}, Step.AWAIT_ENGINE),
        ({"split_is_proved": False}, Step.PROVE_SPLIT),
        ({"has_answered": False}, Step.ASK),
    ):
        assert next_step(PLAN, replace(ALL_DONE, **missing)) is step


def test_a_plan_for_one_machine_needs_no_node() -> None:
    checked = Observed(model_is_right=True, engine_is_right=True)
    assert next_step(layers_plan(), checked) is Step.START_ENGINE


def test_a_lost_node_is_dropped_and_named() -> None:
    failure = Failure(1.0, "node b went away", lost_nodes=frozenset({B}))
    recovery = recover(PLAN, History(), failure)
    assert isinstance(recovery.action, StartAgain)
    assert recovery.action.needs_new_plan
    assert recovery.action.sentence == "node b went away; starting again without node b"
    assert recovery.history.excluded == {B}


def test_a_crash_of_llama_server_alone_keeps_the_plan() -> None:
    recovery = recover(PLAN, History(), Failure(1.0, "llama-server stopped"))
    assert isinstance(recovery.action, StartAgain)
    assert not recovery.action.needs_new_plan


def test_a_link_may_break_once_but_not_twice() -> None:
    broken = Failure(1.0, "the link to node a broke", broken_links=frozenset({A}))
    first = recover(PLAN, History(), broken)
    assert isinstance(first.action, StartAgain)
    assert not first.action.needs_new_plan
    second = recover(PLAN, first.history, replace(broken, at_seconds=60.0))
    assert isinstance(second.action, StartAgain)
    assert second.action.needs_new_plan
    assert second.history.excluded == {A}


def _pauses(*failures: Failure) -> list[float]:
    """Return how long it is waited after each of several failures in a row."""
    history, pauses = History(), []
    for failure in failures:
        recovery = recover(PLAN, history, failure)
        assert isinstance(recovery.action, StartAgain)
        pauses.append(recovery.action.pause_seconds)
        history = recovery.history
    return pauses


def test_what_has_served_is_started_again_for_ever_and_ever_more_seldom() -> None:
    pauses = _pauses(*(Failure(float(number), "llama-server stopped") for number in range(3000)))
    assert all(earlier <= later for earlier, later in pairwise(pauses))
    assert pauses[0] < pauses[1]
    assert pauses[-1] == MAX_PAUSE_SECONDS


def test_failures_that_healed_do_not_count() -> None:
    healed = [
        Failure(number * 100.0, "llama-server stopped", served_seconds=90.0) for number in range(20)
    ]
    assert set(_pauses(*healed)) == set(_pauses(healed[0]))


def test_a_long_pause_is_told() -> None:
    failure = Failure(1.0, "The plan needs node a, which cannot be found.")
    recovery = recover(PLAN, History(unhealed_count=50), failure)
    assert isinstance(recovery.action, StartAgain)
    assert recovery.action.sentence == (
        f"The plan needs node a, which cannot be found; starting again in {MAX_PAUSE_SECONDS:.0f} s"
    )


def test_a_first_launch_whose_user_waits_is_not_tried_for_ever() -> None:
    history = History()
    for number in range(FIRST_TRIES):
        failure = Failure(number * 1000.0, f"trouble {'x' * number}", keeps_trying=False)
        recovery = recover(PLAN, history, failure)
        history = recovery.history
    assert isinstance(recovery.action, GiveUp)
    assert history.unhealed_count == FIRST_TRIES


def test_broken_links_of_long_ago_are_forgotten_but_a_dropped_node_stays_dropped() -> None:
    old = tuple(Failure(0.0, "x", broken_links=frozenset({B})) for _ in range(5))
    later = Failure(LINK_MEMORY_SECONDS + 1, "a link broke", broken_links=frozenset({B}))
    recovery = recover(PLAN, History(old, frozenset({A})), later)
    assert isinstance(recovery.action, StartAgain)
    assert recovery.history.failures == (later,)
    assert recovery.history.excluded == {A}


def test_what_a_restart_cannot_mend_is_not_tried_again() -> None:
    failure = Failure(1.0, "the model file changed", hint="make a new plan", is_final=True)
    recovery = recover(PLAN, History(), failure)
    assert recovery.action == GiveUp("the model file changed", "make a new plan")


def test_planned_bytes_on_every_node_are_a_proof() -> None:
    held = 50 * MEGABYTE
    assert unproved_stages(PLAN, _stages((held, held), (held, held + 5000))) == []


def test_a_silent_fall_back_to_the_coordinator_names_the_node() -> None:
    held = 50 * MEGABYTE
    assert unproved_stages(PLAN, _stages((held, held), (0, 0))) == [
        "node b holds 0 B on CPU instead of 50.0 MB"
    ]


def test_an_agent_that_disagrees_with_the_log_is_no_proof() -> None:
    held = 50 * MEGABYTE
    problems = unproved_stages(PLAN, _stages((held - 10 * MEGABYTE, held), (held, held)))
    assert problems == ["node a holds 40.0 MB on CPU instead of 50.0 MB"]


def test_a_node_that_holds_more_than_planned_is_told() -> None:
    held = 50 * MEGABYTE
    problems = unproved_stages(PLAN, _stages((held, held), (2 * held, 2 * held)))
    assert problems == ["node b holds 100 MB on CPU instead of 50.0 MB"]


def test_a_first_launch_that_fails_twice_in_the_same_way_is_not_tried_again() -> None:
    refused = Failure(
        1.0,
        "unable to allocate RPC0[127.0.0.1:4001] buffer",
        broken_links=frozenset({A}),
        keeps_trying=False,
    )
    first = recover(PLAN, History(), refused)
    assert isinstance(first.action, StartAgain)
    alike = replace(refused, reason="unable to allocate RPC0[127.0.0.1:4207] buffer")
    second = recover(PLAN, first.history, alike)
    assert isinstance(second.action, GiveUp)
    assert "the same again" in second.action.reason
    other = recover(PLAN, first.history, replace(refused, reason="llama-server stopped"))
    assert isinstance(other.action, StartAgain)
    patient = recover(PLAN, first.history, replace(alike, keeps_trying=True))
    assert isinstance(patient.action, StartAgain)


def test_a_first_launch_that_loses_two_nodes_goes_on_without_them() -> None:
    lost = Failure(1.0, "node 1 went away", lost_nodes=frozenset({A}), keeps_trying=False)
    first = recover(PLAN, History(), lost)
    again = replace(lost, reason="node 2 went away", lost_nodes=frozenset({B}))
    assert isinstance(recover(PLAN, first.history, again).action, StartAgain)
