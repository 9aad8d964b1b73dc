"""A deployment over three nodes through its whole life, on real programs and a real model."""

import contextlib
import json
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from linkcpp.common.errors import EXIT_NOT_NOW
from linkcpp.common.files import users_mode
from tests.launch.swarm import Swarm, one_process, tokens, wait_until
from tests.support.engines import prebuilt_engine
from tests.support.models import in_hub_cache, llama_parts, smollm2_path, without_text
from tests.support.small_disk import small_disk

pytestmark = pytest.mark.slow

NAME = "smol"


@pytest.fixture(scope="module")
def plan(swarm: Swarm) -> Path:
    return swarm.plan(smollm2_path())


@pytest.fixture(scope="module")
def url(swarm: Swarm, plan: Path) -> Iterator[str]:
    launched = swarm.launch(plan, NAME, "--json")
    state = launched.json
    assert state["phase"] == "ready"
    yield state["api_url"]
    swarm.run("stop", NAME)


@pytest.fixture(scope="module")
def reference(swarm: Swarm) -> list[Any]:
    with one_process(prebuilt_engine(), smollm2_path(), swarm.folder / "one.log") as url:
        return tokens(url)


def test_three_nodes_answer_exactly_as_one_process(url: str, reference: list[Any]) -> None:
    assert tokens(url) == reference


def test_no_other_user_can_read_what_a_deployment_keeps(swarm: Swarm, url: str, plan: Path) -> None:
    assert url
    assert swarm.open_to_others() == []
    # A file that a person named is as readable as the person's umask lets it be.
    assert stat.S_IMODE(plan.stat().st_mode) == users_mode()


def test_the_openai_api_answers(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == httpx.codes.OK
    assert answer.json()["model"] == NAME


def test_all_programs_together_take_no_more_of_this_machine_than_was_planned(
    swarm: Swarm, url: str
) -> None:
    assert len(tokens(url)) > 0
    memory = swarm.status(NAME)["memory"]
    assert 0 < memory["used_bytes"] <= memory["planned_bytes"] <= memory["allowed_bytes"]
    assert " in use, " in swarm.run("status").stdout


def test_status_tells_what_each_node_holds(swarm: Swarm, url: str, plan: Path) -> None:
    report = swarm.status(NAME)
    assert report["condition"] == "running"
    assert report["state"]["api_url"] == url
    planned = json.loads(plan.read_text())["stages"]
    seen = report["state"]["stages"]
    assert [stage["node_id"] for stage in seen] == [stage["node_id"] for stage in planned]
    remote = [stage for stage in seen if not stage["is_coordinator"]]
    assert {stage["node_name"] for stage in remote} == set(swarm.agents)
    for stage in remote:
        assert stage["held_weight_bytes"] == stage["planned_weight_bytes"]
        assert abs(stage["model_buffer_bytes"] - stage["planned_weight_bytes"]) < 6000
        assert bool(stage["kv_buffer_bytes"]) == bool(stage["layer_count"])
        assert stage["carried_bytes"] > stage["planned_weight_bytes"]
        assert stage["rtt_ms"] > 0
        assert stage["resident_bytes"] > stage["planned_weight_bytes"]
    text = swarm.run("status").stdout
    assert all(name in text for name in swarm.agents)


def test_status_tells_speed_and_llama_servers_own_counters(swarm: Swarm, url: str) -> None:
    httpx.post(f"{url}/completion", json={"prompt": "One", "n_predict": 8}, timeout=60)
    wait_until(lambda: swarm.status(NAME)["state"]["tokens_per_second"])
    report = swarm.run("status", NAME, "--metrics", "--json").json
    assert report["metrics"]["tokens_predicted_total"] >= 8


def test_the_rendered_command_lies_in_the_deployments_folder(swarm: Swarm, url: str) -> None:
    folder = swarm.home / "state" / "deployments" / NAME
    words = (folder / "llama-server.args").read_text().splitlines()
    assert words[words.index("--port") + 1] != url.rsplit(":", 1)[1]
    assert words.count("--rpc") == 1


def test_logs_have_every_program_and_can_be_had_of_one_node(swarm: Swarm, url: str) -> None:
    assert url
    sources = {part["source"] for part in swarm.run("logs", NAME, "--json").json}
    assert sources == {
        "supervisor",
        "llama-server",
        "front",
        *(f"rpc-server {name} CPU" for name in swarm.agents),
    }
    attic = swarm.run("logs", NAME, "--node", "attic", "--json").json
    assert [part["source"] for part in attic] == ["rpc-server attic CPU"]
    raw = swarm.run("logs", NAME, "--node", "attic", "--raw").stdout
    assert raw.splitlines() == attic[0]["lines"]
    unknown = swarm.run("logs", NAME, "--node", "nowhere", code=2)
    assert "'nowhere' is not a node of 'smol'" in unknown.stderr


def test_a_deployment_that_runs_is_not_launched_again(swarm: Swarm, url: str, plan: Path) -> None:
    again = swarm.launch(plan, NAME, code=EXIT_NOT_NOW)
    assert "'smol' already runs" in again.stderr
    assert httpx.get(f"{url}/health", timeout=60).status_code == httpx.codes.OK


def test_a_port_that_is_taken_is_one_sentence(swarm: Swarm, url: str, plan: Path) -> None:
    port = url.rsplit(":", 1)[1]
    words = ("launch", str(plan), "--name", "other", "--port", port, "--no-mdns")
    refused = swarm.run(*words, code=EXIT_NOT_NOW)
    assert f"The API cannot listen on 127.0.0.1 port {port}: address already in use" in (
        refused.stderr
    )


def test_a_dry_run_tells_everything_and_does_nothing(swarm: Swarm, plan: Path) -> None:
    words = ("launch", str(plan), "--name", "dry", "--host", "0.0.0.0", "--dry-run")
    shown = swarm.run(*words, "--json").json
    command = shown["command"]
    stages = json.loads(plan.read_text())["stages"]
    remote = [stage for stage in stages if not stage["is_coordinator"]]
    endpoints = command[command.index("--rpc") + 1].split(",")
    assert len(endpoints) == len(remote) == len(shown["servers"])
    assert all("<port of tunnel" in endpoint for endpoint in endpoints)
    assert "--api-key-file" in command
    assert any(file["path"].endswith("api-key") for file in shown["files"])
    text = swarm.run(*words).stdout
    assert "ggml-rpc-server" in text
    assert not (swarm.home / "state" / "deployments" / "dry").exists()


def test_a_systemd_unit_runs_this_launch_in_the_foreground(swarm: Swarm, plan: Path) -> None:
    words = ("launch", str(plan), "--name", "unit", "--systemd-unit")
    unit = swarm.run(*words).stdout
    line = next(line for line in unit.splitlines() if line.startswith("ExecStart="))
    assert str(plan) in line
    assert "--foreground" in line
    assert f"LINKCPP_HOME={swarm.home}" in unit
    # It outlives the login and gets no further rights, like every service of linkcpp.
    assert "enable-linger" in unit
    assert "NoNewPrivileges=yes" in unit


def test_a_plan_for_one_machine_needs_neither_nodes_nor_a_token(
    swarm: Swarm, reference: list[Any], tmp_path: Path
) -> None:
    alone = swarm.plan(smollm2_path(), mode="single")
    words = ("launch", str(alone), "--name", "alone", "--port", "0", "--json")
    state = swarm.run(*words, LINKCPP_TOKEN_FILE=str(tmp_path / "none")).json
    assert [stage["is_coordinator"] for stage in state["stages"]] == [True]
    assert swarm.status("alone")["state"]["tokens_per_second"] is None
    one = httpx.post(
        f"{state['api_url']}/completion", json={"prompt": "One", "n_predict": 1}, timeout=60
    )
    assert one.status_code == httpx.codes.OK
    wait_until(lambda: swarm.status("alone")["state"]["prompt_tokens_per_second"])
    assert swarm.status("alone")["state"]["tokens_per_second"] is None
    assert tokens(state["api_url"]) == reference
    swarm.run("stop", "alone")


def test_a_model_whose_first_tokens_are_no_text_is_served_and_verify_says_nothing_of_experts(
    swarm: Swarm, tmp_path: Path
) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    model, plan = without_text(folder), folder / "p.json"
    words = ("--model", str(model), "--mode", "single", "--context", "256", "--no-mdns")
    told = swarm.run("plan", *words, "-o", str(plan))
    assert f"Start it: linkcpp launch '{plan}'" in told.stdout + told.stderr
    swarm.run("launch", str(plan), "--name", "bytes", "--port", "0")
    model.rename(folder / "away.gguf")
    refused = swarm.run("verify", "bytes", code=2)
    swarm.run("stop", "bytes")
    assert "verifying bytes" in refused.stderr
    assert "expert" not in refused.stderr


def test_a_split_model_is_served_from_a_cache_of_links(swarm: Swarm, tmp_path: Path) -> None:
    links = in_hub_cache(llama_parts(), tmp_path)
    key, link = tmp_path / "key-1", tmp_path / "key"
    key.write_text("of-today\n")
    link.symlink_to(key)
    alone = swarm.plan(links[1], mode="single")
    words = ("launch", str(alone), "--name", "links", "--port", "0", "--api-key-file", str(link))
    state = swarm.run(*words, "--json").json
    command = Path(swarm.home, "state", "deployments", "links", "llama-server.args").read_text()
    assert str(links[0]) in command.split("\n")
    assert state["api_key_file"] == str(link)
    assert httpx.get(f"{state['api_url']}/health", timeout=60).status_code == httpx.codes.OK
    swarm.run("stop", "links")


def test_an_api_beyond_loopback_needs_its_key(swarm: Swarm, plan: Path) -> None:
    state = swarm.launch(plan, "open", "--host", "0.0.0.0", "--json").json
    key_file = Path(state["api_key_file"])
    assert key_file.stat().st_mode & 0o777 == 0o600
    key = key_file.read_text().strip()
    body = {"prompt": "One", "n_predict": 2}
    without = httpx.post(f"{state['api_url']}/completion", json=body, timeout=60)
    assert without.status_code == httpx.codes.UNAUTHORIZED
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(f"{state['api_url']}/completion", json=body, headers=headers, timeout=60)
    assert answer.status_code == httpx.codes.OK
    assert httpx.get(state["chat_url"], timeout=60).status_code == httpx.codes.OK
    everything = [word for process in swarm.processes() for word in process.cmdline()]
    assert not any(key in word for word in everything)
    swarm.run("stop", "open")


def test_llama_servers_own_port_is_for_the_front_alone(swarm: Swarm, url: str) -> None:
    folder = swarm.home / "state" / "deployments" / NAME
    words = (folder / "llama-server.args").read_text().splitlines()
    own = f"http://127.0.0.1:{words[words.index('--port') + 1]}"
    key_file = Path(words[words.index("--api-key-file") + 1])
    assert key_file.stat().st_mode & 0o777 == 0o600
    for method, path in (("POST", "/completion"), ("POST", "/slots/0?action=erase")):
        assert httpx.request(method, f"{own}{path}", json={}, timeout=60).status_code == 401
    body = {"prompt": "One", "n_predict": 1}
    assert httpx.post(f"{url}/completion", json=body, timeout=60).status_code == 200
    everything = [word for process in swarm.processes() for word in process.cmdline()]
    assert key_file.read_text().strip() not in everything


def test_the_chat_page_is_told_and_served(swarm: Swarm, url: str) -> None:
    assert swarm.status(NAME)["state"]["chat_url"] == f"{url}/"
    assert f"{url}/ in a browser" in swarm.run("status", NAME).stdout
    page = httpx.get(f"{url}/", timeout=60)
    assert page.headers["content-type"].startswith("text/html")
    assert "<html" in page.text


def test_a_killed_node_ends_a_stream_with_an_error_and_is_replaced_on_the_same_port(
    swarm: Swarm, url: str, reference: list[Any]
) -> None:
    victim = swarm.agents.pop("garage")
    body = {"prompt": "One", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert "text" in next(lines)
        for process in [*victim.children(), psutil.Process(victim.process.pid)]:
            process.kill()
        events = [line for line in lines if line]
    victim.process.wait()
    assert "data: [DONE]" not in events
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == 502

    def has_recovered() -> bool:
        report = swarm.status(NAME)
        is_up: bool = report["condition"] == "running"
        return is_up and report["state"]["restart_count"] == 1

    wait_until(has_recovered)
    state = swarm.status(NAME)["state"]
    assert state["excluded_nodes"] == ["garage"]
    assert "garage" not in {stage["node_name"] for stage in state["stages"]}
    assert any("garage went away" in notice["text"] for notice in state["notices"])
    assert any("starting again without garage" in notice["text"] for notice in state["notices"])
    assert state["api_url"] == url
    assert tokens(url) == reference


def test_a_deployment_whose_folder_is_removed_ends_and_says_so(swarm: Swarm) -> None:
    alone = swarm.plan(smollm2_path(), mode="single")
    before = {process.pid for process in swarm.processes()}
    swarm.launch(alone, "removed")
    shutil.rmtree(swarm.home / "state" / "deployments" / "removed")
    wait_until(lambda: {process.pid for process in swarm.processes()} <= before)
    report = swarm.status("removed")
    assert report["condition"] == "stopped"
    assert "was removed" in report["state"]["detail"]


def test_a_llama_server_that_dies_on_a_full_disk_is_started_again_when_there_is_room(
    swarm: Swarm,
) -> None:
    alone = swarm.plan(smollm2_path(), mode="single")
    folder = swarm.home / "state" / "deployments" / "full"
    with small_disk(folder, size_mib=1):
        state = swarm.launch(alone, "full", "--json").json
        filler = folder / "filler"
        with contextlib.suppress(OSError):
            filler.write_bytes(bytes(2**20))
        llama_server = psutil.Process(state["llama_server"]["pid"])
        llama_server.kill()
        # For a try that finds no room; of that nothing can be written either.
        time.sleep(5)
        filler.unlink()
        wait_until(lambda: swarm.status("full")["state"]["restart_count"])
        wait_until(lambda: swarm.status("full")["condition"] == "running")
        assert swarm.status("full")["state"]["supervisor"] == state["supervisor"]
        swarm.run("stop", "full")


def test_a_killed_supervisor_leaves_nothing_and_status_says_so(swarm: Swarm, url: str) -> None:
    assert url
    supervisor = psutil.Process(swarm.status(NAME)["state"]["supervisor"]["pid"])
    assert swarm.processes()
    supervisor.kill()
    wait_until(swarm.is_idle)
    report = swarm.status(NAME)
    assert report["condition"] == "crashed"
    assert report["explanation"] == "Its supervisor is gone, and llama-server with it."
    assert "linkcpp stop smol" in report["advice"]


def test_stopping_cleans_up_after_a_crash_and_twice_is_no_harm(swarm: Swarm, url: str) -> None:
    assert url
    first = swarm.run("stop", NAME, "--json").json
    assert first == {NAME: "cleaned_up"}
    second = swarm.run("stop", NAME, "--json").json
    assert second == {NAME: "was_stopped"}
    assert swarm.status(NAME)["condition"] == "stopped"
    assert swarm.run("stop", "--all", "--json").json[NAME] == "was_stopped"


def test_a_plan_whose_node_is_gone_is_refused_by_name(swarm: Swarm, plan: Path) -> None:
    assert "garage" not in swarm.agents
    refused = swarm.launch(plan, "again", code=2)
    assert "The plan needs garage, which cannot be found." in refused.stderr
    wait_until(lambda: not swarm.processes())
