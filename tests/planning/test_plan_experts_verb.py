"""``linkcpp plan --mode experts``: who holds which experts, for people and as JSON."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from linkcpp.cli.plan import app
from linkcpp.cli.plan_experts_report import segments_text
from linkcpp.cli.plan_files import load_plan
from linkcpp.common.errors import LinkcppError
from linkcpp.model.slices.segments import Segment
from linkcpp.node.discovery import Discovery
from linkcpp.planning.records import Plan, PlanMode
from tests.planning.clusters import GIGABYTE, cluster, device, node

WIDE = {"COLUMNS": "200"}


@pytest.fixture
def saved_nodes(tmp_path: Path) -> Path:
    where = cluster(26 * GIGABYTE)
    path = tmp_path / "nodes.json"
    found = Discovery(coordinator=where.coordinator, nodes=where.nodes, notes=())
    path.write_text(found.model_dump_json())
    return path


def run(nodes: Path, *arguments: str) -> Result:
    fixed = ("--model", "122B", "--mode", "experts", "--nodes", str(nodes))
    return CliRunner().invoke(app, [*fixed, *arguments], env=WIDE)


def test_it_shows_shares_round_trips_and_bytes(saved_nodes: Path, tmp_path: Path) -> None:
    output = tmp_path / "p.json"
    result = run(saved_nodes, "--assume", "20x8GB", "--replicas", "2", "-o", str(output))
    assert result.exit_code == 0, result.output
    for told in (
        "LAYERS: EXPERTS",
        "REPLICAS",
        "assumed 8GB cpu 1.20",
        "48 round trips",
        "to the holders and",
        "Mode experts: no other mode was considered; every expert has 2 holders",
        "ms a token",
    ):
        assert told in result.stdout
    plan = load_plan(output)
    assert plan.mode is PlanMode.EXPERTS
    assert plan.options.replicas == 2


def test_where_all_experts_are_here_no_round_trips_are_told(tmp_path: Path) -> None:
    where = cluster(200 * GIGABYTE)
    path = tmp_path / "nodes.json"
    found = Discovery(coordinator=where.coordinator, nodes=(), notes=())
    path.write_text(found.model_dump_json())
    told = CliRunner().invoke(
        app,
        ["--model", "122B", "--mode", "experts", "--nodes", str(path)],
        env={"COLUMNS": "80"},
    )
    assert "Each token: all its experts are on here; typically" in told.stdout
    assert "round trips" not in told.stdout
    assert told.stdout.count("here (here)") == 2  # names stay in one line, also in 80 columns


def test_nodes_without_room_for_a_copy_are_told_what_gives_them_more(tmp_path: Path) -> None:
    where = cluster(200 * GIGABYTE, node("ash", device("CPU", GIGABYTE // 10, 30e9)))
    path = tmp_path / "nodes.json"
    found = Discovery(coordinator=where.coordinator, nodes=where.nodes, notes=())
    path.write_text(found.model_dump_json())
    told = run(path, "--replicas", "3").stdout
    assert "none has room for a worker and an expert" in told
    assert "--replicas 2 puts copies" not in told
    assert "--replicas 2 puts copies" in run(path).stdout


def test_it_explains_every_holder(saved_nodes: Path) -> None:
    result = run(saved_nodes, "--assume", "4x24GB", "--explain")
    assert result.exit_code == 0, result.output
    for told in ("Experts of one token, by holder", "experts and dispatch", "Objective", "Proved"):
        assert told in result.stdout
    assert result.stdout.count("assumed 24GB cpu 1.4") >= 3


def test_json_is_the_plan_and_nothing_else(saved_nodes: Path) -> None:
    result = run(saved_nodes, "--assume", "20x8GB", "--json")
    plan = Plan.model_validate(json.loads(result.stdout))
    assert plan.expectation.experts is not None
    assert plan.expectation.experts.short_unit_count == 0


def test_recorded_counts_are_used_and_wrong_ones_refused(saved_nodes: Path, tmp_path: Path) -> None:
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps({"layers": {"0": {"3": 5000}, "47": {"255": 5000}}}))
    arguments = ("--assume", "20x8GB", "--json", "--hot", str(counts))
    assert run(saved_nodes, *arguments).exit_code == 0
    counts.write_text(json.dumps({"layers": {"48": {"3": 5000}}}))
    result = run(saved_nodes, *arguments)
    assert isinstance(result.exception, LinkcppError)
    assert "layer 48" in result.exception.message
    result = run(saved_nodes, "--assume", "20x8GB", "--hot", str(tmp_path / "nowhere.json"))
    assert isinstance(result.exception, LinkcppError)
    assert "record of routing counts" in result.exception.message


def test_what_is_short_is_told(saved_nodes: Path) -> None:
    result = run(saved_nodes, "--assume", "2x8GB")
    assert isinstance(result.exception, LinkcppError)
    assert "experts of 48 layers" in result.exception.message
    assert "Add one node" in (result.exception.hint or "")


def test_segments_are_written_compactly() -> None:
    segments = (
        *(Segment(layer=layer, first=0, last=31) for layer in range(48)),
        Segment(layer=48, first=2, last=2),
    )
    assert segments_text(segments) == "0-47: 0-31; 48: 2"
    assert segments_text(segments, most=1) == "0-47: 0-31; and 1 more"
