"""``linkcpp doctor``: says what is here, what is missing, and what to do about it."""

import errno
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from linkcpp.cli.doctor import app
from linkcpp.cluster.token import create_token, token_path
from linkcpp.common.paths import cache_folder, config_folder, data_folder
from linkcpp.engine import binaries
from linkcpp.engine.records import Engine, EngineLocation, EngineProblem
from linkcpp.model.slices.checked import is_as_checked, note_checked
from linkcpp.node.diagnosis import Verdict
from linkcpp.node.selfcheck import judge_engines, look_at_folders
from linkcpp.node.selfcheck_network import look_at_agent
from linkcpp.registry.credentials import save_credentials
from tests.hub.weights.test_adding import hub_models
from tests.model.test_backbone import hollow
from tests.model.test_slices import cut, flip
from tests.registry.test_credentials import credentials
from tests.support.models import qwen3moe

_LOCATION = EngineLocation(llama_server=Path("/e/llama-server"), rpc_server=None, found_by="test")
_BROKEN = Engine(
    location=_LOCATION,
    fingerprint=None,
    problem=EngineProblem(code="crashed", message="It crashed.", hint="Get another."),
)
_GOOD = Engine(location=_LOCATION, fingerprint=None)


@pytest.fixture(autouse=True)
def only_the_stock_engine(
    stock_engine: EngineLocation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert stock_engine.llama_server is not None
    monkeypatch.setattr(binaries, "ENGINE_PACKAGES", ())
    monkeypatch.setattr(binaries, "_usual_places", lambda: iter(()))
    monkeypatch.setenv("PATH", str(stock_engine.llama_server.parent))
    monkeypatch.delenv("LINKCPP_ENGINE", raising=False)


def _examine(*words: str) -> tuple[int, dict[str, dict[str, str]]]:
    result = CliRunner().invoke(app, ["--json", *words])
    observations = json.loads(result.stdout)["observations"]
    return result.exit_code, {item["subject"]: item for item in observations}


def test_a_deep_look_reads_all_that_is_kept_of_models(tmp_path: Path) -> None:
    slice_path = data_folder() / "slices" / ("0" * 32) / "slice.gguf"
    hollow_path = cache_folder() / "experts" / "some" / "backbone.gguf"
    slice_path.parent.mkdir(parents=True)
    cut(qwen3moe(), slice_path, "0:0-3")
    hollow(qwen3moe(), hollow_path)
    model = Path(shutil.copy(qwen3moe(), tmp_path))
    hub = data_folder() / "hub"
    for words in ((str(model), "--name", "here"), (str(model), "--name", "copied", "--copy")):
        hub_models(hub, "add", *words)
    told = _examine("--deep")[1]
    assert told["slices and backbones"]["detail"].startswith("all 2 are as they were written")
    assert told["hub's models"]["detail"].startswith("all 2 are")
    # A disk tells nothing of what it lost by itself.
    for path in (slice_path, model):
        before = path.stat()
        flip(path, before.st_size - 40)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    note_checked(slice_path)
    code, told = _examine("--deep")
    assert code == 0
    assert f"{slice_path}: expert 3 of blk.0" in told["damaged file"]["detail"]
    assert told["hub's model"]["detail"].startswith("here: Its files have other bytes")
    assert not is_as_checked(slice_path)


def test_a_machine_with_engine_and_token_is_fine() -> None:
    create_token()
    code, told = _examine()
    assert code == 0
    assert told["engine"]["verdict"] == "ok"
    assert "RPC 4.0.3" in told["engine"]["detail"]
    assert told["cluster token"]["verdict"] == "ok"
    assert told["device CPU"]["verdict"] in ("ok", "warn")
    assert {"Python", "linkcpp", "settings", "state folder", "local network"} <= told.keys()


def test_people_get_a_table_with_the_hint() -> None:
    result = CliRunner().invoke(app, [], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "This machine has no cluster token." in result.stdout
    assert "-> `linkcpp token create`" in result.stdout


def test_a_joined_hub_is_named_and_makes_up_for_a_missing_token() -> None:
    save_credentials(credentials("http://127.0.0.1:9"))
    code, told = _examine()
    assert code == 0
    assert told["cluster token"]["verdict"] == "ok"
    assert told["hub"]["verdict"] == "warn"
    assert told["hub"]["detail"] == "http://127.0.0.1:9, joined as node: does not answer"


def test_no_engine_is_a_failure_with_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    code, told = _examine()
    assert code == 2
    assert told["engine"]["verdict"] == "fail"
    assert "linkcpp engine install" in told["engine"]["hint"]


def test_a_token_that_others_can_read_is_a_failure() -> None:
    create_token()
    token_path().chmod(0o644)
    code, told = _examine()
    assert code == 2
    assert told["cluster token"]["verdict"] == "fail"
    assert "chmod 600" in told["cluster token"]["hint"]


def test_broken_settings_are_a_failure_and_the_rest_is_still_looked_at() -> None:
    config_folder().mkdir(parents=True)
    (config_folder() / "config.toml").write_text("nonsense = 1\n")
    code, told = _examine()
    assert code == 2
    assert told["settings"]["verdict"] == "fail"
    assert told["device CPU"]["detail"]


def test_a_folder_that_cannot_be_made_is_a_failure(linkcpp_home: Path) -> None:
    linkcpp_home.write_text("a file where a folder should be")
    observations = look_at_folders()
    assert {item.verdict for item in observations} == {Verdict.FAIL}
    assert {item.hint for item in observations} == {"Set LINKCPP_HOME to another folder."}


def test_a_folder_on_a_full_disk_is_not_to_be_made_writable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: Path, __: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    hints = {item.hint for item in look_at_folders()}
    assert hints == {"Free some space, or set LINKCPP_HOME to another folder."}


def test_a_broken_engine_beside_a_good_one_is_only_a_warning() -> None:
    assert [item.verdict for item in judge_engines([_BROKEN, _GOOD])] == [
        Verdict.WARN,
        Verdict.OK,
    ]
    (alone,) = judge_engines([_BROKEN])
    assert alone.verdict is Verdict.FAIL
    assert alone.hint == "Get another."


async def test_another_program_on_the_agents_port_is_a_warning() -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        told = await look_at_agent(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
    assert told.verdict is Verdict.WARN
    assert "another program" in told.detail


def _start_agent() -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "linkcpp.cli.main", "node"),
            *("--host", "127.0.0.1", "--port", "0", "--no-mdns"),
        ],
        env={**os.environ, "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
            return process, int(found[1])
    raise AssertionError(f"the node agent ended with {process.wait()}")


async def test_a_running_agent_is_found_and_one_with_an_old_token_is_a_failure() -> None:
    create_token()
    agent, port = _start_agent()
    try:
        told = await look_at_agent(port)
        create_token(replace=True)
        told_after_new_token = await look_at_agent(port)
        token_path().unlink()
        told_without_token = await look_at_agent(port, has_hub=True)
    finally:
        agent.terminate()
        agent.communicate()
    assert told.verdict is Verdict.OK
    assert told.detail.startswith("runs as ")
    assert told_after_new_token.verdict is Verdict.FAIL
    assert told_after_new_token.hint is not None
    assert "Restart `linkcpp node`" in told_after_new_token.hint
    assert told_without_token.verdict is Verdict.OK
    assert "no cluster token here" in told_without_token.detail
    told_after_its_end = await look_at_agent(port)
    assert told_after_its_end.verdict is Verdict.OK
    assert told_after_its_end.detail == "does not run here"
