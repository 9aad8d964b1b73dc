"""What a check found is remembered, and which engine is chosen by it."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from linkcpp.common.errors import LinkcppError
from linkcpp.common.paths import cache_folder
from linkcpp.engine import binaries, check
from linkcpp.engine.binaries import find_engines
from linkcpp.engine.check import check_engine, choose_engine
from linkcpp.engine.problems import ProblemCode
from linkcpp.engine.records import Engine, EngineLocation
from linkcpp.engine.tiny_model import tiny_model
from linkcpp.engine.trial import run_trial
from tests.engine.find_support import (
    copy_engine,
    write_program,
    write_shell_program,
)


def _location(folder: Path) -> EngineLocation:
    return find_engines(folder)[0]


def _count_trials(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    real = run_trial
    lock = threading.Lock()

    def counted(*arguments: object) -> object:
        with lock:
            calls.append(1)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(check, "run_trial", counted)
    return calls


def test_a_good_check_is_remembered_until_it_is_refreshed(
    stock_engine: EngineLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _count_trials(monkeypatch)
    first = check_engine(stock_engine)
    again = check_engine(stock_engine)
    assert len(calls) == 1
    assert again.fingerprint == first.fingerprint
    check_engine(stock_engine, refresh=True)
    assert len(calls) == 2


def test_a_check_is_made_again_on_another_cpu(
    stock_engine: EngineLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_engine(stock_engine)
    checks: list[EngineLocation] = []
    whole = check.examine_engine

    def examine(location: EngineLocation) -> object:
        checks.append(location)
        return whole(location)

    monkeypatch.setattr(check, "examine_engine", examine)
    check_engine(stock_engine)
    assert not checks
    monkeypatch.setattr(check, "cpu_flags", lambda: frozenset({"fpu"}))
    check_engine(stock_engine)
    assert checks


def test_a_changed_library_makes_the_check_stale(
    stock_engine: EngineLocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _count_trials(monkeypatch)
    location = _location(copy_engine(stock_engine, tmp_path / "engine"))
    assert check_engine(location).problem is None
    assert location.llama_server is not None
    location.llama_server.unlink()
    write_program(location.llama_server, "os.kill(os.getpid(), signal.SIGILL)")
    problem = check_engine(location).problem
    assert problem is not None
    assert problem.code == ProblemCode.ILLEGAL_INSTRUCTION
    assert len(calls) == 1


def test_a_failed_check_is_not_remembered(stock_engine: EngineLocation, tmp_path: Path) -> None:
    folder = copy_engine(stock_engine, tmp_path / "engine", without="libllama-server-impl")
    location = _location(folder)
    assert check_engine(location).problem is not None
    for folder_of_libraries in stock_engine.library_folders:
        for library in folder_of_libraries.glob("libllama-server-impl*"):
            shutil.copy(library, folder / library.name)
    assert check_engine(location).problem is None


def test_a_damaged_memory_of_a_check_is_made_again(stock_engine: EngineLocation) -> None:
    check_engine(stock_engine)
    (stored,) = (cache_folder() / "engines").glob("*.json")
    stored.write_text('{"stamp": "x"')
    assert check_engine(stock_engine).problem is None


def test_checks_at_the_same_time_run_the_engine_once(
    stock_engine: EngineLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _count_trials(monkeypatch)
    with ThreadPoolExecutor(4) as pool:
        checked = list(pool.map(lambda _: check_engine(stock_engine), range(4)))
    assert [engine.problem for engine in checked] == [None] * 4
    assert len(calls) == 1


def test_proxies_and_keys_of_the_environment_do_not_disturb_a_check(
    stock_engine: EngineLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://192.0.2.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://192.0.2.1:9")
    monkeypatch.setenv("LLAMA_API_KEY", "something else")
    assert check_engine(stock_engine).problem is None


def test_a_damaged_tiny_model_is_mended(stock_engine: EngineLocation) -> None:
    path = tiny_model()
    whole = path.read_bytes()
    assert len(whole) < 10**6
    path.write_bytes(whole[:1000])
    assert check_engine(stock_engine).problem is None
    assert path.read_bytes() == whole


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(binaries, "ENGINE_PACKAGES", ())
    monkeypatch.setattr(binaries, "_usual_places", lambda: iter(()))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("LINKCPP_ENGINE", raising=False)


@pytest.mark.usefixtures("bare_machine")
def test_the_first_engine_that_works_is_chosen(
    stock_engine: EngineLocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stock_engine.llama_server is not None
    write_shell_program(tmp_path / "bad" / "llama-server", "kill -ILL $$")
    good = stock_engine.llama_server.parent
    monkeypatch.setenv("PATH", f"{tmp_path / 'bad'}:{good}")
    assert choose_engine().location.llama_server == stock_engine.llama_server


@pytest.mark.usefixtures("bare_machine")
def test_a_named_engine_is_not_replaced_by_another(
    stock_engine: EngineLocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stock_engine.llama_server is not None
    write_shell_program(tmp_path / "bad" / "llama-server", "kill -ILL $$")
    monkeypatch.setenv("PATH", str(stock_engine.llama_server.parent))
    with pytest.raises(LinkcppError, match=r"No engine works here.*illegal instruction"):
        choose_engine(tmp_path / "bad")


@pytest.mark.usefixtures("bare_machine")
def test_no_engine_at_all_tells_the_hint() -> None:
    with pytest.raises(LinkcppError, match=r"no llama\.cpp programs") as raised:
        choose_engine()
    assert raised.value.hint is not None
    assert "linkcpp engine install" in raised.value.hint


def test_the_record_of_a_check_survives_json(engine: EngineLocation) -> None:
    checked = check_engine(engine)
    assert Engine.model_validate_json(checked.model_dump_json()) == checked
