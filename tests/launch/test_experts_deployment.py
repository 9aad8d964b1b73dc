"""Mode experts over three nodes through its whole life: real agents, real programs."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.launch.expert_plans import HERE, experts_plan
from tests.launch.experts import COUNT, NAME, Experts, launched
from tests.launch.swarm import tokens, wait_until
from tests.support.engines import prebuilt_engine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Experts]:
    experts = Experts(tmp_path_factory.mktemp("experts"), prebuilt_engine())
    experts.swarm.environment["LINKCPP_LOG_FORMAT"] = "json"
    experts.swarm.start_agents("attic", "cellar", "garage")
    yield experts
    experts.swarm.close()


@pytest.fixture(scope="module")
def url(experts: Experts) -> Iterator[str]:
    """Every expert has two holders, and this machine a share of its own."""
    held = {"attic": [(0, 7)], "cellar": [(4, 15)], "garage": [(8, 11)], HERE: [(0, 3), (12, 15)]}
    plan = experts_plan(experts.swarm, experts.model, held)
    with launched(experts, plan, "--fallback-memory", "0", "--spot-checks", "50%") as url:
        yield url


def test_workers_on_nodes_and_here_answer_exactly_as_one_process(
    experts: Experts, url: str
) -> None:
    assert tokens(url, count=COUNT) == experts.reference


def test_status_tells_what_every_worker_holds_and_did(experts: Experts, url: str) -> None:
    tokens(url, count=4)
    wait_until(lambda: all(w["total"]["pair_count"] for w in experts.state()["experts"]["workers"]))
    state = experts.state()["experts"]
    for worker in state["workers"]:
        assert worker["phase"] == "up"
        assert worker["slab_bytes"] == worker["planned_weight_bytes"]
        assert worker["replica_count"] == 2
        # A busy machine may be late, and nothing else is a failure.
        assert worker["total"]["failure_count"] <= state["dispatch"]["late_count"]
        if worker["is_coordinator"]:
            assert worker["loaded_bytes"] == worker["planned_weight_bytes"]
        else:
            assert worker["slice_done_bytes"] == worker["slice_bytes"]
            assert worker["slice_bytes"] - worker["slab_bytes"] < 32_768
    seen = state["dispatch"]
    computed = sum(worker["total"]["pair_count"] for worker in state["workers"])
    # Workers also compute pairs that were guessed too early and then were not wanted.
    assert computed >= seen["pair_count"] > 0
    assert seen["failed_call_count"] == seen["fallback_pair_count"] == 0
    assert seen["missing_expert_count"] == 0
    assert seen["spot_pair_count"] > 0
    assert seen["difference_count"] == 0
    text = experts.swarm.run("status", NAME).stdout
    assert all(word in text for word in ("attic", "cellar", "garage", "pairs", "replicas"))
    assert "pairs compared, which never differed" in " ".join(text.split())


def test_the_virtual_device_has_metrics(experts: Experts, url: str) -> None:
    tokens(url, count=4)
    text = httpx.get(f"{url}/linkcpp/metrics", timeout=60).text
    calls = next(line for line in text.splitlines() if line.startswith("linkcpp_dispatch_calls_"))
    assert float(calls.split()[1]) > 0
    assert "linkcpp_dispatch_failed_calls_total 0.0" in text
    assert "linkcpp_dispatch_differences_total 0.0" in text
    pairs = next(
        line
        for line in text.splitlines()
        if line.startswith("linkcpp_dispatch_spot_checked_pairs_")
    )
    assert float(pairs.split()[-1]) > 0
    assert text.count("linkcpp_dispatch_worker_up{") == len(experts.swarm.agents) + 1


def test_logs_have_the_dispatch_process_and_every_worker(experts: Experts, url: str) -> None:
    assert url
    sources = {part["source"] for part in experts.swarm.run("logs", NAME, "--json").json}
    assert sources >= {"supervisor", "llama-server", "dispatch", "front", "backing rpc-server"}
    assert sources >= {"worker attic CPU", "worker cellar CPU", "worker garage CPU"}
    assert any(source.startswith("worker") and "here" in source for source in sources)


def test_all_programs_log_as_json_and_a_launch_has_one_id_on_every_node(
    experts: Experts, url: str
) -> None:
    answer = httpx.post(
        f"{url}/v1/completions", json={"prompt": "The", "max_tokens": 1}, timeout=60
    )
    parts = experts.swarm.run("logs", NAME, "--json").json
    lines = {part["source"]: json_lines(part["lines"]) for part in parts}
    assert any(line["request_id"] == answer.headers["x-request-id"] for line in lines["front"])
    came = {line["worker"] for line in lines["dispatch"] if line.get("state") == "up"}
    assert len(came) == len(experts.swarm.agents) + 1
    (launch_id,) = {line["request_id"] for line in lines["supervisor"]}
    for name in experts.swarm.agents:
        text = (experts.swarm.folder / f"{name}.log").read_text()
        requests = [line for line in json_lines(text.splitlines()) if "path" in line]
        asked = {line["path"] for line in requests if line["request_id"] == launch_id}
        assert "/v1/workers" in asked


def json_lines(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_no_token_is_on_a_command_line_and_no_file_is_for_others(
    experts: Experts, url: str
) -> None:
    assert url
    secret = (experts.swarm.home / "config" / "token").read_text().strip()
    for process in experts.swarm.processes():
        assert secret not in " ".join(process.cmdline())
    assert experts.swarm.open_to_others() == []


def test_a_node_killed_while_tokens_flow_changes_no_bit_and_is_used_again(
    experts: Experts, url: str
) -> None:
    answer = experts.complete_while(url, lambda: experts.kill("cellar"))
    assert answer == experts.reference
    wait_until(lambda: experts.worker("cellar")["phase"] == "away")
    assert any("cellar went away" in text for text in experts.notices())
    assert tokens(url, count=COUNT) == experts.reference
    experts.revive("cellar")
    wait_until(lambda: experts.worker("cellar")["phase"] == "up")
    before = experts.worker("cellar")
    assert before["start_count"] >= 2
    assert "cellar is back and computes again" in experts.notices()
    assert tokens(url, count=COUNT) == experts.reference
    wait_until(
        lambda: experts.worker("cellar")["total"]["pair_count"] > before["earlier"]["pair_count"]
    )
    state = experts.state()
    assert state["restart_count"] == 0
    assert state["experts"]["dispatch"]["failed_call_count"] == 0


def _stop_one(processes: Callable[[], list[psutil.Process]], word: str) -> None:
    """Stop the one program that has a word in its command line, as no program can refuse."""

    def found() -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            commands = {process: " ".join(process.cmdline()) for process in processes()}
            # A keeper has its program's words behind its own.
            return [
                p for p, words in commands.items() if word in words and "keeper.py" not in words
            ]
        return []

    # Another may be there for a moment, to be asked what it can do.
    wait_until(lambda: len(found()) == 1)
    found()[0].suspend()


def test_a_hung_worker_and_a_hung_rpc_server_of_nodes_are_started_again(
    experts: Experts, url: str
) -> None:
    nodes = {"attic": "linkcpp.worker", "garage": "ggml-rpc-server"}

    def not_told() -> list[str]:
        hung = [text for text in experts.notices() if "hung: a signal stopped it" in text]
        return [node for node in nodes if not any(t.startswith(f"{node} went") for t in hung)]

    def hang() -> None:
        for node in not_told():
            _stop_one(experts.swarm.agents[node].children, nodes[node])

    # On a busy machine a node may be lost for another reason before it has looked for so long.
    for _ in range(5):
        before = {node: experts.worker(node)["start_count"] for node in not_told()}
        assert experts.complete_while(url, hang) == experts.reference
        for node, count in before.items():
            wait_until(lambda node=node, count=count: experts.worker(node)["start_count"] > count)  # type: ignore[misc]
            wait_until(lambda node=node: experts.worker(node)["is_linked"])  # type: ignore[misc]
        if not not_told():
            break
    assert not_told() == []
    assert tokens(url, count=COUNT) == experts.reference
    assert experts.state()["restart_count"] == 0


def test_a_hung_front_is_started_again(experts: Experts, url: str) -> None:
    _stop_one(experts.swarm.processes, "linkcpp.front")
    wait_until(lambda: experts.state()["restart_count"] == 1)
    wait_until(lambda: experts.state()["phase"] == "ready")
    assert any("the front hung: a signal stopped it" in text for text in experts.notices())
    assert tokens(url, count=COUNT) == experts.reference


def test_only_the_end_of_the_dispatch_process_starts_the_deployment_again(
    experts: Experts, url: str
) -> None:
    ours = experts.swarm.processes()
    dispatch = next(p for p in ours if "linkcpp.dispatch" in p.cmdline())
    dispatch.kill()
    wait_until(lambda: experts.state()["restart_count"] == 2)
    wait_until(lambda: experts.state()["phase"] == "ready")
    assert any("dispatch process" in text for text in experts.notices())
    assert tokens(url, count=COUNT) == experts.reference


def test_a_slice_stays_on_its_node_for_the_next_launch(experts: Experts, url: str) -> None:
    experts.swarm.run("stop", NAME)
    plan = experts.swarm.home / "state" / "deployments" / NAME / "plan.json"
    kept = experts.swarm.folder / "again.json"
    kept.write_text(plan.read_text())
    before = experts.worker("attic")["transferred_bytes"]
    port = url.rsplit(":", 1)[1]
    words = ("--templates", experts.templates, "--fallback-memory", "0")
    experts.swarm.run("launch", str(kept), "--name", NAME, "--port", port, "--no-mdns", *words)
    assert experts.worker("attic")["transferred_bytes"] == before
    assert tokens(url, count=COUNT) == experts.reference
