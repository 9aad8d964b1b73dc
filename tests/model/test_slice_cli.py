"""``linkcpp slice`` as a user types it."""

import json
import os
import re
import stat
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from linkcpp.cli.slice import app
from linkcpp.common.errors import LinkcppError
from tests.model.test_slices import flip, slabs_by_gguf
from tests.support.models import qwen3moe


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def refused(*words: str | Path) -> LinkcppError:
    result = run(*words)
    assert isinstance(result.exception, LinkcppError), result.output
    return result.exception


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out" / "s.gguf"


def test_layers_times_experts_and_segments_add_up(output: Path) -> None:
    chosen = ["--layers", "0-1", "--experts", "0-7", "--segment", "1:6-9", "--segment", "3:12"]
    result = run(qwen3moe(), *chosen, "-o", output)
    assert result.exit_code == 0, result.output
    held = {(int(name.split(".")[1]), expert) for name, expert in slabs_by_gguf(output)}
    assert held == {(0, e) for e in range(8)} | {(1, e) for e in range(10)} | {(3, 12)}
    for words in ("layers 0, experts 0-7", "layers 1, experts 0-9", "layers 3, experts 12"):
        assert words in result.output


def test_json_is_all_that_is_printed(output: Path) -> None:
    result = run(qwen3moe(), "--experts", "3", "-o", output, "--json")
    (file,) = json.loads(result.stdout)["files"]
    assert file["file_bytes"] == output.stat().st_size
    assert file["segments"][0] == {"layer": 0, "first": 3, "last": 3}
    assert Path(file["manifest"]).exists()


def test_a_sound_slice_is_called_sound_and_a_changed_one_is_not(output: Path) -> None:
    run(qwen3moe(), "--layers", "0", "-o", output)
    assert "sound" in run(output, "--verify").output
    assert json.loads(run(output, "--verify", "--json").stdout)["is_sound"] is True
    flip(output, output.stat().st_size // 2)
    assert re.search(r"Damaged: expert \d+ of blk\.0", refused(output, "--verify").message)
    result = run(output, "--verify", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["damaged"]


def test_a_backbone_tells_how_much_of_it_is_on_the_disk(output: Path) -> None:
    result = run(qwen3moe(), "--backbone", "-o", output)
    assert "on the disk" in result.output
    assert "sound" in run(output, "--verify").output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layers", "0"], "no file to write"),
        (["-o", "x"], "would be empty"),
        (["--backbone", "--layers", "0", "-o", "x"], "A backbone has no experts"),
        (["--verify", "--layers", "0"], "--verify takes the written file"),
        (["--verify", "-o", "x"], "--verify takes the written file"),
        (["--layers", "0", "--segment", "1", "-o", "x"], "is not a segment"),
    ],
)
def test_what_makes_no_sense_is_told(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error = refused(qwen3moe(), *words)
    assert said in error.message
    assert error.hint
    assert list(tmp_path.glob("*x*")) == []


def test_a_file_that_is_there_is_replaced_only_by_force(output: Path) -> None:
    output.parent.mkdir()
    output.write_text("precious")
    assert "already there" in refused(qwen3moe(), "--layers", "0", "-o", output).message
    assert output.read_text() == "precious"
    assert run(qwen3moe(), "--layers", "0", "-o", output, "--force").exit_code == 0
    assert "sound" in run(output, "--verify").output


def test_the_verb_is_on_the_command_line() -> None:
    from linkcpp.cli.main import app as everything

    command = typer.main.get_command(everything)
    result = CliRunner().invoke(everything, ["slice", "--help"])
    assert result.exit_code == 0, result.output
    assert "--backbone" in re.sub(r"\x1b\[[0-9;]*m", "", result.output)
    assert command.name == "linkcpp"


def test_a_slice_can_be_read_by_whom_the_umask_lets(output: Path) -> None:
    before = os.umask(0o027)
    try:
        run(qwen3moe(), "--layers", "0", "-o", output)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in output.parent.iterdir()}
    assert set(modes.values()) == {0o640}, modes
