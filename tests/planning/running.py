"""Start llama-server over real rpc-servers as a plan says, and read what it allocates."""

import contextlib
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from linkcpp.engine.records import EngineLocation
from linkcpp.planning.arguments import server_arguments
from linkcpp.planning.records import Plan, Stage
from tests.model.server_log import _without_mmap
from tests.support.ports import free_port

_SIZE = re.compile(
    r"(load_tensors|llama_kv_cache|llama_memory_recurrent|sched_reserve|llama_context): +"
    r"(\S+) +(model|KV|RS|compute|output) buffer size = +([\d.]+) MiB"
)
_READY = "listening on http"
_SLOWEST_START_SECONDS = 300.0


class Allocated:
    """Buffer sizes of one device in MiB, as the log has them."""

    def __init__(self) -> None:
        self.weights = 0.0
        self.kv = 0.0
        self.recurrent = 0.0
        self.compute = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.kv + self.recurrent + self.compute


def run_plan(engine: EngineLocation, model: Path, plan: Plan) -> tuple[list[Allocated], Allocated]:
    """Return what each stage's device allocates, and what the coordinator's CPU does."""
    with contextlib.ExitStack() as stack:
        endpoints = {
            index: stack.enter_context(_rpc_server(engine))
            for index, stage in enumerate(plan.stages)
            if not stage.is_coordinator
        }
        command = [
            str(engine.llama_server), "-m", str(model), "--host", "127.0.0.1",
            "--port", str(free_port()), "-lv", "4", "-t", "1", "--no-warmup",
            *_without_mmap(engine), *server_arguments(plan, endpoints),
        ]  # fmt: skip
        log = _log_until_ready(command, engine)
    devices: dict[str, Allocated] = {}
    for _, device, kind, size in _SIZE.findall(log):
        seen = devices.setdefault(device, Allocated())
        if kind == "model":
            seen.weights += float(size)
        elif kind == "KV":
            seen.kv += float(size)
        elif kind == "RS":
            seen.recurrent += float(size)
        elif kind == "output":
            seen.compute += float(size)
        else:  # reserved again where the graph changed: the last counts
            seen.compute += float(size)
    host = devices.get("CPU", Allocated())
    stages = [
        host if stage.is_coordinator else devices[f"RPC0[{endpoints[index]}]"]
        for index, stage in enumerate(plan.stages)
    ]
    return stages, host


def describe(stage: Stage) -> str:
    return f"{stage.node_name} {stage.first_layer}+{stage.layer_count} output={stage.holds_output}"


def _log_until_ready(command: list[str], engine: EngineLocation) -> str:
    process = subprocess.Popen(
        command,
        env=_environment(engine),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    clock = threading.Timer(_SLOWEST_START_SECONDS, process.kill)
    clock.start()
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if _READY in line:
                return "".join(lines)
    finally:
        clock.cancel()
        process.kill()
        process.wait()
        process.stdout.close()
    raise AssertionError("llama-server did not get ready:\n" + "".join(lines[-40:]))


@contextlib.contextmanager
def _rpc_server(engine: EngineLocation) -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen(
        [str(engine.rpc_server), "-H", "127.0.0.1", "-p", str(port), "-t", "1", "-d", "CPU"],
        env=_environment(engine),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        restore_signals=False,
    )
    assert process.stdout is not None
    try:
        _await_listening(process, port)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _await_listening(process: subprocess.Popen[str], port: int) -> None:
    """Look the port up in the kernel's table: a connection would use up the server's one client."""
    end = time.monotonic() + _SLOWEST_START_SECONDS
    wanted = f"0100007F:{port:04X}"
    while time.monotonic() < end and process.poll() is None:
        rows = Path("/proc/net/tcp").read_text().splitlines()[1:]
        if any(row.split()[1] == wanted and row.split()[3] == "0A" for row in rows):
            return
        time.sleep(0.02)
    raise AssertionError(f"ggml-rpc-server does not listen on port {port}")


def _environment(engine: EngineLocation) -> dict[str, str]:
    folders = os.pathsep.join(str(folder) for folder in engine.library_folders)
    return os.environ | {"LD_LIBRARY_PATH": folders}
