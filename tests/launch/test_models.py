"""Mixtures of experts split over three nodes equal one process, on every engine build."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from linkcpp.engine.records import EngineLocation
from tests.launch.swarm import Swarm, one_process, tokens
from tests.support.engines import ENGINES
from tests.support.models import qwen3moe, qwen35moe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=sorted(ENGINES))
def build(request: pytest.FixtureRequest) -> EngineLocation:
    return ENGINES[request.param]()


@pytest.fixture(scope="module")
def trio(build: EngineLocation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    swarm = Swarm(tmp_path_factory.mktemp("trio"), build)
    swarm.start_agents("attic", "cellar", "garage")
    yield swarm
    swarm.close()


@pytest.mark.parametrize("model", [qwen3moe, qwen35moe])
def test_experts_on_three_nodes_answer_exactly_as_one_process(
    trio: Swarm, build: EngineLocation, model: Callable[[], Path]
) -> None:
    path = model()
    name = path.stem
    with one_process(build, path, trio.folder / f"{name}.log") as url:
        expected = tokens(url)
    state = trio.launch(trio.plan(path), name, "--json").json
    remote = {stage["node_name"] for stage in state["stages"] if not stage["is_coordinator"]}
    assert remote == set(trio.agents)
    assert tokens(state["api_url"]) == expected
    trio.run("stop", name)
    assert not trio.processes()
    assert all(not agent.children() for agent in trio.agents.values())
