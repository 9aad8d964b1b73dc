"""Plan files, and whether a plan suits a model and nodes."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linkcpp.cli.plan_files import load_plan, save_plan
from linkcpp.cluster.records import Cluster
from linkcpp.common.errors import LinkcppError
from linkcpp.common.resources import resource_folder
from linkcpp.model.presets import load_model
from linkcpp.node.discovery import Discovery
from linkcpp.planning.documents import (
    check_plan_model,
    parse_plan,
    plan_text,
)
from linkcpp.planning.records import SCHEMA_VERSION, Plan, PlanMode, PlanOptions
from linkcpp.planning.shortfall import make_plan
from tests.planning.clusters import GIGABYTE, cluster, device, machine, node

SMALL = load_model("smollm2")
ASH = node("ash", device("CPU", 8 * GIGABYTE, 10e9))
PLAN = make_plan(SMALL, cluster(8 * GIGABYTE, ASH), PlanOptions(mode=PlanMode.LAYERS))


def test_a_plan_reads_back_as_it_was_written(tmp_path: Path) -> None:
    save_plan(PLAN, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == PLAN


def test_a_plan_of_a_newer_linkcpp_is_refused_by_name() -> None:
    data = json.loads(plan_text(PLAN)) | {"schema_version": SCHEMA_VERSION + 1, "more": 1}
    with pytest.raises(LinkcppError, match="newer linkcpp"):
        parse_plan(json.dumps(data), source="p.json")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"schema_version": "1"}',
        "[" * 100_000,
        "\x00",
        '{"schema_version": -1}',
    ],
)
def test_what_is_not_a_plan_is_refused(text: str) -> None:
    with pytest.raises(LinkcppError, match="not a plan"):
        parse_plan(text, source="p.json")


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN", "1e999"])
def test_a_time_that_cannot_be_written_back_is_refused(number: str) -> None:
    data = json.loads(plan_text(PLAN))
    data["stages"][0]["compute_ms"] = "<number>"
    text = json.dumps(data).replace('"<number>"', number)
    with pytest.raises(LinkcppError, match=r"compute_ms.* finite number"):
        parse_plan(text, source="p.json")


@pytest.mark.parametrize("key", ["node_name", "device"])
def test_a_name_with_an_escape_sequence_is_refused_without_showing_it(key: str) -> None:
    data = json.loads(plan_text(PLAN))
    data["stages"][-1][key] = "ash\x1b[31m"
    with pytest.raises(LinkcppError, match="characters that no name has") as refused:
        parse_plan(json.dumps(data), source="p.json")
    assert "\x1b" not in refused.value.message


def test_a_plan_with_a_part_missing_names_it() -> None:
    data = json.loads(plan_text(PLAN))
    del data["stages"][0]["memory"]["kv_bytes"]
    with pytest.raises(LinkcppError, match=r"stages\.0\.memory\.kv_bytes"):
        parse_plan(json.dumps(data), source="p.json")


@given(st.binary(max_size=300))
def test_no_bytes_crash_the_reader(content: bytes) -> None:
    with pytest.raises(LinkcppError):
        parse_plan(content, source="p.json")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LinkcppError, match=r"nothing\.json"):
        load_plan(tmp_path / "nothing.json")


def with_digest(plan: Plan, digest: str | None) -> Plan:
    return plan.model_copy(update={"model": plan.model.model_copy(update={"digest": digest})})


def test_a_plan_for_another_model_is_refused_by_name() -> None:
    planned = with_digest(PLAN, "0" * 64)
    same = SMALL.model_copy(update={"digest": "0" * 64})
    other = SMALL.model_copy(update={"digest": "1" * 64, "name": "Another"})
    check_plan_model(planned, same)
    with pytest.raises(LinkcppError, match="Another"):
        check_plan_model(planned, other)


def test_a_plan_whose_sizes_are_not_those_of_its_layers_is_refused_by_name() -> None:
    moved = parse_plan(
        _edited({"layer_count": 29}, {"first_layer": 29, "layer_count": 1}), source="p.json"
    )
    with pytest.raises(LinkcppError, match="here CPU would hold"):
        check_plan_model(moved, SMALL)
    there = PLAN.stages[1]
    less = there.memory.model_copy(update={"weight_bytes": there.memory.weight_bytes - 1})
    lying = PLAN.stages[0], there.model_copy(update={"memory": less})
    with pytest.raises(LinkcppError, match="ash CPU would hold"):
        check_plan_model(PLAN.model_copy(update={"stages": lying}), SMALL)


def test_a_plan_with_more_devices_than_llama_cpp_takes_is_refused() -> None:
    one = {"layer_count": 1, "holds_output": False}
    rest = [one | {"first_layer": 13 + n, "device": f"GPU{n}"} for n in range(16)]
    rest.append({"first_layer": 29, "layer_count": 1})
    with pytest.raises(LinkcppError, match="at most 15"):
        parse_plan(_edited({"layer_count": 13}, *rest), source="p.json")


@pytest.mark.parametrize("name", ["122B", "30B-A3B", "gpt-oss-120b"])
@pytest.mark.parametrize("major", [4, 7])
def test_every_plan_has_the_sizes_of_its_layers(name: str, major: int) -> None:
    model = load_model(name)
    card = device("CUDA0", 12 * GIGABYTE, 400e9)
    here = machine("here", device("CPU", 90 * GIGABYTE, 40e9), card, major=major)
    nodes = tuple(node(n, device("CPU", 30 * GIGABYTE, 20e9), major=major) for n in ("a", "b"))
    for mode in (PlanMode.SINGLE, PlanMode.LAYERS):
        where = Cluster(coordinator=here, nodes=nodes)
        check_plan_model(make_plan(model, where, PlanOptions(mode=mode, parallel=2)), model)


def test_a_plan_from_a_preset_wants_a_file_of_its_shape() -> None:
    assert PLAN.model.digest is None
    check_plan_model(PLAN, SMALL.model_copy(update={"digest": "2" * 64}))
    with pytest.raises(LinkcppError, match="preset"):
        check_plan_model(PLAN, load_model("30B-A3B"))


EXAMPLES = resource_folder("plans") / "examples"


@pytest.mark.parametrize("name", ["122b-at-home.json", "30b-a3b-at-home.json"])
def test_an_example_plan_is_what_the_planner_makes_of_the_example_nodes(name: str) -> None:
    plan = load_plan(EXAMPLES / name)
    model = load_model(plan.model.source.removeprefix("preset "))
    check_plan_model(plan, model)
    where = Discovery.model_validate_json((EXAMPLES / "home-nodes.json").read_bytes()).cluster
    again = make_plan(model, where, plan.options)
    assert again.stages == plan.stages


HERE = {"first_layer": 0, "layer_count": 20}
THERE = {"first_layer": 20, "layer_count": 10}
AGAIN = {"first_layer": 25, "layer_count": 5}
FIVE = {"layer_count": 5, "holds_output": False}


def _edited(here: Mapping[str, object], *there: Mapping[str, object]) -> str:
    data = json.loads(plan_text(PLAN))
    mine, theirs = data["stages"]
    data["stages"] = [mine | HERE | here, *(theirs | THERE | changes for changes in there)]
    return json.dumps(data)


def test_a_plan_edited_so_that_it_still_makes_sense_is_taken() -> None:
    assert parse_plan(_edited({}, {}), source="p.json").stages[0].layer_count == 20
    assert len(parse_plan(_edited({}, FIVE, AGAIN | {"device": "GPU0"}), source="p").stages) == 3


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        (({"layer_count": 7}, {"layer_count": 7}), "do not cover layers 0-29 exactly once"),
        (({}, {"layer_count": 9}), "do not cover layers 0-29 exactly once"),
        (({}, {"first_layer": 19, "layer_count": 11}), "do not cover layers 0-29 exactly once"),
        (({"layer_count": 21}, {"first_layer": 21, "layer_count": -1}), "do not cover layers 0-29"),
        (({},), "do not cover layers 0-29 exactly once"),
        (({}, {"holds_output": False}), "output belongs to its last stage"),
        (({"holds_output": True}, {}), "output belongs to its last stage"),
        (({}, FIVE, AGAIN), "ash CPU stands in it twice"),
        (({}, {"is_coordinator": True}), "do not agree on which machine"),
        (({}, {"expert_layers_in_ram": [3]}), "keeps experts of layers that it does not have"),
        (({}, {"expert_layers_in_ram": [29]}), "cards can leave experts in its RAM"),
    ],
)
def test_a_plan_edited_so_that_it_contradicts_itself_is_refused(
    stages: tuple[Mapping[str, object], ...], problem: str
) -> None:
    with pytest.raises(LinkcppError, match=problem):
        parse_plan(_edited(*stages), source="p.json")


@pytest.mark.parametrize("size", [1, -1])
def test_a_plan_that_holds_more_than_is_offered_is_refused(size: int) -> None:
    data = json.loads(plan_text(PLAN))
    data["coordinator_memory"]["available_bytes"] = size
    with pytest.raises(LinkcppError, match=r"hold more than it offers|a size below zero"):
        parse_plan(json.dumps(data), source="p.json")
