import os
import subprocess
import sys
from pathlib import Path

import pytest

from linkcpp.cli.stop import stop
from linkcpp.common.errors import LinkcppError
from linkcpp.common.processes import ProcessIdentity
from linkcpp.launch.enginelog import Buffer, BufferKind
from linkcpp.launch.events import (
    EngineStarted,
    ForwardOpened,
    Logged,
    NodeFound,
    PhaseEntered,
    PlanAdopted,
    api_url,
    apply,
    first_state,
)
from linkcpp.launch.folder import (
    all_deployments,
    current_deployments,
    deployment_folder,
    existing_deployment,
    name_from_model,
)
from linkcpp.launch.records import DeploymentState, LaunchRequest, Phase
from tests.launch.plans import layers_plan


def _request(name: str = "smol") -> LaunchRequest:
    return LaunchRequest(
        name=name,
        plan=layers_plan("a", "b"),
        model_path="/m.gguf",
        host="127.0.0.1",
        port=8080,
        api_key_file=None,
        templates_folder=None,
    )


def _state(name: str = "smol") -> DeploymentState:
    return first_state(_request(name), now=100.0)


def test_a_name_is_made_from_the_models() -> None:
    assert name_from_model("SmolLM2 135M Instruct (Q4_1)") == "smollm2-135m-instruct-q4_1"
    assert name_from_model("../../etc") == "etc"
    assert name_from_model("模型") == "model"


@pytest.mark.parametrize("name", ["", "..", "a/b", "A", ".hidden", "x" * 64, "-f"])
def test_a_name_that_could_be_a_path_or_an_option_is_refused(name: str) -> None:
    with pytest.raises(LinkcppError, match="is not a name"):
        deployment_folder(name)


def test_request_plan_and_state_load_back_equal() -> None:
    folder = deployment_folder("smol")
    request, state = _request(), _state()
    folder.write_request(request)
    folder.write_plan(request.plan)
    folder.write_state(state)
    assert folder.read_request() == request
    assert folder.read_plan() == request.plan
    assert folder.read_state() == state


def test_the_only_deployment_needs_no_name_and_several_do() -> None:
    with pytest.raises(LinkcppError, match="There is no deployment"):
        existing_deployment(None)
    deployment_folder("one").write_state(_state("one"))
    assert existing_deployment(None).name == "one"
    deployment_folder("two").write_state(_state("two"))
    with pytest.raises(LinkcppError, match="Several deployments are live"):
        existing_deployment(None)
    with pytest.raises(LinkcppError, match="There is no deployment 'three'"):
        existing_deployment("three")


def test_deployments_that_have_ended_do_not_get_in_the_way_of_live_ones() -> None:
    ended = apply(_state("old"), PhaseEntered(Phase.FAILED, "x"), now=200.0)
    deployment_folder("old").write_state(ended)
    assert existing_deployment(None).name == "old"
    deployment_folder("live").write_state(_state("live"))
    assert existing_deployment(None).name == "live"
    assert existing_deployment("old").name == "old"
    deployment_folder("live").write_state(
        apply(_state("live"), PhaseEntered(Phase.STOPPED), now=300.0)
    )
    os.utime(deployment_folder("old").state_file, (1.0, 1.0))
    assert [folder.name for folder in current_deployments()] == ["live"]


def test_a_forgotten_deployment_is_on_no_list_and_keeps_its_logs() -> None:
    folder = deployment_folder("gone")
    folder.write_state(_state("gone"))
    folder.supervisor_log.write_text("x")
    folder.forget()
    assert all_deployments() == []
    assert folder.supervisor_log.read_text() == "x"


def test_a_deployment_that_never_loaded_a_model_can_be_told() -> None:
    state = apply(_state(), PhaseEntered(Phase.CHECKING), now=101.0)
    assert not apply(state, PhaseEntered(Phase.FAILED, "x"), now=102.0).has_loaded
    loading = apply(state, EngineStarted(ProcessIdentity(pid=1, start=1)), now=102.0)
    assert apply(loading, PhaseEntered(Phase.FAILED, "x"), now=103.0).has_loaded


def test_a_state_of_another_version_is_refused_by_name() -> None:
    folder = deployment_folder("smol")
    folder.path.mkdir(parents=True)
    folder.state_file.write_text('{"schema_version": 99}')
    with pytest.raises(LinkcppError, match="another version of linkcpp"):
        folder.read_state()


def test_a_second_supervisor_is_refused_while_one_lives() -> None:
    folder = deployment_folder("smol")
    with folder.lock():
        assert folder.has_supervisor()
        with pytest.raises(LinkcppError, match="already runs"), folder.lock():
            pass
    assert not folder.has_supervisor()


def test_the_lock_goes_with_a_killed_supervisor() -> None:
    folder = deployment_folder("smol")
    code = (
        "import sys, time\n"
        "from linkcpp.launch.folder import deployment_folder\n"
        "with deployment_folder('smol').lock():\n"
        "    print('held', flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert folder.has_supervisor()
        process.kill()
    assert not folder.has_supervisor()


def test_an_unwritable_folder_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LINKCPP_HOME", str(tmp_path / "file"))
    with pytest.raises(LinkcppError, match="Cannot"), deployment_folder("smol").lock():
        pass


def test_a_buffer_is_counted_for_the_stage_whose_endpoint_it_names() -> None:
    state = apply(_state(), ForwardOpened(2, "127.0.0.1:4002"), now=101.0)
    buffer = Buffer("RPC0", "127.0.0.1:4002", BufferKind.KV, 500)
    state = apply(state, Logged(buffer), now=102.0)
    state = apply(state, Logged(buffer), now=103.0)
    assert [stage.kv_buffer_bytes for stage in state.stages] == [None, None, 1000]
    assert state.updated_at == 103.0


def test_a_found_node_is_told_in_all_its_stages_and_a_new_plan_forgets_it() -> None:
    state = apply(_state(), NodeFound("b", "http://b:1", 0.5), now=1.0)
    assert [stage.url for stage in state.stages] == [None, None, "http://b:1"]
    state = apply(state, PlanAdopted(layers_plan("b"), ("node a",)), now=2.0)
    assert [stage.url for stage in state.stages] == [None, None]
    assert state.excluded_nodes == ("node a",)


def test_being_ready_has_a_time_and_leaving_it_has_none() -> None:
    state = apply(_state(), PhaseEntered(Phase.READY), now=5.0)
    assert state.ready_at == 5.0
    state = apply(state, PhaseEntered(Phase.RECOVERING, "node b went away"), now=6.0)
    assert state.ready_at is None
    assert state.notices[-1].text == "node b went away"


def test_the_api_of_a_wildcard_address_is_reached_by_loopback() -> None:
    assert api_url("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert api_url("::", 80) == "http://[::1]:80"
    assert api_url("10.0.0.7", 80) == "http://10.0.0.7:80"


def test_stop_all_stops_the_others_where_the_state_of_one_is_damaged() -> None:
    broken, crashed = deployment_folder("broken"), deployment_folder("crashed")
    broken.path.mkdir(parents=True)
    crashed.path.mkdir(parents=True)
    crashed.write_state(_state("crashed"))
    broken.state_file.write_text("{")
    stop(every=True)
    assert crashed.read_state().phase is Phase.STOPPED
    assert [folder.name for folder in all_deployments()] == ["crashed"]
