"""A deployment whose weights all come from a hub, on a machine that has no file of the model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from linkcpp.planning.records import Plan
from linkcpp.registry.hub_location import HubLocation
from tests.launch.expert_plans import HERE, expert_counts, experts_plan
from tests.launch.hub_process import HubProcess, hub_process
from tests.launch.swarm import Swarm, one_process, tokens, wait_until
from tests.support.engines import prebuilt_engine
from tests.support.models import qwen3moe

pytestmark = pytest.mark.slow

COUNT = 12


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    with hub_process(tmp_path) as running:
        running.add(qwen3moe(), "mix")
        yield running


@pytest.fixture
def swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Swarm]:
    (tmp_path / "swarm").mkdir()
    swarm = Swarm(tmp_path / "swarm", prebuilt_engine())
    monkeypatch.setenv("LINKCPP_HOME", str(swarm.home))
    yield swarm
    swarm.close()


def test_all_weights_come_from_the_hub_and_the_answer_is_that_of_one_process(
    hub: HubProcess, swarm: Swarm, tmp_path: Path
) -> None:
    hub.join()
    model = qwen3moe()
    with one_process(prebuilt_engine(), model, tmp_path / "one.log") as url:
        expected = tokens(url, count=COUNT)
    last = min(expert_counts(model).values()) - 1
    path = experts_plan(swarm, model, {HERE: [(0, last)]})
    made = Plan.model_validate_json(path.read_bytes())
    source = HubLocation(hub.url, "mix").text
    at_hub = made.model_copy(update={"model": made.model.model_copy(update={"source": source})})
    path.write_text(at_hub.model_dump_json())

    state = swarm.launch(path, "mix", "--json").json
    assert tokens(state["api_url"], count=COUNT) == expected
    notices = [notice["text"] for notice in state["notices"]]
    assert any(f"the model lies at {hub.url} only" in text for text in notices)
    log = (swarm.home / "state" / "deployments" / "mix" / "supervisor.log").read_text()
    launch_id = log.partition("have the request id ")[2].split()[0]
    assert f'"request_id": "{launch_id}"' in hub.log.read_text()
    assert not state["experts"]["has_fallback"]

    refused = swarm.run("verify", "mix", code=2).stderr
    assert "Nothing can be compared" in refused
    assert "--model" in refused
    prompts = tmp_path / "one.txt"
    prompts.write_text("the of and to\n")
    words = ("--model", str(model), "--prompts", str(prompts), "--tokens", "4", "--experts", "1")
    assert swarm.run("verify", "mix", *words, "--json").json["verdict"] == "exact"
    swarm.run("stop", "mix")
    assert not swarm.processes()


def test_a_node_that_was_killed_is_not_counted_on_though_its_hub_just_heard_of_it(
    swarm: Swarm, tmp_path: Path
) -> None:
    with hub_process(tmp_path) as hub:

        def statuses() -> dict[str, str]:
            found = swarm.run("discover", "--hub", hub.url, "--no-mdns", "--json").json["nodes"]
            return {node["name"]: node["status"] for node in found}

        hub.join()
        engine = prebuilt_engine()
        with hub.node(tmp_path / "attic", engine) as attic:
            wait_until(lambda: statuses() == {"attic": "ready"})
            attic.kill()
            attic.wait()
            with hub.node(tmp_path / "cellar", engine):
                wait_until(lambda: statuses().get("cellar") == "ready")
                assert statuses() == {"attic": "stale", "cellar": "ready"}
