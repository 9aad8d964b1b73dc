"""Routing counts of a real deployment: recorded, kept, planned with, launched again."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from linkcpp.model.inventory import read_inventory
from linkcpp.planning.routing_counts import RoutingCounts, parse_counts
from tests.launch.expert_plans import expert_counts, experts_plan
from tests.launch.experts import COUNT, NAME, Experts, launched
from tests.launch.swarm import tokens
from tests.support.engines import prebuilt_engine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Experts]:
    experts = Experts(tmp_path_factory.mktemp("counts"), prebuilt_engine())
    experts.swarm.start_agents("attic", "cellar")
    yield experts
    experts.swarm.close()


def written(experts: Experts, path: Path) -> RoutingCounts:
    told = experts.swarm.run("status", NAME, "--routing-counts", str(path)).stdout
    assert f"--model {experts.model}" in told
    assert f"--hot {path}" in told
    return parse_counts(path.read_bytes(), source=str(path))


def test_counts_survive_stop_and_launch_and_make_a_plan_that_launches(
    experts: Experts, tmp_path: Path
) -> None:
    path = tmp_path / "hot.json"
    plan = experts_plan(experts.swarm, experts.model, {"attic": [(0, 7)], "cellar": [(8, 15)]})
    with launched(experts, plan) as url:
        before = written(experts, path)
        assert tokens(url, count=COUNT) == experts.reference
        after = written(experts, path)
        assert after.model_digest == read_inventory(experts.model).digest
        assert sorted(after.layers) == sorted(expert_counts(experts.model))
        # Every layer computes all tokens, but the last one only those that are looked at.
        inventory = read_inventory(experts.model)
        used = inventory.shape.experts_per_token
        grown = {
            layer: sum(found.values()) - sum(before.layers[layer].values())
            for layer, found in after.layers.items()
        }
        assert min(grown.values()) >= used * COUNT
        assert all(pairs % used == 0 for pairs in grown.values())
        assert json.loads(
            experts.swarm.run("status", NAME, "--routing-counts", str(path), "--json").stdout
        ) == json.loads(path.read_text())
    assert written(experts, path) == after

    hot = experts.swarm.plan(experts.model, "--hot", str(path), "--replicas", "2", mode="experts")
    with launched(experts, hot) as url:
        assert tokens(url, count=COUNT) == experts.reference
        again = written(experts, path)
    assert all(
        sum(again.layers[layer].values()) >= sum(after.layers[layer].values()) + grown[layer]
        for layer in after.layers
    )


def test_a_fallback_has_the_room_that_the_plan_leaves(experts: Experts) -> None:
    made = experts_plan(experts.swarm, experts.model, {"attic": [(0, 15)]})
    text = json.loads(made.read_text())
    memory = text["coordinator_memory"]
    memory["available_bytes"] = memory["reserve_bytes"] + memory["weight_bytes"]
    made.write_text(json.dumps(text))
    with launched(experts, made) as url:
        assert tokens(url, count=COUNT) == experts.reference
        assert experts.state()["experts"]["has_fallback"] is False
        assert any("no fallback" in notice for notice in experts.notices())
        assert "no local fallback (no room" in experts.swarm.run("status", NAME).stdout


def test_a_deployment_without_experts_has_no_counts(experts: Experts, tmp_path: Path) -> None:
    plan = experts.swarm.plan(experts.model, mode="single")
    path = tmp_path / "x.json"
    experts.launch(plan, name="whole")
    done = experts.swarm.run("status", "whole", "--routing-counts", str(path), code=2)
    assert "does not spread experts" in done.stderr
    assert not path.exists()
    experts.swarm.run("stop", "whole")
