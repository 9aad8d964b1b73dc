"""``linkcpp engine``: tables for people, JSON for programs, one sentence for errors."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from linkcpp.cli.engine import app
from linkcpp.common.errors import LinkcppError
from linkcpp.engine import binaries
from linkcpp.engine.records import EngineLocation


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(binaries, "ENGINE_PACKAGES", ())
    monkeypatch.setattr(binaries, "_usual_places", lambda: iter(()))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("LINKCPP_ENGINE", raising=False)


def _folder(engine: EngineLocation) -> str:
    assert engine.llama_server is not None
    return str(engine.llama_server.parent)


def test_the_list_shows_build_protocol_and_verdict(
    stock_engine: EngineLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", _folder(stock_engine))
    result = CliRunner().invoke(app, ["list"])
    assert result.exit_code == 0
    for word in ("PATH", "571d0d5", "4.0.3", "CPU", "works"):
        assert word in result.stdout


def test_json_is_all_that_stdout_has(
    stock_engine: EngineLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", _folder(stock_engine))
    result = CliRunner().invoke(app, ["list", "--json"])
    (told,) = json.loads(result.stdout)["engines"]
    assert told["problem"] is None
    assert told["fingerprint"]["rpc_version"]["major"] == 4


def test_a_broken_engine_is_shown_with_a_hint(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\nkill -ILL $$\n")
    program.chmod(0o755)
    result = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert "illegal_instruction" in result.stdout
    assert "hint: Run `linkcpp engine install source`" in result.stdout
    assert isinstance(result.exception, LinkcppError)
    as_json = CliRunner().invoke(app, ["check", str(tmp_path), "--json"])
    assert as_json.exit_code == 2
    assert json.loads(as_json.stdout)["engines"][0]["problem"]["code"] == "illegal_instruction"


def test_a_machine_without_engines_has_an_empty_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linkcpp.cli.engine.find_engines", list)
    told = CliRunner().invoke(app, ["list"])
    assert told.exit_code == 0
    assert "no llama.cpp programs" in told.stdout
    assert json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout) == {"engines": []}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["check", "/nowhere"], "no llama.cpp program at /nowhere"),
        (["install", "nonsense"], "'nonsense' cannot be installed"),
        (["install", "archive", "https://h/a.zip"], "needs its URL and its SHA-256"),
        (["install", "archive", "h/a.zip", "--sha256", "0" * 64], "not the URL"),
        (["install", "source", "https://h/a.zip"], "go with `archive` only"),
    ],
)
def test_mistakes_are_told_in_one_sentence(arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, LinkcppError)
    assert sentence in result.exception.message
