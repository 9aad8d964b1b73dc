"""Supervision with real programs: readiness, restarts, stops, and nothing left behind."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from linkcpp.common.errors import LinkcppError
from linkcpp.engine import liveness
from linkcpp.engine import process as process_module
from linkcpp.engine import rpc_server as rpc_server_module
from linkcpp.engine.process import SupervisedProcess, tail_log
from linkcpp.engine.process_spec import (
    ProcessSpec,
    ProcessState,
    ProcessStatus,
    RestartPolicy,
)
from linkcpp.engine.records import EngineLocation
from linkcpp.engine.rpc_server import rpc_server_spec, start_rpc_server
from tests.support.ports import free_port
from tests.support.rpc_client import RpcClient

QUICK = RestartPolicy(limit=2, first_delay_seconds=0.01, largest_delay_seconds=0.02)
SUPERVISOR = Path(__file__).parents[1] / "support" / "supervisor.py"


def python(tmp_path: Path, code: str, **more: object) -> ProcessSpec:
    spec = ProcessSpec(
        name="program", argv=(sys.executable, "-u", "-c", code), log_path=tmp_path / "log"
    )
    return spec.model_copy(update=more)


def wait_gone(pids: list[int]) -> None:
    """Wait for processes that are to end by themselves; the test's time limit is the only one."""
    while any(psutil.pid_exists(pid) and not is_zombie(pid) for pid in pids):
        time.sleep(0.02)


def is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_a_stopped_program_is_noticed_and_ended_and_whoever_waits_is_told(
    engine: EngineLocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(liveness, "STOPPED_SECONDS", 0.2)
    server = await start_rpc_server(engine, device="CPU", log_path=tmp_path / "log", threads=1)
    assert server.process.pid is not None
    os.kill(server.process.pid, signal.SIGSTOP)
    status = await server.process.wait()
    assert status.state is ProcessState.FAILED
    assert "hung: a signal stopped it" in (status.detail or "")


@pytest.mark.slow
async def test_a_program_that_answers_nobody_and_does_nothing_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(liveness, "SILENT_SECONDS", 0.3)

    async def is_silent() -> bool:
        return False

    process = SupervisedProcess(
        python(tmp_path, "import time; print('go'); time.sleep(600)", ready_pattern="go"),
        probe=is_silent,
    )
    process.start()
    status = await process.wait()
    assert status.state is ProcessState.FAILED
    assert "neither answered nor computed" in (status.detail or "")


async def test_a_stopped_program_ends_at_once_when_it_is_told_to(tmp_path: Path) -> None:
    code = "import time; print('go'); time.sleep(600)"
    spec = python(tmp_path, code, ready_pattern="go", stop_timeout_seconds=600.0)
    process = SupervisedProcess(spec)
    process.start()
    await process.wait_ready()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    await process.stop()
    assert process.status.state is ProcessState.STOPPED


async def test_a_stopped_keeper_ends_its_program_at_once_when_it_is_told_to(tmp_path: Path) -> None:
    code = "import time; print('go'); time.sleep(600)"
    spec = python(tmp_path, code, ready_pattern="go", stop_timeout_seconds=600.0)
    process = SupervisedProcess(spec)
    process.start()
    await process.wait_ready()
    pid = process.pid
    assert pid is not None
    psutil.Process(psutil.Process(pid).ppid()).suspend()
    await process.stop()
    assert process.status.state is ProcessState.STOPPED
    wait_gone([pid])


async def test_an_rpc_server_gets_ready_and_serves(engine: EngineLocation, tmp_path: Path) -> None:
    changes: list[ProcessStatus] = []
    server = await start_rpc_server(
        engine, device="CPU", log_path=tmp_path / "log", threads=1, on_change=changes.append
    )
    pid = server.process.pid
    assert pid is not None
    try:
        async with await RpcClient.connect("127.0.0.1", server.port) as client:
            assert await client.device_count() == 1
    finally:
        await server.process.stop()
    wait_gone([pid])
    assert [change.state for change in changes] == ["starting", "ready", "stopped"]
    assert any("Starting RPC server" in line for line in tail_log(tmp_path / "log", 100))


async def test_a_client_that_leaves_while_it_waits_does_not_end_the_server(
    engine: EngineLocation, tmp_path: Path
) -> None:
    server = await start_rpc_server(engine, device="CPU", log_path=tmp_path / "log", threads=1)
    try:
        async with await RpcClient.connect("127.0.0.1", server.port) as client:
            waiting = socket.create_connection(("127.0.0.1", server.port))
            waiting.sendall(b"\x0e" + (24).to_bytes(8, "little") + bytes(24))
            waiting.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1] + [0] * 7))
            waiting.close()
            assert await client.device_count() == 1
        async with await RpcClient.connect("127.0.0.1", server.port) as client:
            assert await client.device_count() == 1
        assert server.process.status.state is ProcessState.READY
    finally:
        await server.process.stop()


async def test_a_taken_port_is_answered_with_another(
    engine: EngineLocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], free_port()])
        monkeypatch.setattr(rpc_server_module, "free_port", lambda: next(ports))
        server = await start_rpc_server(engine, device="CPU", log_path=tmp_path / "log", threads=1)
        assert server.port != taken.getsockname()[1]
        await server.process.stop()


async def test_a_taken_port_is_never_taken_for_readiness(
    engine: EngineLocation, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        spec = rpc_server_spec(
            engine, device="CPU", port=taken.getsockname()[1], log_path=tmp_path / "log", threads=1
        )
        process = SupervisedProcess(spec)
        process.start()
        with pytest.raises(LinkcppError, match="Failed to create server socket"):
            await process.wait_ready()


async def test_an_engine_without_rpc_server_is_told(stock_engine: EngineLocation) -> None:
    location = stock_engine.model_copy(update={"rpc_server": None})
    with pytest.raises(LinkcppError, match="no ggml-rpc-server"):
        await start_rpc_server(location, device="CPU", log_path=Path("log"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_stays_when_the_supervisor_is_killed(
    engine: EngineLocation, tmp_path: Path, number: signal.Signals
) -> None:
    supervisor = subprocess.Popen(
        [sys.executable, str(SUPERVISOR), str(engine.rpc_server), str(engine.library_folders[0]),
         str(tmp_path)],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert supervisor.stdout is not None
    pids = json.loads(supervisor.stdout.readline())
    family = [child.pid for child in psutil.Process(supervisor.pid).children(recursive=True)]
    assert len(family) == 4
    assert set(pids) < set(family)
    supervisor.send_signal(number)
    supervisor.wait()
    wait_gone(family)
    supervisor.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_nothing_stays_when_the_supervisor_of_stopped_keepers_is_killed(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    supervisor = subprocess.Popen(
        [sys.executable, str(SUPERVISOR), str(stock_engine.rpc_server),
         str(stock_engine.library_folders[0]), str(tmp_path)],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert supervisor.stdout is not None
    supervisor.stdout.readline()
    family = psutil.Process(supervisor.pid).children(recursive=True)
    for keeper in psutil.Process(supervisor.pid).children():
        keeper.suspend()
    supervisor.kill()
    supervisor.wait()
    wait_gone([process.pid for process in family])
    supervisor.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
async def test_nothing_stays_when_a_keeper_is_killed(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    server = await start_rpc_server(
        stock_engine, device="CPU", log_path=tmp_path / "log", threads=1
    )
    pid = server.process.pid
    assert pid is not None
    psutil.Process(psutil.Process(pid).ppid()).kill()
    status = await server.process.wait()
    wait_gone([pid])
    assert status.state is ProcessState.FAILED
    assert status.detail == "lost its keeper and was ended with it"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
async def test_not_even_a_stubborn_program_outlives_a_killed_keeper(tmp_path: Path) -> None:
    code = """
import signal, time
for number in (signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
print('up')
time.sleep(600)
"""
    process = SupervisedProcess(python(tmp_path, code, ready_pattern="^up"))
    process.start()
    await process.wait_ready()
    pid = process.pid
    assert pid is not None
    psutil.Process(psutil.Process(pid).ppid()).kill()
    await process.wait()
    wait_gone([pid])


async def test_a_killed_program_is_told_and_not_restarted_without_leave(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    server = await start_rpc_server(
        stock_engine, device="CPU", log_path=tmp_path / "log", threads=1
    )
    assert server.process.pid is not None
    os.kill(server.process.pid, signal.SIGILL)
    status = await server.process.wait()
    assert status.state is ProcessState.FAILED
    assert status.detail is not None
    assert status.detail.startswith("died of SIGILL")


async def test_a_failing_program_is_restarted_up_to_its_limit(tmp_path: Path) -> None:
    changes: list[ProcessStatus] = []
    process = SupervisedProcess(
        python(tmp_path, "print('error: bad luck'); exit(7)", ready_pattern="up", restart=QUICK),
        on_change=changes.append,
    )
    process.start()
    with pytest.raises(LinkcppError, match="exited with 7: error: bad luck"):
        await process.wait_ready()
    states = [change.state for change in changes if change.pid is None]
    assert states.count(ProcessState.BACKING_OFF) == 2
    assert process.status.restart_count == 2
    assert tail_log(tmp_path / "log", 9) == ["error: bad luck"] * 3


async def test_a_restarted_program_gets_ready_again(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    code = f"""
import pathlib, time
flag = pathlib.Path({str(flag)!r})
first = not flag.exists()
flag.touch()
if first: exit(1)
print('up')
time.sleep(600)
"""
    process = SupervisedProcess(python(tmp_path, code, ready_pattern="^up$", restart=QUICK))
    process.start()
    await process.wait_ready()
    assert process.status.restart_count == 1
    await process.stop()


async def test_stop_during_back_off_does_not_wait_for_it(tmp_path: Path) -> None:
    patient = RestartPolicy(limit=9, first_delay_seconds=900, largest_delay_seconds=900)
    spec = python(tmp_path, "exit(1)", ready_pattern="up", restart=patient)
    backs_off = asyncio.Event()

    def see(now: ProcessStatus) -> None:
        if now.state is ProcessState.BACKING_OFF:
            backs_off.set()

    process = SupervisedProcess(spec, on_change=see)
    process.start()
    await backs_off.wait()
    await process.stop()
    assert process.status.state is ProcessState.STOPPED


async def test_stop_twice_at_once_and_again_afterwards(tmp_path: Path) -> None:
    process = SupervisedProcess(python(tmp_path, "import time; time.sleep(600)"))
    process.start()
    await process.wait_ready()
    await asyncio.gather(process.stop(), process.stop())
    await process.stop()
    assert process.status.state is ProcessState.STOPPED
    assert process.pid is None


async def test_stop_before_start(tmp_path: Path) -> None:
    process = SupervisedProcess(python(tmp_path, "pass"))
    await process.stop()
    assert process.status.state is ProcessState.STOPPED
    with pytest.raises(LinkcppError, match="was stopped"):
        await process.wait_ready()
    with pytest.raises(RuntimeError):
        process.start()


async def test_a_program_that_ignores_sigterm_is_ended_with_its_children(tmp_path: Path) -> None:
    code = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, '-c', '''
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)'''])
print('child', child.pid)
time.sleep(600)
"""
    spec = python(tmp_path, code, ready_pattern="^child", stop_timeout_seconds=0.2)
    process = SupervisedProcess(spec)
    process.start()
    await process.wait_ready()
    pid = process.pid
    assert pid is not None
    child = int(process.recent_lines[-1].split()[1])
    await process.stop()
    wait_gone([pid, child])
    assert process.status.state is ProcessState.STOPPED


async def test_what_a_program_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    code = """
import subprocess, sys
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
print('child', child.pid)
"""
    process = SupervisedProcess(python(tmp_path, code))
    process.start()
    status = await process.wait()
    assert status.detail is not None
    assert status.detail.startswith("exited with 0")
    wait_gone([int(process.recent_lines[-1].split()[1])])


async def test_a_missing_program_is_told_and_not_retried(tmp_path: Path) -> None:
    spec = ProcessSpec(
        name="program", argv=("/nowhere/llama-server",), log_path=tmp_path / "log", restart=QUICK
    )
    process = SupervisedProcess(spec)
    process.start()
    with pytest.raises(LinkcppError, match="/nowhere/llama-server: No such file"):
        await process.wait_ready()
    assert process.status.restart_count == 0


async def test_a_missing_library_is_told_and_not_retried(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    folder = tmp_path / "engine"
    folder.mkdir()
    assert stock_engine.rpc_server is not None
    program = folder / "ggml-rpc-server"
    program.write_bytes(stock_engine.rpc_server.read_bytes())
    program.chmod(0o755)
    location = EngineLocation(llama_server=None, rpc_server=program, found_by="test")
    spec = rpc_server_spec(location, device="CPU", port=free_port(), log_path=tmp_path / "log")
    process = SupervisedProcess(spec.model_copy(update={"restart": QUICK}))
    process.start()
    with pytest.raises(LinkcppError, match=r"misses the shared library libggml.*\.so"):
        await process.wait_ready()
    assert process.status.restart_count == 0


async def test_a_program_that_never_gets_ready_is_ended_and_told(tmp_path: Path) -> None:
    code = "import time; print('still loading'); time.sleep(600)"
    spec = python(tmp_path, code, ready_pattern="^up", ready_timeout_seconds=1.0)
    process = SupervisedProcess(spec)
    process.start()
    with pytest.raises(LinkcppError, match=r"not ready within 1 s.*still loading"):
        await process.wait_ready()


async def test_lines_come_at_once_and_in_order(tmp_path: Path) -> None:
    code = "for i in range(1000): print('line', i)"
    got: list[str] = []
    process = SupervisedProcess(python(tmp_path, code), on_line=got.append)
    process.start()
    await process.wait()
    assert got == [f"line {number}" for number in range(1000)]


async def test_the_log_stays_bounded(tmp_path: Path) -> None:
    code = "for i in range(40000): print(f'{i:06}', 'x' * 92)"
    spec = python(tmp_path, code, log_bytes=300_000)
    process = SupervisedProcess(spec)
    process.start()
    await process.wait()
    for name in ("log", "log.1"):
        assert 0 < os.stat(tmp_path / name).st_size <= 300_000  # noqa: PTH116
    assert tail_log(tmp_path / "log", 3000)[-1].startswith("039999")


async def test_a_blocked_supervisor_does_not_slow_the_program(tmp_path: Path) -> None:
    done = tmp_path / "done"
    code = f"""
import pathlib
for i in range(20000): print('x' * 100)
print('the end')
pathlib.Path({str(done)!r}).touch()
"""
    process = SupervisedProcess(python(tmp_path, code))
    process.start()
    await process.wait_ready()
    while not done.exists():
        time.sleep(0.01)  # noqa: ASYNC251 - the event loop is to be blocked
    await process.wait()
    # What was lost is the oldest, in whole lines: the last words are what explains an end.
    assert set(process.recent_lines[:-1]) == {"x" * 100}
    assert process.recent_lines[-1] == "the end"


async def test_the_program_gets_its_environment_and_ignores_sigpipe(tmp_path: Path) -> None:
    code = """
import os, signal, sys
print(os.environ['COLOUR'], os.environ['NO_COLOR'], sys.stdout.isatty(), sys.stdin.read() == '')
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, os.getsid(0) == os.getpid())
print([line for line in open('/proc/self/status') if line.startswith('SigIgn')][0].split()[1])
"""
    spec = python(tmp_path, code, environment={"COLOUR": "red"}, library_folders=(tmp_path,))
    process = SupervisedProcess(spec)
    process.start()
    await process.wait()
    first, second, ignored = process.recent_lines
    assert first == "red 1 True True"
    assert second == "True True"
    assert int(ignored, 16) & 1 << (signal.SIGPIPE - 1)


async def test_the_keeper_is_small(stock_engine: EngineLocation, tmp_path: Path) -> None:
    server = await start_rpc_server(
        stock_engine, device="CPU", log_path=tmp_path / "log", threads=1
    )
    assert server.process.pid is not None
    keeper = psutil.Process(psutil.Process(server.process.pid).ppid())
    assert keeper.memory_info().rss < 16 * 2**20
    await server.process.stop()


async def test_a_cancelled_supervisor_leaves_nothing(tmp_path: Path) -> None:
    process = SupervisedProcess(python(tmp_path, "import time; time.sleep(600)"))
    process.start()
    await process.wait_ready()
    pid = process.pid
    assert pid is not None
    assert process._task is not None
    process._task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await process._task
    wait_gone([pid])
    with pytest.raises(LinkcppError, match="no longer supervised"):
        await process.wait_ready()


def test_a_loop_that_ends_without_stop_waits_for_the_end_of_its_programs(tmp_path: Path) -> None:
    async def start_and_leave() -> int:
        process = SupervisedProcess(python(tmp_path, "import time; time.sleep(600)"))
        process.start()
        await process.wait_ready()
        assert process.pid is not None
        return process.pid

    assert not psutil.pid_exists(asyncio.run(start_and_leave()))
