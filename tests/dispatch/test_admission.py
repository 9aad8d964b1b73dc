"""Workers are used once their rows were checked: against the model, against each other, or not."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from linkcpp.dispatch.checks import RowCheck, held_experts, majority
from linkcpp.dispatch.control import NewWorker
from linkcpp.engine.records import EngineLocation
from linkcpp.model.slices.segments import Segment
from linkcpp.worker.agreement import Verdict
from linkcpp.worker.frames import DataType, FrameType, Limits, Rows, pack_header, pack_rows
from linkcpp.worker.link import FrameBuffer
from tests.dispatch.test_exactness import SHORT, even_shares
from tests.support import models
from tests.support.swarm import (
    TOKEN,
    UNHURRIED,
    Device,
    Running,
    as_json,
    running_device,
    running_llama_server,
    running_worker,
    worker_entry,
)

Change = Callable[[Rows], Rows]


class Meddler:
    """Stands before an honest worker and changes the rows that it answers."""

    def __init__(self, name: str, worker: Running, change: Change) -> None:
        self.name = name
        self.change = change
        self._port = worker.ports[0]
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def entry(self) -> NewWorker:
        port = self._listener.getsockname()[1]
        return NewWorker(name=self.name, port=port, token=TOKEN)

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                threading.Thread(target=self._forward, args=(near, far), daemon=True).start()
                threading.Thread(target=self._answer, args=(far, near), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)

    def _answer(self, source: socket.socket, target: socket.socket) -> None:
        frames = FrameBuffer(Limits())
        with contextlib.suppress(OSError):
            while count := source.recv_into(frames.space()):
                frames.received(count)
                while (frame := frames.next()) is not None:
                    header, payload = frame
                    data = bytes(payload)
                    if header.kind == FrameType.ROWS:
                        rows = np.frombuffer(data, np.float32, offset=16).reshape(-1, 512)
                        changed = np.ascontiguousarray(self.change(rows), np.float32)
                        data = b"".join(pack_rows(changed.tobytes(), rows.shape, 1, DataType.F32))
                    target.sendall(pack_header(header.kind, header.request_id, len(data)) + data)


def slightly(rows: Rows) -> Rows:
    return rows * np.float32(1.001)


def twice(rows: Rows) -> Rows:
    return rows * np.float32(2)


class Cluster:
    """A tiny model, its workers, and what llama-server answers with them."""

    def __init__(self, engine: EngineLocation, folder: Path, stack: contextlib.ExitStack) -> None:
        self.engine, self.folder, self.stack = engine, folder, stack
        self.model = models.qwen3moe()

    def worker(self, name: str, part: int = 0, parts: int = 1) -> Running:
        share = even_shares(self.model, parts)[part]
        running = running_worker(self.engine, self.model, share, self.folder, name=name)
        return self.stack.enter_context(running)

    def meddler(self, name: str, change: Change) -> NewWorker:
        meddler = Meddler(name, self.worker(f"{name}-behind"), change)
        self.stack.callback(meddler.close)
        return meddler.entry

    def device(self, entries: list[NewWorker], *, full: bool, **options: Any) -> Device:
        model = str(self.model) if full else None
        options = UNHURRIED | options
        running = running_device(
            self.engine, self.model, entries, self.folder, fallback_model=model, **options
        )
        return self.stack.enter_context(running)

    def ask(self, device: Device, tokens: int = 8) -> str:
        with running_llama_server(
            self.engine, self.model, self.folder, device_port=device.port
        ) as server:
            return as_json(server.complete(SHORT, tokens))

    def alone(self, tokens: int = 8) -> str:
        with running_llama_server(self.engine, self.model, self.folder, label="alone") as server:
            return as_json(server.complete(SHORT, tokens))


@pytest.fixture
def cluster(stock_engine: EngineLocation, tmp_path: Path) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        yield Cluster(stock_engine, tmp_path, stack)


def workers_of(device: Device) -> dict[str, Any]:
    return {worker["name"]: worker for worker in device.status()["workers"]}


def check(device: Device, name: str, layer: int = 0, expert_count: int = 4) -> Any:
    body = {"layer": layer, "expert_count": expert_count}
    return device.control.post(f"/workers/{name}/check", json=body)


def test_an_honest_worker_is_checked_against_the_model_and_does_all_the_work(
    cluster: Cluster,
) -> None:
    entries = [worker_entry(f"w{k}", cluster.worker(f"w{k}", k, 2)) for k in range(2)]
    device = cluster.device(entries, full=True)
    assert check(device, "w0").status_code == 409
    assert cluster.ask(device) == cluster.alone()
    status = device.status()
    assert status["fallback"]["pair_count"] == status["rerouted_pair_count"] == 0
    for worker in status["workers"]:
        assert worker["admission"]["layer_count"] == 4
        assert worker["admission"]["against"] == ["the model"]
        assert worker["admission"]["agreement"]["verdict"] == Verdict.EXACT
    found = check(device, "w1", layer=3).json()
    assert found["agreement"]["verdict"] == Verdict.EXACT
    assert found["agreement"]["row_count"] == 8
    assert all(8 <= expert < 16 for expert in found["experts"])
    assert check(device, "nobody").status_code == 409
    assert check(device, "w0", expert_count=1000).status_code == 422


def test_a_worker_that_lies_is_refused_by_name_and_never_used(cluster: Cluster) -> None:
    honest = worker_entry("honest", cluster.worker("honest"))
    device = cluster.device([cluster.meddler("liar", twice), honest], full=True)
    assert cluster.ask(device) == cluster.alone()
    liar = workers_of(device)["liar"]
    assert liar["state"] == "refused"
    assert liar["detail"].startswith("Its rows for layer 0 are not those of the model")
    assert liar["pair_count"] == 0
    assert workers_of(device)["honest"]["state"] == "up"
    assert device.status()["fallback"]["pair_count"] == 0


def test_a_worker_of_another_backend_is_equivalent_and_used(cluster: Cluster) -> None:
    device = cluster.device([cluster.meddler("other", slightly)], full=True)
    cluster.ask(device)
    other = workers_of(device)["other"]
    assert other["state"] == "up"
    assert other["pair_count"] > 0
    assert other["admission"]["agreement"]["verdict"] == Verdict.EQUIVALENT
    assert 0.0005 < other["admission"]["agreement"]["relative_error"] < 0.0015


def test_a_worker_that_begins_to_lie_is_refused_by_the_next_check(cluster: Cluster) -> None:
    factor = np.ones(1, np.float32)
    liar = cluster.meddler("liar", lambda rows: rows * factor)
    device = cluster.device([liar], full=True)
    wanted = cluster.ask(device)
    factor[0] = 2
    found = check(device, "liar").json()
    assert found["agreement"]["verdict"] == Verdict.DIFFERS
    assert "not those of the model" in found["complaint"]
    assert workers_of(device)["liar"]["state"] == "refused"
    assert cluster.ask(device) == wanted
    assert device.status()["fallback"]["pair_count"] > 0


def test_without_the_model_replicas_are_compared_and_the_odd_one_is_refused(
    cluster: Cluster,
) -> None:
    entries = [worker_entry(name, cluster.worker(name)) for name in ("a", "b")]
    device = cluster.device([cluster.meddler("liar", twice), *entries], full=False)
    assert cluster.ask(device) == cluster.alone()
    found = workers_of(device)
    assert found["liar"]["state"] == "refused"
    assert "nobody can say whose are right" in found["liar"]["detail"]
    assert [found[name]["state"] for name in ("a", "b")] == ["up", "up"]
    assert set(found["a"]["admission"]["against"]) <= {"worker b", "worker liar"}
    assert found["a"]["admission"]["agreement"]["verdict"] == Verdict.EXACT


def test_with_nobody_to_compare_with_a_worker_is_used_and_marked_unchecked(
    cluster: Cluster,
) -> None:
    entries = [worker_entry(f"w{k}", cluster.worker(f"w{k}", k, 2)) for k in range(2)]
    device = cluster.device(entries, full=False)
    assert cluster.ask(device) == cluster.alone()
    for worker in device.status()["workers"]:
        assert worker["state"] == "up"
        assert worker["admission"] == {
            "layer_count": 4,
            "against": ["nobody"],
            "agreement": None,
        }


def test_a_worker_that_joins_later_is_checked_before_it_is_used(cluster: Cluster) -> None:
    device = cluster.device([worker_entry("a", cluster.worker("a"))], full=True)
    wanted = cluster.ask(device)
    liar = cluster.meddler("liar", twice)
    assert device.control.post("/workers", json=liar.model_dump()).status_code == 200
    device.wait_until("any(w['name'] == 'liar' and w['state'] == 'refused' for w in s['workers'])")
    late = worker_entry("late", cluster.worker("late"))
    assert device.control.post("/workers", json=late.model_dump()).status_code == 200
    device.wait_until("any(w['name'] == 'late' and w['state'] == 'up' for w in s['workers'])")
    assert workers_of(device)["late"]["admission"]["layer_count"] == 4
    assert cluster.ask(device) == wanted


def test_experts_beyond_the_layer_are_not_asked_for() -> None:
    segments = [Segment(layer=1, first=6, last=2**20 - 1), Segment(layer=0, first=0, last=3)]
    assert held_experts(segments, 1, 8) == [6, 7]
    assert held_experts(segments, 0, 8) == [0, 1, 2, 3]
    assert held_experts(segments, 2, 8) == []


def test_the_word_of_half_of_the_others_is_enough() -> None:
    good, bad = (
        RowCheck(layer=0, experts=(1,), against=f"worker {word}", agreement=None, complaint=word)
        for word in (None, "bad")
    )
    assert majority([]) is None
    assert majority([bad]) == bad
    assert majority([bad, good]) == good
    assert majority([bad, good, bad]) == bad
