"""``linkcpp join`` and ``linkcpp hub`` as a person meets them, without a hub."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from linkcpp.cli.join_token import read_join_token
from linkcpp.cli.own_command import without_token
from linkcpp.common.errors import EXIT_NOT_NOW, LinkcppError


def run(
    *words: str, text: str | None = None, **environment: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "linkcpp.cli.main", *words],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | environment,
    )


def test_a_command_is_the_same_without_its_token() -> None:
    words = ["join", "https://hub.example", "--token", "lcj_secret", "--name", "attic"]
    assert without_token(words) == ["join", "https://hub.example", "--name", "attic"]
    assert without_token(["join", "--token=lcj_secret", "url"]) == ["join", "url"]


def test_a_token_comes_from_a_file_or_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("lcj_from_file\n")
    assert read_join_token(f"@{tmp_path / 'token'}") == "lcj_from_file"
    monkeypatch.setenv("LINKCPP_JOIN_TOKEN", "lcj_from_variable")
    assert read_join_token(None) == "lcj_from_variable"
    with pytest.raises(LinkcppError, match="cannot be read"):
        read_join_token(f"@{tmp_path / 'none'}")


def test_joining_a_hub_that_one_never_joined_tells_the_hint() -> None:
    done = run("join", "https://hub.example")
    assert done.returncode == 2
    assert "did not join the hub" in done.stderr
    assert "--token" in done.stderr
    pytest.importorskip("uvloop", reason="a gateway needs the extra `hub`")
    gateway = run("gateway", "--hub", "https://hub.example").stderr
    assert "--token" in gateway
    assert "`linkcpp hub token create --role gateway`" in gateway
    assert "linkcpp join" not in gateway


def test_an_empty_answer_to_the_question_for_a_token_is_refused() -> None:
    done = run("join", "https://hub.example", "--token", "-", text="\n")
    assert done.returncode == 2
    assert "No join token" in done.stderr


def test_a_unit_is_printed_without_a_hub_and_without_the_token() -> None:
    done = run("join", "https://hub.example", "--token", "lcj_secret", "--systemd-unit")
    assert done.returncode == 0, done.stderr
    assert "join https://hub.example" in done.stdout
    assert "lcj_secret" not in done.stdout


@pytest.mark.slow
def test_a_second_hub_on_one_data_folder_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "linkcpp.cli.main", "hub", "--data", str(tmp_path / "hub")]
    with subprocess.Popen(
        [*command, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as first:
        assert first.stdout is not None
        assert any("Ctrl-C stops it" in line for line in first.stdout)
        done = run("hub", "--data", str(tmp_path / "hub"), "--port", "0")
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=120)
    assert done.returncode == EXIT_NOT_NOW
    assert "runs already with the data folder" in done.stderr
