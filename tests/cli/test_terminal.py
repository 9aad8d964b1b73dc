"""What the program does at odd terminals, with odd names and on odd machines, run for real."""

import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.cells import cell_len
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from linkcpp.__main__ import main
from linkcpp.cli.main import app
from linkcpp.cli.output import ProgressLines, console, status_console
from linkcpp.cli.verify import verification_view
from linkcpp.cluster.token import create_token
from linkcpp.common.errors import EXIT_NOT_NOW, LinkcppError
from linkcpp.common.paths import state_folder
from linkcpp.node.diagnosis import Verdict
from linkcpp.node.selfcheck import examine
from linkcpp.verify.records import PromptReport, TextAgreement, VerifyReport, WorkerReport
from linkcpp.worker.agreement import Agreement
from linkcpp.worker.agreement import Verdict as Agreed
from tests.model import gguf_bytes as raw
from tests.support.models import llama

pytestmark = pytest.mark.slow

_PROGRAM = (sys.executable, "-m", "linkcpp")


def run(
    *arguments: str | bytes, environment: dict[str, str] | None = None, stdout: str | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run the program to its end; ``stdout`` names a file instead of a pipe."""
    sink = os.open(stdout, os.O_WRONLY) if stdout else subprocess.PIPE
    try:
        return subprocess.run(
            [*_PROGRAM, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            env={**os.environ, **(environment or {})},
            timeout=300,
            check=False,
        )
    finally:
        if stdout:
            os.close(sink)


def test_a_name_that_looks_like_markup_is_shown_as_it_is(tmp_path: Path) -> None:
    ended = run("inspect", str(tmp_path / "[/red] \\[bold].gguf"))
    assert ended.returncode == 2
    assert "[/red] \\[bold].gguf" in ended.stderr


def test_escape_sequences_of_a_header_do_not_reach_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw.small_model(extra_pairs=[raw.text("split.count", "\x1b[2J\x9b2J")]))
    ended = run("inspect", str(path))
    assert ended.returncode == 2
    assert "2J parts" in ended.stderr
    assert "\x1b" not in ended.stderr
    assert "\x9b" not in ended.stderr


def test_no_text_from_elsewhere_controls_the_terminal(
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    hostile = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e\u2028\x85end\tof\r"
    table = Table("name")
    table.add_row(hostile)
    for screen in (console(100), status_console()):
        screen.print(Text(hostile, style="dim"), table, Panel(hostile), hostile)
    said = "".join(map(bytes.decode, capsysbinary.readouterr()))
    assert said.count("end") == 8
    assert [char for char in said if not char.isprintable() and char != "\n"] == []


@pytest.mark.parametrize("name", [b"esc\x1b[31m\n.gguf", b"bad\xff.gguf"])
def test_a_file_of_any_name_can_be_inspected(tmp_path: Path, name: bytes) -> None:
    path = bytes(tmp_path) + b"/" + name
    os.link(llama(), path)
    for_people = run("inspect", path)
    assert for_people.returncode == 0, for_people.stderr
    assert "\x1b" not in for_people.stdout
    for_programs = run("inspect", "--json", path)
    source = json.loads(for_programs.stdout)["source"]
    assert source.encode("utf-8", "surrogateescape") == path


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_terminal_without_unicode_gets_an_answer_too(options: list[str]) -> None:
    ended = run("inspect", *options, "70B", environment={"PYTHONIOENCODING": "ascii"})
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.isascii()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_output_that_finds_no_room_is_an_error_in_one_sentence(options: list[str]) -> None:
    ended = run("inspect", *options, "70B", stdout="/dev/full")
    assert ended.returncode == EXIT_NOT_NOW
    assert "No space left on device" in ended.stderr
    assert "defect" not in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_the_exit_code_tells_where_the_message_finds_no_room() -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([*_PROGRAM, "inspect", "nope"], stderr=full, check=False)
    assert ended.returncode == EXIT_NOT_NOW


@pytest.mark.parametrize("options", [[], ["--json", "--tensors"]])
def test_a_reader_that_goes_away_is_no_error(options: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [*_PROGRAM, "inspect", *options, "122B"],
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=300,
            check=False,
        )
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_tilde_of_nobody_is_named(tmp_path: Path) -> None:
    for arguments in (("inspect", "~nosuchuser/x.gguf"), ("engine", "check", "~nosuchuser/x")):
        ended = run(*arguments)
        assert ended.returncode == 2
        assert "no home folder for nosuchuser" in ended.stderr


@pytest.mark.parametrize(
    "arguments", [("token", "create"), ("engine", "check"), ("discover", "--no-mdns")]
)
def test_a_name_that_cannot_be_is_an_error_in_one_sentence(arguments: tuple[str, ...]) -> None:
    long = "/" + 300 * "a"
    ended = run(*arguments, environment={"LINKCPP_HOME": long, "LINKCPP_ENGINE": long})
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert "defect" not in ended.stderr


def test_a_token_is_not_read_from_a_closed_input() -> None:
    ended = subprocess.run(
        ["/bin/sh", "-c", f"'{sys.executable}' -m linkcpp token set <&-"],
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 2
    assert b"No cluster token came on standard input" in ended.stderr


def test_ctrl_c_at_a_prompt_ends_with_130() -> None:
    master, slave = pty.openpty()
    # The first terminal that a session's leader opens becomes its own, and sends it Ctrl-C.
    terminal = os.ttyname(slave)
    command = f"exec '{sys.executable}' -m linkcpp token set <{terminal} >{terminal} 2>&1"
    process = subprocess.Popen(["/bin/sh", "-c", command], start_new_session=True)
    try:
        seen = b""
        while b"Token" not in seen:
            seen += os.read(master, 1024)
        os.write(master, b"\x03")
        assert process.wait(120) == 130
    finally:
        process.kill()
        process.wait()
        os.close(slave)
        os.close(master)


class _Impatient:
    """A user who presses Ctrl-C while a module is looked for."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "linkcpp.cli.main":
            raise KeyboardInterrupt


def test_ctrl_c_while_the_program_loads_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "linkcpp.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [_Impatient(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can leave its rights for a moment")
def test_a_home_of_another_user_is_told_by_the_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "llama-server").touch()
    monkeypatch.setenv("LINKCPP_HOME", str(home / "linkcpp"))
    monkeypatch.setenv("LINKCPP_ENGINE", str(home / "llama-server"))
    os.seteuid(12345)
    try:
        found = {item.subject: item for item in examine().observations}
        with pytest.raises(LinkcppError, match="Permission denied"):
            create_token()
    finally:
        os.seteuid(0)
    assert found["state folder"].verdict is Verdict.FAIL
    assert "Permission denied" in found["state folder"].detail
    assert found["cluster token"].verdict is Verdict.FAIL
    assert "no llama.cpp program" in found["engine"].detail


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LINKCPP_HOME")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", _nobody)
    with pytest.raises(LinkcppError, match="no home folder for this user") as refused:
        state_folder()
    assert refused.value.hint is not None
    assert "LINKCPP_HOME" in refused.value.hint


def _nobody(path: Path) -> Path:
    raise RuntimeError(f"no home for {path}")


def test_a_narrow_terminal_gets_every_column_of_the_nodes() -> None:
    create_token()
    ended = run("discover", "--no-mdns", "--node", "127.0.0.1:1", environment={"COLUMNS": "30"})
    assert "NODE" in ended.stdout
    assert "127.0.0.1:1 " in ended.stdout
    assert "unreachable" in ended.stdout


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_tables_of_verify_have_every_column_in_one_line(width: int) -> None:
    with (screen := Console(width=width, file=StringIO())).capture() as shown:
        screen.print(verification_view(_verification()))
    lines = shown.get().splitlines()
    assert all(cell_len(line) <= width for line in lines)
    prompt = next(line for line in lines if "The beg" in line)
    assert prompt.split()[-9:] == [
        *("1234", "1022", "of", "1024", "0.0012", "99.87%", "99.87%", "1.2e-07", "equivalent")
    ]
    worker = next(line for line in lines if line.endswith(" equivalent ") and "0.99" in line)
    assert worker.split()[-6:] == ["48", "12288", "0.999931", "0.0012", "1.2e-07", "equivalent"]


def _verification() -> VerifyReport:
    text = TextAgreement(
        verdict=Agreed.EQUIVALENT,
        prompt_count=1,
        position_count=1024,
        equal_count=1022,
        largest_difference=0.00123,
        top1_share=0.9987,
        top8_share=0.9987,
        mean_divergence=1.234e-07,
        largest_divergence=0.01,
    )
    rows = Agreement(
        verdict=Agreed.EQUIVALENT,
        row_count=12288,
        least_cosine=0.999931,
        largest_difference=0.00123,
        relative_error=1.234e-07,
    )
    worker = WorkerReport(
        name="a-workstation-with-a-long-name",
        state="ready",
        verdict=Agreed.EQUIVALENT,
        against=("worker attic", "worker cellar"),
        agreement=rows,
        layer_count=48,
    )
    return VerifyReport(
        name="mix",
        mode="experts",
        verdict=Agreed.EQUIVALENT,
        summary="equivalent within 0.0012",
        text=text,
        prompts=(
            PromptReport(
                beginning="The beginning of a prompt of 40 letters",
                prompt_tokens=1234,
                agreement=text,
            ),
        ),
        workers=(worker,),
    )


def test_a_terminal_that_tells_no_width_gets_an_answer_too() -> None:
    assert "hidden" in run("inspect", "70B", environment={"COLUMNS": "0"}).stdout


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (("statsu",), "There is no verb 'statsu'", "Did you mean `linkcpp status`?"),
        (("frobnicate",), "There is no verb 'frobnicate'", "`linkcpp --help`"),
        (("status", "--jsn"), "No such option: --jsn", "`linkcpp status --help`"),
        (("engine", "lst"), "No such command 'lst'", "`linkcpp engine --help`"),
        (("inspect", "-c", "x", "122B"), "Invalid value for '-c'", "`linkcpp inspect --help`"),
        (
            ("plan", "-m", "x", "--mode", "layer"),
            "Invalid value for '--mode': 'layer'",
            "mean layers?",
        ),
        (("hub", "token", "create", "--role", "nodes"), "Invalid value for '--role'", "mean node?"),
        (("plan", "-m", "x", "--mode", "qqq"), "Invalid value for '--mode'", "hint: `linkcpp"),
        (("inspect", "12B"), "'12B' is neither a file nor a known preset", "Did you mean 122B? "),
    ],
)
def test_wrong_words_are_told_like_every_other_error(
    words: tuple[str, ...], error: str, hint: str
) -> None:
    ended = run(*words)
    assert ended.returncode == 2
    lines = ended.stderr.splitlines()
    assert lines[0].startswith(f"error: {error}")
    assert lines[1].startswith("hint: ")
    assert hint in lines[1]
    assert ended.stdout == ""


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (("logs", "-f", "--json"), "--follow and --json cannot be given together.", "--json."),
        (("status", "--watch", "--json"), "--watch and --json cannot be", "Omit --watch or"),
        (("status", "--watch", "--metrics"), "--watch and --metrics cannot be", "Omit --watch or"),
        (("inspect", "122B", "--list"), "MODEL and --list cannot be", "Omit MODEL or --list."),
        (("inspect", "122B", "--tensors"), "--tensors is for --json.", "--json"),
        (("launch", "p", "--foreground", "--dry-run"), "--foreground and --dry-run", "Omit"),
        (
            ("plan", "-m", "122B", "--mode", "layers", "--replicas", "2", "--hot", "c.json"),
            "Mode layers does not spread experts, which --replicas asks for.",
            "Omit --replicas and --hot, or plan with --mode experts.",
        ),
        (("plan", "-m", "122B", "--min-nodes", "2", "--hot", "c"), "Mode layers does not", "--hot"),
        (
            ("plan", "-m", "122B", "--nodes", "n", "--node", "10.0.0.5"),
            "--nodes and --node",
            "Omit",
        ),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    words: tuple[str, ...], error: str, hint: str
) -> None:
    ended = CliRunner().invoke(app, words)
    assert isinstance(ended.exception, LinkcppError)
    assert ended.exception.message.startswith(error)
    assert hint in str(ended.exception.hint)


_WITHOUT_EXTRA = """
import sys
sys.modules |= dict.fromkeys(("uvloop", "sqlalchemy", "alembic", "psycopg"))
from linkcpp.cli.main import main
main()
"""


@pytest.mark.parametrize(
    ("words", "option"), [(("gateway", "--hub", "x"), "--url"), (("hub",), "--database")]
)
def test_a_verb_without_its_extra_has_its_help_and_says_what_it_needs_when_it_is_used(
    words: tuple[str, ...], option: str
) -> None:
    def ask(*more: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", _WITHOUT_EXTRA, *words, *more]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)

    described = ask("--help")
    assert described.returncode == 0
    assert option in described.stdout
    refused = ask()
    assert refused.returncode == 2
    assert f"`linkcpp {words[0]}` needs uvloop, which is not installed." in refused.stderr
    assert "[hub]" in refused.stderr


def test_a_verb_that_needs_another_word_shows_them_once() -> None:
    ended = run("engine")
    assert ended.returncode == 2
    assert (ended.stdout + ended.stderr).count("Usage: linkcpp engine") == 1


def test_a_file_name_with_a_slip_is_offered_the_right_one(tmp_path: Path) -> None:
    (tmp_path / "smollm2-q4.gguf").write_bytes(b"")
    ended = run("inspect", str(tmp_path / "smolm2-q4.gguf"))
    assert f"Did you mean {tmp_path / 'smollm2-q4.gguf'}?" in ended.stderr
    elsewhere = run("inspect", str(tmp_path / "none" / "x.gguf"))
    assert f"There is no folder {tmp_path / 'none'}" in elsewhere.stderr


def test_a_log_file_gets_a_line_of_progress_every_ten_seconds_at_most() -> None:
    written = StringIO()
    seconds = iter(range(0, 1000, 4))
    lines = ProgressLines(Console(file=written, width=20), clock=lambda: next(seconds))
    for done in (*range(8), 7):
        lines.tell("comparing [1] prompts", done, 7)
    lines.tell("loading", 0, 1)
    lines.tell("loading", 1, 1)
    counts = [f"comparing [1] prompts: {done} of 7" for done in (0, 3, 6, 7)]
    assert written.getvalue().splitlines() == [*counts, "loading", "loading: done"]


def test_the_set_up_tells_its_usage_and_refuses_other_words_before_it_does_anything(
    tmp_path: Path,
) -> None:
    program = _copied_setup(tmp_path)
    usage = subprocess.run([program, "--help"], capture_output=True, text=True, check=True)
    assert usage.stdout.startswith("Usage: bin/setup [demo|test|source-engine]")
    wrong = subprocess.run([program, "tets"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "does not know 'tets'" in wrong.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"bin"}


def test_two_set_ups_in_one_checkout_wait_for_each_other(tmp_path: Path) -> None:
    lock = tmp_path / ".venv.lock"
    lock.symlink_to(f"process-{os.getpid()}")
    # A Python that only fails: how the set-up ends shows that its turn has come.
    environment = {**os.environ, "PATH": "/usr/bin:/bin"}
    (tmp_path / "python").write_text(
        "#!/bin/sh\ncase $1 in -c | --version) exit 0 ;; esac; exit 1\n"
    )
    (tmp_path / "python").chmod(0o755)
    process = subprocess.Popen(
        [_copied_setup(tmp_path)],
        env={**environment, "PYTHON": str(tmp_path / "python")},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "waiting for it" in process.stderr.readline()
    lock.unlink()
    lock.symlink_to("process-999999999")  # left by one that was killed
    _, told = process.communicate(timeout=120)
    assert "could not make a virtual environment" in told
    assert not lock.is_symlink()


def _copied_setup(folder: Path) -> Path:
    program = folder / "bin" / "setup"
    program.parent.mkdir()
    shutil.copy(Path(__file__).parents[2] / "bin" / "setup", program)
    return program


def commands_below(command: Any, context: Any) -> Iterator[tuple[str, str]]:
    """Yield each verb with its help."""
    yield context.command_path, command.get_help(context)
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        below = command.get_command(context, name)
        yield from commands_below(below, type(context)(below, info_name=name, parent=context))


def test_no_flag_looks_as_if_it_took_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    root = typer.main.get_command(app)
    shown = {}
    for name, returned in commands_below(root, root.make_context("linkcpp", ["status"])):
        shown[name] = returned + capsys.readouterr().out
    assert "--json" in shown["linkcpp hub token create"]
    assert [name for name, text in shown.items() if "bool" in text] == []
