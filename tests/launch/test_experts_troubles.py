"""Mode experts when experts are nowhere, when the supervisor dies, and where models come from."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from linkcpp.model.slices.writing import open_whole_model, write_backbone
from linkcpp.planning.records import Plan
from tests.launch.expert_plans import experts_plan
from tests.launch.experts import COUNT, NAME, Experts, launched
from tests.launch.swarm import PROMPT, START_SECONDS, tokens, wait_until
from tests.model.web_server import Server
from tests.support.engines import prebuilt_engine

pytestmark = pytest.mark.slow

TWO_NODES = {"attic": [(0, 7)], "cellar": [(8, 15)]}
# Patience for a busy machine, where a worker that lives may be slow; short enough to wait for once.
ONLY_NODES = ("--fallback-memory", "0", "--patience", "3")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Experts]:
    experts = Experts(tmp_path_factory.mktemp("experts"), prebuilt_engine())
    experts.swarm.start_agents("attic", "cellar")
    yield experts
    experts.swarm.close()


@pytest.fixture(scope="module")
def plan(experts: Experts) -> Path:
    return experts_plan(experts.swarm, experts.model, TWO_NODES)


def stream_until_killed(experts: Experts, url: str, node: str) -> list[str]:
    """Stream a long answer, kill a node in its midst; return the events."""
    body = {"prompt": PROMPT, "n_predict": 400, "stream": True, "ignore_eos": True}
    events = []
    with httpx.stream("POST", f"{url}/completion", json=body, timeout=START_SECONDS) as answer:
        assert answer.status_code == httpx.codes.OK
        for line in answer.iter_lines():
            events += [line.removeprefix("data: ")] if line.startswith("data: ") else []
            if len(events) == 5 and experts.swarm.agents[node].process.poll() is None:
                experts.kill(node)
    return events


def test_without_holder_and_fallback_requests_fail_and_afterwards_every_bit_is_right(
    experts: Experts, plan: Path
) -> None:
    with launched(experts, plan, *ONLY_NODES) as url:
        assert tokens(url, count=COUNT) == experts.reference
        *words, last = stream_until_killed(experts, url, "cellar")
        assert all("error" not in json.loads(word) for word in words)
        error = json.loads(last)["error"]
        assert error["code"] == httpx.codes.SERVICE_UNAVAILABLE
        wait_until(lambda: any("cellar went away" in text for text in experts.notices()))
        body = {"prompt": PROMPT, "n_predict": 8, "temperature": 0}
        refused = httpx.post(f"{url}/completion", json=body, timeout=START_SECONDS)
        assert refused.status_code == httpx.codes.SERVICE_UNAVAILABLE
        missing = refused.json()["error"]["missing_experts"]
        assert {0, 1, 2, 3} >= {entry["layer"] for entry in missing}
        assert all(8 <= expert <= 15 for entry in missing for expert in entry["experts"])
        assert "attic" not in refused.json()["error"]["message"]
        assert httpx.get(f"{url}/health", timeout=60).status_code == httpx.codes.OK
        wait_until(lambda: "its node left at" in (experts.worker("cellar")["detail"] or ""))
        experts.revive("cellar")
        wait_until(lambda: experts.worker("cellar")["phase"] == "up")
        wait_until(lambda: experts.worker("cellar")["link"] == "up")
        # The prompt cache is on: what the failed requests left in it must not be used.
        assert tokens(url, count=COUNT, cache_prompt=True) == experts.reference
        state = experts.state()
        assert state["restart_count"] == 0
        assert state["experts"]["dispatch"]["failed_call_count"] > 0


def test_nothing_outlives_a_supervisor_that_is_killed(experts: Experts, plan: Path) -> None:
    experts.launch(plan, *ONLY_NODES)
    state = experts.state()
    assert len(experts.swarm.processes()) > 4
    os.kill(state["supervisor"]["pid"], signal.SIGKILL)
    wait_until(experts.swarm.is_idle)
    assert experts.swarm.status(NAME)["condition"] == "crashed"
    assert "cleaned up" in experts.swarm.run("stop", NAME).stdout


def test_what_no_worker_holds_is_computed_here_and_told(experts: Experts) -> None:
    plan = experts_plan(experts.swarm, experts.model, {"attic": [(0, 7)]})
    with launched(experts, plan) as url:
        assert tokens(url, count=COUNT) == experts.reference
        wait_until(lambda: experts.state()["experts"]["dispatch"]["fallback_pair_count"])
        assert any("pairs were computed here" in text for text in experts.notices())


def test_a_plan_whose_experts_nobody_has_is_refused_in_one_sentence(
    experts: Experts, tmp_path: Path
) -> None:
    plan = Plan.model_validate_json(
        experts_plan(experts.swarm, experts.model, TWO_NODES).read_text()
    )
    gone = plan.expert_shares[1].model_copy(update={"node_id": "nobody", "node_name": "nobody"})
    path = tmp_path / "gone.json"
    path.write_text(
        plan.model_copy(update={"expert_shares": (plan.expert_shares[0], gone)}).model_dump_json()
    )
    done = experts.launch(path, "--fallback-memory", "0", code=2, name="gone")
    assert "32 experts have no worker (nobody: The plan needs nobody" in " ".join(
        done.stderr.split()
    )
    wait_until(experts.swarm.is_idle)


def test_a_hollow_model_serves_with_the_slices_that_nodes_have(
    experts: Experts, plan: Path, tmp_path: Path
) -> None:
    hollow = tmp_path / "hollow.gguf"
    with open_whole_model(experts.model) as files:
        write_backbone(files, hollow, lambda _: None)
    with launched(experts, plan, "--model", str(hollow)) as url:
        assert tokens(url, count=COUNT) == experts.reference
        assert experts.state()["experts"]["has_fallback"] is False
        assert experts.state()["experts"]["backbone_path"] == str(hollow)
    other = experts_plan(experts.swarm, experts.model, {"attic": [(0, 8)], "cellar": [(8, 15)]})
    done = experts.launch(other, "--model", str(hollow), code=2, name="hollow")
    assert "the model here is hollow" in " ".join(done.stderr.split())


def test_nodes_fetch_their_slices_from_the_models_address(experts: Experts, web: Server) -> None:
    web.files["/m.gguf"] = experts.model.read_bytes()
    made = experts_plan(experts.swarm, experts.model, {"attic": [(0, 9)], "cellar": [(10, 15)]})
    plan = Plan.model_validate_json(made.read_text())
    reference = plan.model.model_copy(update={"source": f"{web.url}/m.gguf"})
    made.write_text(plan.model_copy(update={"model": reference}).model_dump_json())
    with launched(experts, made) as url:
        assert tokens(url, count=COUNT) == experts.reference
        for worker in experts.state()["experts"]["workers"]:
            assert worker["transferred_bytes"] < 1.2 * worker["slab_bytes"]
