"""What goes wrong for users, and what they are told."""

import json
import secrets
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from linkcpp.common.errors import EXIT_NOT_NOW
from tests.launch.swarm import START_SECONDS, Swarm, wait_until
from tests.support.engines import prebuilt_engine
from tests.support.models import llama, smollm2_path
from tests.support.ports import free_port

pytestmark = pytest.mark.slow

TERABYTE = 10**12


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    swarm = Swarm(tmp_path_factory.mktemp("pair"), prebuilt_engine())
    swarm.start_agents("attic", "cellar")
    yield swarm
    swarm.close()


@pytest.fixture(scope="module")
def plan(pair: Swarm) -> Path:
    return pair.plan(smollm2_path())


@pytest.fixture
def changed(plan: Path, tmp_path: Path) -> Any:
    """Write the plan anew with some of its JSON changed by a function."""

    def change(edit: Any) -> Path:
        content = json.loads(plan.read_text())
        edit(content)
        path = tmp_path / "changed.json"
        path.write_text(json.dumps(content))
        return path

    return change


def _refusal(swarm: Swarm, plan: Path, *options: str, code: int = 2, **variables: str) -> str:
    words = ("launch", str(plan), "--name", "no", "--port", "0", "--no-mdns", *options)
    refused = swarm.run(*words, code=code, **variables)
    assert "Traceback" not in refused.stderr
    assert "hint:" in refused.stderr
    assert not refused.stdout
    wait_until(swarm.is_idle)
    # What was refused before anything ran is not a deployment.
    listed = swarm.run("status", "--all", "--json", code=0)
    assert all(report["name"] != "no" for report in json.loads(listed.stdout))
    return refused.stderr


def test_a_file_that_is_no_plan(pair: Swarm, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{]")
    assert str(path) in _refusal(pair, path)
    assert str(tmp_path / "none.json") in _refusal(pair, tmp_path / "none.json")


def test_a_plan_of_a_later_version(pair: Swarm, changed: Any) -> None:
    path = changed(lambda plan: plan.update(schema_version=99))
    assert "99" in _refusal(pair, path)


def test_a_model_that_is_not_there(pair: Swarm, plan: Path, tmp_path: Path) -> None:
    missing = tmp_path / "gone.gguf"
    told = _refusal(pair, plan, "--model", str(missing), code=EXIT_NOT_NOW)
    assert f"no model file {missing}" in told


def test_another_model_under_the_plans_name(pair: Swarm, plan: Path, tmp_path: Path) -> None:
    swapped = tmp_path / smollm2_path().name
    swapped.write_bytes(llama().read_bytes())
    for way in ((), ("--foreground",)):
        # A service manager starts nothing again that ended with code 2.
        assert "another model" in _refusal(pair, plan, "--model", str(swapped), *way)


def test_a_model_that_was_cut_off(pair: Swarm, plan: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(smollm2_path().read_bytes()[:5_000_000])
    assert str(cut) in _refusal(pair, plan, "--model", str(cut))


def test_a_plan_for_another_coordinator(pair: Swarm, changed: Any) -> None:
    def edit(plan: Any) -> None:
        plan.update(coordinator_id="somebody", coordinator_name="tower")
        for stage in plan["stages"]:
            if stage["is_coordinator"]:
                stage["node_id"] = "somebody"

    assert "coordinator tower" in _refusal(pair, changed(edit))


def test_a_plan_for_another_engine(pair: Swarm, changed: Any) -> None:
    def edit(plan: Any) -> None:
        plan["engine"]["rpc_version"] = {"major": 9, "minor": 0, "patch": 0}

    assert "RPC 9.0.0" in _refusal(pair, changed(edit))


def test_a_token_that_is_not_the_clusters(pair: Swarm, plan: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(secrets.token_urlsafe(32))
    token.chmod(0o600)
    assert "another cluster token" in _refusal(pair, plan, LINKCPP_TOKEN_FILE=str(token))


def test_a_node_that_has_too_little_memory_now(pair: Swarm, changed: Any) -> None:
    def edit(plan: Any) -> None:
        stage = next(stage for stage in plan["stages"] if stage["node_name"] == "cellar")
        stage["memory"] |= {"compute_bytes": TERABYTE, "available_bytes": 2 * TERABYTE}

    told = _refusal(pair, changed(edit))
    assert "cellar has" in told
    assert "and this needs 1.00 TB" in told
    assert "http://" not in told


def test_a_template_that_moves_layers(pair: Swarm, plan: Path, tmp_path: Path) -> None:
    (tmp_path / "llama-server.args.j2").write_text(
        "{{ engine.program }}\n{% for word in placement %}\n{{ word }}\n{% endfor %}\n-ngl\n0\n"
    )
    assert "-ngl, which the plan decides" in _refusal(pair, plan, "--templates", str(tmp_path))


def test_a_folder_that_cannot_be_written(pair: Swarm, plan: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "Cannot" in _refusal(pair, plan, LINKCPP_HOME=str(tmp_path / "file"))


def test_a_key_file_without_a_key(pair: Swarm, plan: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# none yet\n")
    assert "holds no key" in _refusal(pair, plan, "--api-key-file", str(keys))


@pytest.mark.parametrize(
    ("content", "told"), [(None, "no such file or directory."), (b"\xff\n", "is not text.")]
)
def test_a_key_file_that_cannot_be_read_is_told_without_jargon(
    pair: Swarm, plan: Path, tmp_path: Path, content: bytes | None, told: str
) -> None:
    keys = tmp_path / "keys"
    if content is not None:
        keys.write_bytes(content)
    refusal = _refusal(pair, plan, "--api-key-file", str(keys))
    assert told in refusal
    assert "Errno" not in refusal


@pytest.mark.parametrize("host", ["x" * 100, "a..b", ""])
@pytest.mark.parametrize("port", ["0", "8123"])
def test_a_host_that_no_machine_can_have(pair: Swarm, plan: Path, host: str, port: str) -> None:
    told = _refusal(pair, plan, "--host", host, "--port", port)
    assert f"cannot listen on {host!r}: not an address" in told


def test_an_empty_name_is_no_name(pair: Swarm, plan: Path) -> None:
    assert "'' is not a name" in _refusal(pair, plan, "--name", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_in_the_middle_of_a_launch_leaves_nothing(
    pair: Swarm, plan: Path, number: signal.Signals
) -> None:
    state_file = pair.home / "state" / "deployments" / "halfway" / "state.json"
    for _ in range(5):
        state_file.unlink(missing_ok=True)
        launching = pair.start("launch", str(plan), "--name", "halfway", "--port", "0", "--no-mdns")
        wait_until(
            lambda: state_file.exists() and json.loads(state_file.read_text())["llama_server"],
            launching,
        )
        launching.send_signal(number)
        if code := launching.wait(START_SECONDS):
            break
        # It was ready before the signal came.
        pair.run("stop", "halfway")
    assert code == 130
    wait_until(pair.is_idle)
    assert pair.status("halfway")["condition"] == "stopped"


def test_a_node_that_dies_while_the_model_loads_is_done_without(pair: Swarm, plan: Path) -> None:
    pair.start_agents("shed")
    spread = pair.plan(smollm2_path())
    launching = pair.start("launch", str(spread), "--name", "dying", "--port", "0", "--no-mdns")
    state_file = pair.home / "state" / "deployments" / "dying" / "state.json"
    wait_until(
        lambda: state_file.exists() and json.loads(state_file.read_text())["llama_server"],
        launching,
    )
    victim = pair.agents.pop("shed")
    victim.process.kill()
    victim.process.wait()
    assert launching.wait(START_SECONDS) == 0
    # It may have been ready just before.
    wait_until(lambda: pair.status("dying")["state"]["excluded_nodes"] == ["shed"])
    wait_until(lambda: pair.status("dying")["condition"] == "running")
    state = pair.status("dying")["state"]
    assert {stage["node_name"] for stage in state["stages"] if not stage["is_coordinator"]} == {
        "attic",
        "cellar",
    }
    pair.run("stop", "dying")


@pytest.fixture(scope="module")
def attached(pair: Swarm, plan: Path) -> Iterator["tuple[subprocess.Popen[bytes], str]"]:
    """A deployment in the foreground, as a service manager runs it."""
    port = str(free_port())
    words = ("launch", str(plan), "--name", "service", "--port", port, "--no-mdns")
    process = pair.start(*words, "--foreground")
    state_file = pair.home / "state" / "deployments" / "service" / "state.json"
    wait_until(
        lambda: state_file.exists() and json.loads(state_file.read_text())["ready_at"], process
    )
    yield process, f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(START_SECONDS)


def test_a_llama_server_that_dies_alone_is_started_again_on_the_same_plan(
    pair: Swarm, attached: "tuple[subprocess.Popen[bytes], str]"
) -> None:
    before = pair.status("service")["state"]
    psutil.Process(before["llama_server"]["pid"]).kill()
    wait_until(lambda: pair.status("service")["state"]["restart_count"] == 1)
    wait_until(lambda: pair.status("service")["condition"] == "running")
    after = pair.status("service")["state"]
    assert after["excluded_nodes"] == []
    assert [stage["node_id"] for stage in after["stages"]] == [
        stage["node_id"] for stage in before["stages"]
    ]
    assert any("llama-server stopped" in notice["text"] for notice in after["notices"])
    assert httpx.get(f"{attached[1]}/health", timeout=60).status_code == httpx.codes.OK


def test_a_hung_llama_server_is_noticed_and_started_again(
    pair: Swarm, attached: "tuple[subprocess.Popen[bytes], str]"
) -> None:
    before = pair.status("service")["state"]
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = {"prompt": "Hello", "n_predict": 900, "ignore_eos": True}
        answers.append(httpx.post(f"{attached[1]}/completion", json=body, timeout=START_SECONDS))

    asking = threading.Thread(target=ask)
    asking.start()
    engine = psutil.Process(before["llama_server"]["pid"])
    used = engine.cpu_times().user
    wait_until(lambda: engine.cpu_times().user > used)
    engine.suspend()
    wait_until(lambda: pair.status("service")["state"]["restart_count"] > before["restart_count"])
    asking.join()
    # Whoever waited is told, and does not wait for ever.
    assert answers[0].status_code >= httpx.codes.INTERNAL_SERVER_ERROR
    wait_until(lambda: pair.status("service")["condition"] == "running")
    notices = [notice["text"] for notice in pair.status("service")["state"]["notices"]]
    assert any("llama-server stopped (hung: a signal stopped it" in text for text in notices)
    assert httpx.get(f"{attached[1]}/health", timeout=60).status_code == httpx.codes.OK


def _kill_agents(swarm: Swarm) -> None:
    for agent in swarm.agents.values():
        for process in [*agent.children(), psutil.Process(agent.process.pid)]:
            process.kill()
        agent.process.wait()


def test_when_all_nodes_are_gone_it_says_what_is_needed_and_waits_for_them(
    pair: Swarm, attached: "tuple[subprocess.Popen[bytes], str]"
) -> None:
    names = tuple(pair.agents)
    _kill_agents(pair)
    wait_until(
        lambda: "cannot be served" in (pair.status("service")["explanation"] or ""), attached[0]
    )
    report = pair.status("service")
    assert report["condition"] == "starting"
    assert "went away" in report["explanation"]
    assert report["advice"]
    pair.start_agents(*names)
    wait_until(lambda: pair.status("service")["condition"] == "running", attached[0])
    assert httpx.get(f"{attached[1]}/health", timeout=60).status_code == httpx.codes.OK


def test_a_launch_at_boot_waits_for_a_node_that_boots_later(pair: Swarm, plan: Path) -> None:
    names = tuple(pair.agents)
    _kill_agents(pair)
    booting = pair.start(
        *("launch", str(plan), "--name", "boot", "--port", "0", "--no-mdns", "--foreground")
    )
    # Whoever waits for an answer gets one.
    assert "cannot be found" in pair.launch(plan, "asked", code=2).stderr

    def notices() -> list[str]:
        state_file = pair.home / "state" / "deployments" / "boot" / "state.json"
        state = json.loads(state_file.read_text()) if state_file.exists() else {"notices": ()}
        return [notice["text"] for notice in state["notices"]]

    wait_until(lambda: any("cannot be found" in text for text in notices()), booting)
    pair.start_agents(*names)
    wait_until(lambda: pair.status("boot")["condition"] == "running", booting)
    # On the plan that was asked for, and not on what was there first.
    state = pair.status("boot")["state"]
    assert {stage["node_name"] for stage in state["stages"] if not stage["is_coordinator"]} == set(
        names
    )
    # A supervisor that a signal stopped looks after nothing; that is told, and it ends in order.
    booting.send_signal(signal.SIGSTOP)
    wait_until(lambda: "stopped its supervisor" in (pair.status("boot")["explanation"] or ""))
    pair.run("stop", "boot")
    assert booting.wait(START_SECONDS) == 0
