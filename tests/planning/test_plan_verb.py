"""``linkcpp plan``: a table for people, JSON for programs, a way out where nothing fits."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from linkcpp.cli.launch import app as launch_app
from linkcpp.cli.plan import app
from linkcpp.cli.plan_files import load_plan
from linkcpp.common.errors import LinkcppError
from linkcpp.common.resources import resource_folder
from linkcpp.engine.records import EngineLocation
from linkcpp.launch.folder import deployment_folder
from linkcpp.node.discovery import Discovery
from linkcpp.planning.records import Plan, PlanMode
from tests.planning.clusters import GIGABYTE, cluster, device, node

WIDE = {"COLUMNS": "160"}


@pytest.fixture
def saved_nodes(tmp_path: Path) -> Path:
    where = cluster(26 * GIGABYTE, node("ash", device("CPU", 60 * GIGABYTE, 30e9)))
    path = tmp_path / "nodes.json"
    found = Discovery(coordinator=where.coordinator, nodes=where.nodes, notes=())
    path.write_text(found.model_dump_json())
    return path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env=WIDE)


def test_it_shows_who_holds_what_and_writes_the_plan(saved_nodes: Path, tmp_path: Path) -> None:
    output = tmp_path / "p.json"
    result = run("--model", "122B", "--nodes", str(saved_nodes), "-o", str(output))
    assert result.exit_code == 0, result.output
    plan = load_plan(output)
    assert {stage.node_name for stage in plan.stages} == {"here", "ash"}
    for told in ("here (here)", "ash", "ms a token", "Mode layers", f"linkcpp launch {output}"):
        assert told in result.stdout


def test_it_explains_memory_and_time(saved_nodes: Path) -> None:
    result = run("--model", "122B", "--nodes", str(saved_nodes), "--explain")
    assert result.exit_code == 0, result.output
    for told in ("weights", "snapshots", "reserved", "Time of one token", "Proved", "Why:"):
        assert told in result.stdout


def test_it_explains_sizes_that_columns_do_not_show(saved_nodes: Path) -> None:
    text = run("--model", "122B", "--nodes", str(saved_nodes), "--explain").stdout
    assert "on idle machines" in text
    assert "625 MB of state snapshots, which CACHE does not: 4 for each sequence" in text
    assert "77.6 GB of weights" in text
    assert "snapshots 625 MB, buffers" in text
    assert "a layer takes" in text
    tied = run("--model", "smollm2", "--nodes", str(saved_nodes), "--mode", "layers", "--explain")
    assert "snapshots, which" not in tied.stdout
    assert "more weights than the model has" in tied.stdout


def test_a_plan_of_a_preset_is_not_started_without_a_file(
    saved_nodes: Path, tmp_path: Path
) -> None:
    output = tmp_path / "p.json"
    text = run("--model", "122B", "--nodes", str(saved_nodes), "-o", str(output)).stdout
    assert "which is not a file here: launch it" in text
    assert text.endswith(f"with the model's file: linkcpp launch {output} --model FILE.gguf\n")


def test_more_nodes_than_there_are_cannot_be_asked_for(saved_nodes: Path) -> None:
    arguments = ("--model", "smollm2", "--nodes", str(saved_nodes), "--min-nodes")
    refused = run(*arguments, "4")
    assert isinstance(refused.exception, LinkcppError)
    assert "--min-nodes 4 was asked for, but only 1 is usable" in refused.exception.message
    assert "ash CPU" in refused.exception.message
    alone = run(*arguments, "1", "--mode", "single")
    assert isinstance(alone.exception, LinkcppError)
    # Asked for nodes, a plan uses them, though the coordinator alone would be faster.
    plan = Plan.model_validate(json.loads(run(*arguments, "1", "--json").stdout))
    assert [stage.node_name for stage in plan.stages if not stage.is_coordinator] == ["ash"]


def test_what_is_for_experts_is_refused_for_a_plan_of_layers(
    saved_nodes: Path, tmp_path: Path
) -> None:
    output = tmp_path / "p.json"
    run("--model", "122B", "--nodes", str(saved_nodes), "-o", str(output))
    words = [str(output), "--spot-checks", "5%", "--patience", "3"]
    refused = CliRunner().invoke(launch_app, words).exception
    assert isinstance(refused, LinkcppError)
    assert refused.message == "--patience is for mode experts, and this plan is of mode layers."


def test_it_writes_only_into_folders_that_are_there(saved_nodes: Path, tmp_path: Path) -> None:
    output = tmp_path / "none" / "p.json"
    result = run("--model", "smollm2", "--nodes", str(saved_nodes), "-o", str(output))
    assert isinstance(result.exception, LinkcppError)
    assert "no folder" in result.exception.message
    assert not output.parent.exists()
    result = run("--model", "smollm2", "--nodes", str(saved_nodes), "-o", str(tmp_path))
    assert isinstance(result.exception, LinkcppError)
    assert result.exception.hint == "Name a file in it with --output."


@pytest.mark.parametrize("wrong", [("--memory", "12XB"), ("-o", "/nowhere/p.json")])
def test_wrong_values_are_told_before_anybody_is_looked_for(
    wrong: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linkcpp.cli.plan.load_model_anywhere", lambda *_: pytest.fail("looked"))
    assert isinstance(run("--model", "122B", *wrong).exception, LinkcppError)


def test_a_model_in_place_of_a_plan_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(LinkcppError, match="is a model, not a plan") as raised:
        load_plan(path)
    assert f"linkcpp plan --model {path}" in (raised.value.hint or "")


def test_it_plans_without_any_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LINKCPP_ENGINE", str(tmp_path))
    output = tmp_path / "p.json"
    result = run("--model", "smollm2", "--memory", "2GB", "-o", str(output))
    assert result.exit_code == 0, result.output
    assert "Planning without an engine" in result.stderr
    assert "Assumed:" in result.stdout
    assert any("no working llama.cpp" in note for note in load_plan(output).expectation.assumptions)


def test_json_is_the_plan_and_nothing_else(saved_nodes: Path) -> None:
    result = run("--model", "122B", "--nodes", str(saved_nodes), "--json", "--mode", "layers")
    plan = Plan.model_validate(json.loads(result.stdout))
    assert plan.mode is PlanMode.LAYERS


def test_what_does_not_fit_is_told_with_ways_out(saved_nodes: Path) -> None:
    result = run("--model", "deepseek-v3", "--nodes", str(saved_nodes))
    assert isinstance(result.exception, LinkcppError)
    assert "short" in result.exception.message
    assert "Add one node" in (result.exception.hint or "")
    assert "short" not in result.output  # said once, by whoever prints the error
    data = json.loads(run("--model", "deepseek-v3", "--nodes", str(saved_nodes), "--json").stdout)
    assert data["shortfalls"][0]["needed_bytes"] > data["shortfalls"][0]["available_bytes"]


def test_a_deployment_that_takes_memory_is_named_where_nothing_fits(saved_nodes: Path) -> None:
    here = ("--model", "122B", "--memory", "1GB", "--no-mdns")
    folder = deployment_folder("moe")
    with folder.lock():
        folder.state_file.write_text("{}")
        told = run(*here).exception
        saved = run("--model", "deepseek-v3", "--nodes", str(saved_nodes)).exception
    assert isinstance(told, LinkcppError)
    assert "`linkcpp stop moe`" in (told.hint or "")
    # What was saved of other machines has nothing to do with what runs here.
    assert isinstance(saved, LinkcppError)
    assert "linkcpp stop" not in (saved.hint or "")
    ended = run(*here).exception
    assert isinstance(ended, LinkcppError)
    assert "linkcpp stop" not in (ended.hint or "")


def test_machines_that_are_not_there_can_be_assumed(saved_nodes: Path) -> None:
    arguments = ("--model", "deepseek-v3", "--nodes", str(saved_nodes), "--assume", "8x48GB@gpu")
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert "assumed 48GB gpu" in result.stdout
    written = run(*arguments, "-o", str(saved_nodes.with_name("p.json")))
    assert "linkcpp launch" not in written.stdout
    assert "plan again when they are there" in written.stdout


@pytest.mark.parametrize(
    "machines", ["many", "2x24", "24", "0GB", "24GB@tpu", "24GB@gpu:936", "24GB@gpu:0GB/s"]
)
def test_machines_to_assume_have_sizes_with_units(saved_nodes: Path, machines: str) -> None:
    wrong = run("--model", "122B", "--nodes", str(saved_nodes), "--assume", machines)
    assert isinstance(wrong.exception, LinkcppError)
    assert wrong.exception.hint is not None


def test_an_assumed_device_is_as_fast_as_it_is_said_to_be(saved_nodes: Path) -> None:
    def token_ms(machines: str) -> float:
        words = ("--model", "122B", "--nodes", str(saved_nodes), "--assume", machines, "--json")
        plan = Plan.model_validate(json.loads(run(*words).stdout))
        unmeasured = any("was not measured" in note for note in plan.expectation.assumptions)
        assert unmeasured == ("/s" not in machines)
        return plan.expectation.compute_ms

    slow, fast = (token_ms(f"96GB@gpu:{rate}GB/s") for rate in (200, 900))
    assert token_ms("96GB@gpu") > slow > fast


def test_the_coordinator_uses_no_more_than_it_may(saved_nodes: Path) -> None:
    arguments = ("--model", "122B", "--nodes", str(saved_nodes), "--memory", "25GB", "--json")
    plan = Plan.model_validate(json.loads(run(*arguments).stdout))
    assert plan.coordinator_memory.available_bytes == 25 * GIGABYTE
    assert plan.coordinator_memory.used_bytes < 25 * GIGABYTE


def test_a_file_that_is_no_list_of_nodes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"nodes": 3}')
    result = run("--model", "122B", "--nodes", str(path))
    assert isinstance(result.exception, LinkcppError)
    assert "not a saved discovery" in result.exception.message


def test_the_example_nodes_plan_a_large_model() -> None:
    nodes = resource_folder("plans") / "examples" / "home-nodes.json"
    result = run("--model", "122B", "--nodes", str(nodes))
    assert result.exit_code == 0, result.output


def test_one_machine_needs_no_token(
    stock_engine: EngineLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stock_engine.llama_server is not None
    monkeypatch.setenv("LINKCPP_ENGINE", str(stock_engine.llama_server.parent))
    result = run("--model", "smollm2", "--memory", "2GB")
    assert result.exit_code == 0, result.output
    assert "Mode single" in result.stdout
