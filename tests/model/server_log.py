"""Run llama-server until it has told its buffer sizes, and read them from its log."""

import contextlib
import os
import re
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil

from linkcpp.engine.records import EngineLocation
from tests.support.ports import free_port

_MODEL = re.compile(r"load_tensors: +(\S+) model buffer size = +([\d.]+) MiB")
_CACHE = re.compile(r"llama_kv_cache: +(\S+) KV buffer size = +([\d.]+) MiB")
_STATE = re.compile(r"llama_memory_recurrent: +(\S+) RS buffer size = +([\d.]+) MiB")
_OFFLOADED = re.compile(r"offloaded (\d+)/(\d+) layers")
_ENOUGH = "compute buffer size"
_SLOWEST_START_SECONDS = 300.0


class BufferSizes:
    """What a log says, in MiB as it is printed: device to sizes in the order of the lines."""

    def __init__(self, log: str) -> None:
        self.log = log
        self.model = _by_device(_MODEL, log)
        self.cache = _by_device(_CACHE, log)
        self.state = _by_device(_STATE, log)
        match = _OFFLOADED.search(log)
        self.layers_and_output = int(match[2]) if match else None


def _by_device(pattern: re.Pattern[str], log: str) -> dict[str, list[str]]:
    sizes: dict[str, list[str]] = defaultdict(list)
    for device, size in pattern.findall(log):
        sizes[device.partition("[")[0]].append(size)
    return dict(sizes)


def mib(size_bytes: int) -> str:
    """A size as llama.cpp prints it."""
    return f"{size_bytes / 2**20:.2f}"


def buffer_sizes(engine: EngineLocation, model: Path, *options: str) -> BufferSizes:
    """Start llama-server on a model, wait for its last buffer size, and stop it."""
    command = [
        str(engine.llama_server), "-m", str(model), "--host", "127.0.0.1",
        "--port", str(free_port()), "-lv", "4", "-t", "1", "--fit", "off", "--no-warmup",
        "--no-repack", *_without_mmap(engine), *options,
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        env=_environment(engine),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    watchdog = threading.Timer(_SLOWEST_START_SECONDS, process.kill)
    watchdog.start()
    lines = []
    try:
        assert process.stdout
        for line in process.stdout:
            lines.append(line)
            if _ENOUGH in line:
                break
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()
    log = "".join(lines)
    assert _ENOUGH in log, log[-3000:]
    return BufferSizes(log)


@contextlib.contextmanager
def rpc_server(engine: EngineLocation) -> Iterator[str]:
    """A stock rpc-server on loopback; gives its address."""
    port = str(free_port())
    process = subprocess.Popen(
        [str(engine.rpc_server), "-H", "127.0.0.1", "-p", port, "-t", "1"],
        env=_environment(engine),
        restore_signals=False,  # keeps SIGPIPE ignored: it dies of a client that disappears
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + _SLOWEST_START_SECONDS
        while not any(
            connection.status == psutil.CONN_LISTEN
            for connection in psutil.Process(process.pid).net_connections("tcp")
        ):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _without_mmap(engine: EngineLocation) -> list[str]:
    """The option under which the log tells sums of tensors and not spans of the file."""
    usage = subprocess.run(
        [str(engine.llama_server), "--help"],
        env=_environment(engine),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return ["--no-mmap"] if "--no-mmap" in usage else ["--load-mode", "none"]


def _environment(engine: EngineLocation) -> dict[str, str]:
    folders = [str(folder) for folder in engine.library_folders]
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(folders)}
