"""The cluster token: where it lies, who may read it, what it proves."""

import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from linkcpp.cli.token import app
from linkcpp.cluster import token
from linkcpp.common.errors import LinkcppError

GOOD = "a" * 43


def test_a_new_token_has_256_bits_and_a_file_for_its_owner_only() -> None:
    made = token.create_token()
    assert len(made) == 43
    assert token.load_token() == made
    assert stat.S_IMODE(token.token_path().stat().st_mode) == 0o600


def test_a_second_token_is_made_only_when_asked_for() -> None:
    first = token.create_token()
    with pytest.raises(LinkcppError, match="already"):
        token.create_token()
    assert token.load_token() == first
    assert token.create_token(replace=True) != first


def test_without_a_token_the_hint_names_the_commands() -> None:
    with pytest.raises(LinkcppError, match=r"token create.*token set"):
        token.load_token()


def test_a_token_that_others_may_read_is_refused_with_a_hint() -> None:
    token.create_token()
    token.token_path().chmod(0o644)
    with pytest.raises(LinkcppError, match=r"mode 0644.*chmod 600"):
        token.load_token()


@pytest.mark.parametrize("text", ["", "short", "a" * 42, "a" * 42 + "\n\n", "ä" * 50, "a b" * 20])
def test_what_cannot_be_a_token_is_refused(text: str) -> None:
    with pytest.raises(LinkcppError, match="not a cluster token"):
        token.store_token(text)


def test_the_variable_names_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINKCPP_TOKEN_FILE", str(tmp_path / "shared"))
    token.store_token(f"  {GOOD}\r\n")
    assert (tmp_path / "shared").read_text() == GOOD + "\n"
    assert token.load_token() == GOOD


def test_another_token_is_replaced_only_when_that_was_asked_for() -> None:
    assert token.store_token(GOOD) is False
    assert token.store_token(GOOD) is False
    other = "b" + GOOD[1:]
    with pytest.raises(LinkcppError, match="another cluster token"):
        token.store_token(other)
    assert token.load_token() == GOOD
    assert token.store_token(other, replace=True) is True
    assert token.load_token() == other


def test_of_many_that_make_the_first_token_at_once_one_does_and_the_others_are_told() -> None:
    made: list[str] = []
    refused: list[str] = []
    barrier = threading.Barrier(8)

    def start() -> None:
        barrier.wait()
        try:
            made.append(token.create_token())
        except LinkcppError as error:
            refused.append(error.message)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [token.load_token()]
    assert len(refused) == 7
    assert [path.name for path in token.token_path().parent.iterdir()] == ["token"]


@given(st.text(), st.text())
def test_tokens_are_equal_exactly_when_their_texts_are(left: str, right: str) -> None:
    assert token.tokens_equal(left, left)
    assert token.tokens_equal(left, right) == (
        left.encode("utf-8", "replace") == right.encode("utf-8", "replace")
    )


def test_the_command_line_makes_shows_and_takes_over_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = CliRunner().invoke
    made = run(app, ["create"])
    assert made.exit_code == 0
    assert token.load_token() not in made.output
    shown = run(app, ["--show"])
    assert shown.output == token.load_token() + "\n"
    assert token.load_token() not in run(app, []).output

    monkeypatch.setenv("LINKCPP_TOKEN_FILE", str(tmp_path / "other-machine"))
    assert run(app, ["set"], input=shown.output).exit_code == 0
    assert token.load_token() + "\n" == shown.output


def test_a_bad_token_on_standard_input_is_one_sentence_and_exit_code_two() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "linkcpp.cli.main", "token", "set"],
        input="nope\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "not a cluster token" in done.stderr
    assert "Traceback" not in done.stderr
