"""Workers that die, stall, lie or are missing: llama-server never notices."""

import contextlib
import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from linkcpp.dispatch.control import NewWorker
from linkcpp.engine.records import EngineLocation
from linkcpp.engine.rpc_socket import send_all
from linkcpp.model.slices.segments import Segment
from linkcpp.worker.frames import (
    DataType,
    FrameType,
    Limits,
    Welcome,
    pack_header,
    pack_rows,
    pack_welcome,
    parse_compute_head,
)
from linkcpp.worker.link import FrameBuffer
from linkcpp.worker.slabs import GgufSlabs
from tests.dispatch.test_exactness import SHORT, even_shares, expert_counts
from tests.support import models
from tests.support.swarm import (
    TOKEN,
    UNHURRIED,
    Device,
    Server,
    answer_while,
    as_json,
    running_device,
    running_llama_server,
    running_worker,
    worker_entry,
)

TOKENS = 160


class Faults:
    """One swarm of two full replicas (or a worker and the fallback) and the wanted answer."""

    def __init__(self, engine: EngineLocation, folder: Path, stack: contextlib.ExitStack) -> None:
        self.engine = engine
        self.folder = folder
        self.stack = stack
        self.model = models.qwen3moe()
        with running_llama_server(engine, self.model, folder, label="alone") as alone:
            self.wanted = as_json(alone.complete(SHORT, TOKENS))

    def worker(self, name: str, **options: Any) -> Any:
        share = even_shares(self.model, 1)[0]
        return self.stack.enter_context(
            running_worker(self.engine, self.model, share, self.folder, name=name, **options)
        )

    def serve(self, workers: list[NewWorker], **options: Any) -> tuple[Device, Server]:
        device = self.stack.enter_context(
            running_device(self.engine, self.model, workers, self.folder, **options)
        )
        server = self.stack.enter_context(
            running_llama_server(self.engine, self.model, self.folder, device_port=device.port)
        )
        return device, server

    def complete_while(self, device: Device, server: Server, what: Callable[[], Any]) -> str:
        """Do something once tokens flow; return the answer."""
        return answer_while(device, server, what, prompt=SHORT, count=TOKENS)

    def ask_until(self, server: Server, is_done: Callable[[], bool]) -> None:
        """Ask for the same answer, right each time, until something has come of it."""
        for _ in range(40):
            if is_done():
                return
            assert as_json(server.complete(SHORT, TOKENS)) == self.wanted
        raise AssertionError("nothing came of 40 answers")


@pytest.fixture
def faults(stock_engine: EngineLocation, tmp_path: Path) -> Iterator[Faults]:
    with contextlib.ExitStack() as stack:
        yield Faults(stock_engine, tmp_path, stack)


def test_a_worker_killed_between_tokens_changes_nothing_with_a_replica(
    faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINKCPP_LOG_FORMAT", "json")
    first, second = faults.worker("a"), faults.worker("b")
    device, server = faults.serve([worker_entry("a", first), worker_entry("b", second)])
    answer = faults.complete_while(device, server, first.process.kill)
    assert answer == faults.wanted
    status = device.wait_until("s['workers'][0]['state'] != 'up'")
    assert status["workers"][0]["failure_count"] == 1
    assert status["failed_pair_count"] == 0
    lines = device.running.log.read_text().splitlines()
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    came = {line["worker"] for line in logged if line.get("state") == "up"}
    assert came == {"a", "b"}
    warned = [line for line in logged if line["level"] == "warning"]
    left = next(line for line in reversed(warned) if line["worker"] == "a")
    assert left["state"] == "connecting"
    assert left["layer"] in expert_counts(faults.model)
    assert left["reason"] in left["message"]


def test_a_worker_killed_between_tokens_changes_nothing_with_the_fallback(faults: Faults) -> None:
    worker = faults.worker("a")
    # Room for a third of the experts: they come and go.
    expert_bytes = sum(t.slab_bytes for t in GgufSlabs(faults.model).tensors if t.layer == 0)
    device, server = faults.serve(
        [worker_entry("a", worker)],
        fallback_model=str(faults.model),
        fallback_bytes=22 * expert_bytes,
    )
    answer = faults.complete_while(device, server, worker.process.kill)
    assert answer == faults.wanted
    status = device.status()
    assert status["fallback"]["pair_count"] > 0
    assert status["fallback"]["loaded_count"] > 22
    assert status["failed_pair_count"] == 0


def test_a_worker_that_is_stopped_is_passed_over_and_used_again(faults: Faults) -> None:
    first, second = faults.worker("a"), faults.worker("b")
    device, server = faults.serve([worker_entry("a", first), worker_entry("b", second)])
    answer = faults.complete_while(
        device, server, lambda: first.process.send_signal(signal.SIGSTOP)
    )
    assert answer == faults.wanted
    # The answer may have been over by then, or all of it with the other worker.
    faults.ask_until(server, lambda: device.status()["late_count"] >= 1)
    first.process.send_signal(signal.SIGCONT)
    device.wait_until("s['workers'][0]['state'] == 'up'")
    before = device.status()["workers"][0]["pair_count"]
    faults.ask_until(server, lambda: device.status()["workers"][0]["pair_count"] > before)


def test_workers_come_and_go_while_tokens_flow(faults: Faults) -> None:
    first, second = faults.worker("a"), faults.worker("b")
    device, server = faults.serve([worker_entry("a", first)])

    def exchange() -> None:
        entry = worker_entry("b", second).model_dump()
        assert device.control.post("/workers", json=entry).status_code == 200
        assert device.control.post("/workers", json=entry).status_code == 409
        device.wait_until("any(w['name'] == 'b' and w['state'] == 'up' for w in s['workers'])")
        assert device.control.delete("/workers/a").status_code == 200

    assert faults.complete_while(device, server, exchange) == faults.wanted
    assert as_json(server.complete(SHORT, TOKENS)) == faults.wanted
    status = device.wait_until("[w['name'] for w in s['workers']] == ['b']")
    assert status["workers"][0]["pair_count"] > 0


def test_a_fallback_whose_rpc_server_dies_is_there_again(faults: Faults) -> None:
    device, server = faults.serve(
        [], fallback_model=str(faults.model), fallback_bytes=faults.model.stat().st_size
    )
    assert as_json(server.complete(SHORT, TOKENS)) == faults.wanted
    assert device.status()["fallback"]["loaded_count"] > 0
    programs = psutil.Process(device.running.process.pid).children(recursive=True)
    keeper = next(p for p in programs if any("fallback.log" in part for part in p.cmdline()))
    keeper.children()[0].kill()
    # Another rpc-server has nothing yet.
    device.wait_until("s['fallback']['loaded_count'] == 0")
    assert as_json(server.complete(SHORT, TOKENS)) == faults.wanted
    assert device.status()["failed_call_count"] == 0


def test_with_nobody_left_llama_server_lives_on_and_the_failure_is_counted(
    faults: Faults,
) -> None:
    first = faults.worker("a")
    device, server = faults.serve([worker_entry("a", first)], patience_seconds=0.5, **UNHURRIED)
    first.process.kill()
    server.complete(SHORT, 4)
    status = device.status()
    assert status["failed_call_count"] > 0
    assert status["missing_expert_count"] == 64
    assert server.process.poll() is None
    second = faults.worker("b")
    device.control.post("/workers", json=worker_entry("b", second).model_dump())
    device.wait_until("s['missing_expert_count'] == 0")
    assert as_json(server.complete(SHORT, TOKENS)) == faults.wanted
    assert device.status()["failed_call_count"] == status["failed_call_count"]


class Liar:
    """A worker that greets well and then answers as ``kind`` says."""

    def __init__(self, model: Path, kind: str) -> None:
        slabs = GgufSlabs(model)
        slabs.close()
        self.kind = kind
        self.asked = 0
        self.welcome = Welcome(
            model_digest=slabs.model_digest,
            hidden_size=slabs.hidden_size,
            segments=tuple(
                Segment(layer=layer, first=0, last=count - 1)
                for layer, count in expert_counts(model).items()
            ),
            engine="liar",
            limits=Limits(),
            name="liar",
        )
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def entry(self) -> NewWorker:
        return NewWorker(name="liar", port=self.listener.getsockname()[1], token=TOKEN)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self.listener.accept()
                threading.Thread(target=self._talk, args=(link,), daemon=True).start()

    def _talk(self, link: socket.socket) -> None:
        frames = FrameBuffer(Limits())
        with contextlib.suppress(OSError), link:
            while count := link.recv_into(frames.space()):
                frames.received(count)
                while (frame := frames.next()) is not None:
                    self._answer(link, *frame)

    def _answer(self, link: socket.socket, header: Any, payload: memoryview) -> None:
        if header.kind == FrameType.HELLO:
            link.sendall(pack_welcome(self.welcome))
        elif header.kind == FrameType.CHAIN:
            link.sendall(pack_header(FrameType.CHAIN_READY, header.request_id, 0))
        elif header.kind == FrameType.PING:
            link.sendall(pack_header(FrameType.PONG, header.request_id, 0))
        elif header.kind == FrameType.COMPUTE:
            self.asked += 1
            head = parse_compute_head(payload, Limits())
            rows = np.full((head.pair_count, 512), np.nan, np.float32)
            if self.kind == "noise":
                link.sendall(bytes(range(256)) * 20)
            elif self.kind == "truncated":
                link.sendall(pack_header(FrameType.ROWS, header.request_id, 1000) + bytes(10))
                link.shutdown(socket.SHUT_RDWR)
            elif self.kind == "short":
                rows = rows[:, :100]
            if self.kind in ("nan", "short"):
                parts = pack_rows(rows.tobytes(), rows.shape, 1, DataType.F32)
                size = sum(map(len, parts))
                send_all(link, [pack_header(FrameType.ROWS, header.request_id, size), *parts])


@pytest.mark.parametrize("kind", ["noise", "truncated", "nan", "short", "silent"])
def test_a_worker_that_answers_nonsense_is_passed_over(kind: str, faults: Faults) -> None:
    liar = Liar(faults.model, kind)
    honest = faults.worker("a")
    # Checks are off: it is while tokens flow that it must be passed over.
    device, server = faults.serve([liar.entry, worker_entry("a", honest)], check_rows=False)
    assert as_json(server.complete(SHORT, TOKENS)) == faults.wanted
    status = device.status()
    assert liar.asked > 0
    assert status["workers"][0]["failure_count"] > 0
    assert status["workers"][0]["pair_count"] == 0
    assert status["failed_pair_count"] == 0
    liar.listener.close()


def test_zeros_that_stood_for_rows_are_gone_once_the_slot_is_erased(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    model = models.qwen3moe()
    with running_llama_server(stock_engine, model, tmp_path, label="alone") as alone:
        wanted = alone.complete(SHORT, 8)
    nobody = {"zero_missing": True, "patience_seconds": 0.1, **UNHURRIED}
    extra = ("--slot-save-path", f"{tmp_path}/")
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(running_device(stock_engine, model, [], tmp_path, **nobody))
        server = stack.enter_context(
            running_llama_server(
                stock_engine, model, tmp_path, device_port=device.port, extra=extra
            )
        )
        poisoned = server.complete(SHORT, 8, cache_prompt=True)
        assert as_json(poisoned) != as_json(wanted)
        failed = device.status()["failed_pair_count"]
        assert failed > 0
        share = even_shares(model, 1)[0]
        worker = stack.enter_context(
            running_worker(stock_engine, model, share, tmp_path, name="late")
        )
        entry = worker_entry("late", worker).model_dump()
        assert device.control.post("/workers", json=entry).status_code == 200
        device.wait_until("s['missing_expert_count'] == 0")
        # With every expert there, what the slot has kept of the prompt is wrong all the same.
        again = server.complete(SHORT, 8, cache_prompt=True)
        assert again["timings"]["prompt_n"] < wanted["timings"]["prompt_n"]
        assert as_json(again) != as_json(wanted)
        assert httpx.post(f"{server.url}/slots/0?action=erase", timeout=60).status_code == 200
        clean = server.complete(SHORT, 8, cache_prompt=True)
        assert clean["timings"]["prompt_n"] == wanted["timings"]["prompt_n"]
        assert as_json(clean) == as_json(wanted)
        assert device.status()["failed_pair_count"] == failed
