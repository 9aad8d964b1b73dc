from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from linkcpp.cli.logs import logs
from linkcpp.cli.status import status_view
from linkcpp.cluster.records import (
    Cluster,
    DiscoveredNode,
    NodeDevice,
    NodeId,
    NodeRecord,
    NodeStatus,
)
from linkcpp.common.processes import ProcessIdentity
from linkcpp.launch.attempt import memory_to_ask_for
from linkcpp.launch.events import (
    EngineStarted,
    NodeFound,
    PhaseEntered,
    apply,
    first_state,
)
from linkcpp.launch.finding import FoundNode
from linkcpp.launch.folder import DeploymentFolder
from linkcpp.launch.logs import added_lines, tail_of
from linkcpp.launch.progress import bars_of
from linkcpp.launch.records import DeploymentState, LaunchRequest, Phase
from linkcpp.launch.status import Condition, judge
from linkcpp.launch.surroundings import remaining_cluster
from linkcpp.link.choosing import Path as EdgePath
from linkcpp.link.choosing import PathKind
from tests.launch.plans import FINGERPRINT, MEGABYTE, layers_plan

PLAN = layers_plan("a", "b")


def _state(phase: Phase, detail: str | None = None) -> DeploymentState:
    request = LaunchRequest(
        name="smol",
        plan=PLAN,
        model_path="/m.gguf",
        host="127.0.0.1",
        port=8080,
        api_key_file=None,
        templates_folder=None,
    )
    state = apply(
        first_state(request, now=1000.0),
        EngineStarted(ProcessIdentity(pid=7, start=1000)),
        now=1001.0,
    )
    return apply(state, PhaseEntered(phase, detail), now=1002.0)


def _node(node_id: str, *, offered: int = 4000 * MEGABYTE) -> NodeRecord:
    device = NodeDevice(
        name="CPU",
        description="a CPU",
        is_cpu=True,
        total_bytes=8000 * MEGABYTE,
        free_bytes=8000 * MEGABYTE,
        offered_bytes=offered,
        read_bytes_per_second=1e10,
    )
    return NodeRecord(
        node_id=NodeId(node_id),
        name=f"node {node_id}",
        agent_version="0",
        platform="Linux",
        core_count=2,
        memory_limit_bytes=None,
        devices=(device,),
        engine=FINGERPRINT,
        engine_problem=None,
    )


def _found(node_id: str, status: NodeStatus = NodeStatus.READY) -> DiscoveredNode:
    return DiscoveredNode(
        name=node_id,
        urls=(f"http://{node_id}:1",),
        found_by="test",
        status=status,
        reason=None,
        record=_node(node_id),
        link=None,
    )


def test_a_ready_deployment_with_its_supervisor_runs_and_has_an_uptime() -> None:
    state = _state(Phase.READY)
    report = judge(
        state, has_supervisor=True, was_restarted=False, engine_is_alive=True, now=1012.0
    )
    assert report.condition is Condition.RUNNING
    assert report.uptime_seconds == 10.0


def test_an_uptime_is_not_negative_after_the_clock_was_set_back() -> None:
    report = judge(
        _state(Phase.READY), has_supervisor=True, was_restarted=False, engine_is_alive=True, now=5.0
    )
    assert report.uptime_seconds == 0.0


def test_without_its_supervisor_nothing_is_believed() -> None:
    for phase in (Phase.READY, Phase.LOADING, Phase.STOPPING):
        state = _state(phase)
        gone = judge(
            state, has_supervisor=False, was_restarted=False, engine_is_alive=False, now=2000.0
        )
        assert gone.condition is Condition.CRASHED
        assert gone.uptime_seconds is None
        assert gone.advice is not None
        assert "linkcpp stop smol" in gone.advice


def test_people_see_a_gateways_name_and_programs_its_id_too() -> None:
    gateway_id = "3d9b3a1e-0f0c-4f6b-8a51-6b3c9d1c2f10"
    way = f"{EdgePath(PathKind.RELAY, gateway_id, 'south')}: it answered first"
    state = apply(_state(Phase.READY), NodeFound(NodeId("a"), "http://a:1", 1.0, way), now=1003.0)
    report = judge(
        state, has_supervisor=True, was_restarted=False, engine_is_alive=True, now=1012.0
    )
    with (screen := Console(width=80)).capture() as shown:
        screen.print(status_view([report]))
    assert "a: relay through south: it answered first" in shown.get()
    assert gateway_id not in shown.get()
    assert gateway_id in report.model_dump_json()


def test_a_restart_of_the_machine_is_told_apart_from_a_crash() -> None:
    state = _state(Phase.READY)
    report = judge(
        state, has_supervisor=False, was_restarted=True, engine_is_alive=False, now=2000.0
    )
    assert report.explanation == "This machine was restarted since; nothing of it runs any more."


def test_a_llama_server_that_outlived_its_supervisor_is_told() -> None:
    state = _state(Phase.READY)
    report = judge(
        state, has_supervisor=False, was_restarted=False, engine_is_alive=True, now=2000.0
    )
    assert report.explanation == "Its supervisor is gone; llama-server still runs, unwatched."


def test_a_failed_or_stopped_deployment_needs_no_supervisor() -> None:
    failed = judge(
        _state(Phase.FAILED, "b went away."),
        has_supervisor=False,
        was_restarted=False,
        engine_is_alive=False,
        now=2000.0,
    )
    assert (failed.condition, failed.explanation) == (Condition.FAILED, "b went away.")
    stopped = judge(
        _state(Phase.STOPPED),
        has_supervisor=False,
        was_restarted=False,
        engine_is_alive=False,
        now=2000.0,
    )
    assert stopped.condition is Condition.STOPPED


def test_the_same_bars_stand_there_from_the_beginning_to_the_end() -> None:
    beginning = _state(Phase.CHECKING)
    found = apply(beginning, NodeFound("b", "http://b:1", 0.5), now=1003.0)
    ready = apply(found, PhaseEntered(Phase.READY), now=1004.0)
    labels = [bar.label for bar in bars_of(beginning)]
    assert labels == [bar.label for bar in bars_of(ready)]
    assert not any(bar.is_complete for bar in bars_of(beginning))
    nodes = next(bar for bar in bars_of(found) if bar.label == "nodes found")
    assert (nodes.done, nodes.total) == (1, 2)
    weights = [bar for bar in bars_of(ready) if bar.is_bytes]
    assert [bar.total for bar in weights] == [50 * MEGABYTE, 50 * MEGABYTE]
    assert all(bar.is_complete for bar in weights)


def test_a_new_plan_uses_only_nodes_of_the_first_one_that_answer() -> None:
    cluster = Cluster(
        coordinator=_node("self", offered=9000 * MEGABYTE),
        nodes=(_found("a"), _found("b", NodeStatus.WRONG_TOKEN), _found("stranger")),
    )
    remaining = remaining_cluster(PLAN, cluster, excluded=())
    assert [node.name for node in remaining.nodes] == ["a"]
    assert remaining_cluster(PLAN, cluster, excluded=[NodeId("a")]).nodes == ()


def test_a_new_plan_takes_no_more_of_the_coordinator_than_the_first_was_offered() -> None:
    cluster = Cluster(coordinator=_node("self", offered=9000 * MEGABYTE), nodes=())
    remaining = remaining_cluster(PLAN, cluster, excluded=())
    assert remaining.coordinator.devices[0].offered_bytes == 4000 * MEGABYTE


def test_a_node_is_asked_for_its_reserve_only_where_it_still_has_it() -> None:
    stage = PLAN.stages[1]
    needed = stage.memory.used_bytes
    for offered, expected in (
        (needed + 1000 * MEGABYTE, needed + stage.memory.reserve_bytes),
        (needed + MEGABYTE, needed + MEGABYTE),
        (needed - MEGABYTE, needed),
    ):
        client: Any = None  # nothing is asked of the node
        node = FoundNode(client, _node("a", offered=offered), "http://a:1", 0.1)
        assert memory_to_ask_for(stage, node) == expected


def test_only_new_lines_of_a_log_are_shown() -> None:
    assert added_lines(("1", "2"), ("1", "2", "3")) == ("3",)
    assert added_lines(("1", "2"), ("2", "3", "4")) == ("3", "4")
    assert added_lines((), ("1",)) == ("1",)
    assert added_lines(("1",), ("7", "8")) == ("7", "8")
    assert added_lines(("1", "2"), ("1", "2")) == ()


def test_the_tail_of_a_log_needs_no_log(tmp_path: Path) -> None:
    assert tail_of(tmp_path / "none", 10) == ()
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(1000)))
    assert tail_of(log, 2) == ("line 998", "line 999")
    assert tail_of(log, 0) == ()
    log.write_bytes("one\u2028line\x0c\x85\n\nlast, without an end".encode())
    assert tail_of(log, 9) == ("one\u2028line\x0c\x85", "", "last, without an end")


def test_a_log_is_shown_without_what_controls_the_terminal_or_raw_as_it_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    monkeypatch.setenv("LINKCPP_HOME", str(tmp_path))
    folder = DeploymentFolder(tmp_path / "state" / "deployments" / "demo")
    folder.path.mkdir(parents=True)
    folder.write_state(_state(Phase.STOPPED))
    hostile = "\x1b[31mred\u202e\u2028end"
    folder.supervisor_log.write_text(f"{hostile}\nlast\n")
    logs(name="demo")
    shown = "supervisor | ?[31mred??end\nsupervisor | last\n".replace("?", "\ufffd")
    assert capsysbinary.readouterr().out.decode().startswith(shown)
    logs(name="demo", raw=True)
    assert capsysbinary.readouterr().out.decode().startswith(f"{hostile}\nlast\n")
