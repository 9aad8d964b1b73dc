"""A whole swarm on this machine: workers, virtual device and llama-server as real processes."""

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from linkcpp.dispatch.control import NewServer, NewWorker
from linkcpp.dispatch.process import READY_PATTERN as DEVICE_READY
from linkcpp.dispatch.process import DispatchConfig
from linkcpp.engine.records import EngineLocation
from linkcpp.model.slices.segments import Segment
from linkcpp.worker.process import READY_PATTERN as WORKER_READY
from linkcpp.worker.process import WorkerConfig
from tests.support.ports import free_port
from tests.support.rpc_servers import rpc_server

EXPERT_TENSORS = r"blk\.\d+\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)"
TOKEN = "worker-token"
# For a device that gives nobody up: a busy machine is late now and then.
UNHURRIED = {"deadline_floor_ms": 60_000.0}
_START_SECONDS = 300


@dataclass
class Running:
    """A process and what its ready line told."""

    process: subprocess.Popen[str]
    ports: tuple[int, ...]
    log: Path


def _wait_for_line(process: subprocess.Popen[str], log: Path, pattern: str) -> tuple[int, ...]:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if match := re.search(pattern, log.read_text(), re.MULTILINE):
            return tuple(int(group) for group in match.groups())
        assert process.poll() is None, f"ended at its start: {log.read_text()}"
        time.sleep(0.02)
    raise AssertionError(f"not ready: {log.read_text()}")


@contextlib.contextmanager
def _module(name: str, config: Any, folder: Path, label: str, pattern: str) -> Iterator[Running]:
    path, log = folder / f"{label}.json", folder / f"{label}.log"
    path.write_text(config.model_dump_json())
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", name, str(path)],
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        yield Running(process, _wait_for_line(process, log, pattern), log)
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def running_worker(
    engine: EngineLocation,
    model: Path,
    segments: Sequence[Segment] | None,
    folder: Path,
    *,
    name: str,
    token: str = TOKEN,
    **options: Any,
) -> Iterator[Running]:
    """Run a worker that holds segments of a model."""
    config = WorkerConfig(
        name=name,
        engine=engine,
        slabs=str(model),
        segments=None if segments is None else tuple(segments),
        token=token,
        log_path=folder / f"{name}-rpc.log",
        threads=1,
        **options,
    )
    with _module("linkcpp.worker", config, folder, name, WORKER_READY) as running:
        yield running


def worker_entry(name: str, worker: Running, token: str = TOKEN) -> NewWorker:
    """Tell a virtual device of a worker."""
    return NewWorker(name=name, port=worker.ports[0], token=token)


@contextlib.contextmanager
def own_server(
    engine: EngineLocation, model: Path, segments: Sequence[Segment], *, name: str
) -> Iterator[NewServer]:
    """Run an rpc-server that a virtual device of this machine gives segments of a model to."""
    with rpc_server(engine) as port:
        yield NewServer(name=name, port=port, slabs=str(model), segments=tuple(segments))


@dataclass
class Device:
    """A running virtual device."""

    running: Running
    token: str
    port: int = field(init=False)

    def __post_init__(self) -> None:
        self.port = self.running.ports[0]
        self.control = httpx.Client(
            base_url=f"http://127.0.0.1:{self.running.ports[1]}",
            headers={"authorization": f"Bearer {self.token}"},
            timeout=_START_SECONDS,
        )

    def status(self) -> dict[str, Any]:
        """Ask the control endpoint."""
        try:
            answer = self.control.get("/status")
        except httpx.ConnectError as error:
            code, log = self.running.process.poll(), self.running.log.read_text()[-3000:]
            raise AssertionError(f"the device is gone ({code}): {log}") from error
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def wait_until(self, what: str, *, seconds: float = _START_SECONDS) -> dict[str, Any]:
        """Wait until an expression over the status ``s`` holds."""
        deadline = time.monotonic() + seconds
        while not eval(what, {}, {"s": (status := self.status())}):  # noqa: S307
            assert time.monotonic() < deadline, f"never: {what}: {status}"
            time.sleep(0.02)
        return status


@contextlib.contextmanager
def running_device(
    engine: EngineLocation,
    model: Path,
    workers: Sequence[NewWorker],
    folder: Path,
    **options: Any,
) -> Iterator[Device]:
    """Run a virtual device and wait until every worker is linked."""
    token = secrets.token_hex(8)
    config = DispatchConfig(
        engine=engine,
        model=str(model),
        workers=tuple(workers),
        control_token=token,
        log_folder=folder,
        threads=1,
        **options,
    )
    with _module("linkcpp.dispatch", config, folder, "device", DEVICE_READY) as running:
        device = Device(running, token)
        device.wait_until("all(w['state'] == 'up' for w in s['workers'])")
        yield device
        device.control.close()


@dataclass
class Server:
    """A running llama-server."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def complete(self, prompt: str | list[int], count: int, **options: Any) -> dict[str, Any]:
        """Generate greedily with the top-8 log-probabilities."""
        body = {
            "prompt": prompt,
            "n_predict": count,
            "temperature": 0,
            "n_probs": 8,
            "cache_prompt": False,
            "ignore_eos": True,
            **options,
        }
        answer = httpx.post(f"{self.url}/completion", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


@contextlib.contextmanager
def running_llama_server(
    engine: EngineLocation,
    model: Path,
    folder: Path,
    *,
    device_port: int | None = None,
    label: str = "llama",
    extra: Sequence[str] = (),
) -> Iterator[Server]:
    """Run llama-server, alone or with its experts on a virtual device."""
    port = free_port()
    command = [
        str(engine.llama_server), "-m", str(model), "--host", "127.0.0.1", "--port", str(port),
        "-c", "4096", "-np", "1", "-t", "1", "-ngl", "0", "--no-repack", "--fit", "off",
        "--no-webui", "--no-warmup",
    ]  # fmt: skip
    if device_port is not None:
        endpoint = f"127.0.0.1:{device_port}"
        command += ["--rpc", endpoint, "-ot", f"{EXPERT_TENSORS}=RPC0[{endpoint}]"]
    log = folder / f"{label}.log"
    libraries = os.pathsep.join(str(path) for path in engine.library_folders)
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *extra],
            env={**os.environ, "LD_LIBRARY_PATH": libraries},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            assert process.poll() is None, f"llama-server ended: {log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=60).status_code == 200:
                    break
            time.sleep(0.05)
        yield Server(process, url, log)
    finally:
        _end(process)


def probabilities(answer: dict[str, Any]) -> list[list[tuple[int, float]]]:
    """Return the top-8 tokens and log-probabilities of every generated token."""
    return [
        [(top["id"], top["logprob"]) for top in token["top_logprobs"]]
        for token in answer["completion_probabilities"]
    ]


def as_json(answer: dict[str, Any]) -> str:
    """Write what must be equal between two runs."""
    return json.dumps([answer["content"], probabilities(answer)])


def answer_while(
    device: Device, server: Server, what: Callable[[], Any], *, prompt: str, count: int
) -> str:
    """Do something while tokens flow; return the answer as ``as_json`` writes it.

    The same is asked again and again until one answer has begun after it was done, so that nothing
    depends on how long an answer takes.
    """
    is_done = threading.Event()

    def ask() -> set[str]:
        answers = set()
        is_last = False
        while not is_last:
            is_last = is_done.is_set()
            answers.add(as_json(server.complete(prompt, count)))
        return answers

    before = device.status()["call_count"]
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            device.wait_until(f"s['call_count'] > {before + 40}")
            what()
        finally:
            is_done.set()
        (answer,) = asking.result()
    return answer


def ask_until(
    device: Device, server: Server, what: str, *, prompt: str, count: int
) -> dict[str, Any]:
    """Ask for the same answer until an expression over the device's status ``s`` holds."""
    for _ in range(100):
        server.complete(prompt, count)
        if eval(what, {}, {"s": (status := device.status())}):  # noqa: S307
            return status
    raise AssertionError(f"never: {what}: {status}")
