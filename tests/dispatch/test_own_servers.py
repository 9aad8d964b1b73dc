"""rpc-servers of this machine that the virtual device drives itself: exact, and lost as workers."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from linkcpp.dispatch.control import NewServer, NewWorker
from linkcpp.engine.records import EngineLocation
from linkcpp.worker.slabs import GgufSlabs
from tests.dispatch.test_exactness import (
    LONG,
    SHORT,
    even_shares,
    uneven_overlapping_shares,
)
from tests.support import models
from tests.support.rpc_servers import process_on
from tests.support.swarm import (
    UNHURRIED,
    Device,
    Server,
    answer_while,
    as_json,
    own_server,
    running_device,
    running_llama_server,
    running_worker,
    worker_entry,
)

TOKENS = 160


class Own:
    """rpc-servers, workers, and the llama-server before them."""

    def __init__(self, engine: EngineLocation, folder: Path, stack: contextlib.ExitStack) -> None:
        self._engine = engine
        self._folder = folder
        self._stack = stack

    def server(self, name: str, model: Path, share: Any) -> NewServer:
        return self._stack.enter_context(own_server(self._engine, model, share, name=name))

    def worker(self, name: str, model: Path, share: Any) -> NewWorker:
        worker = running_worker(self._engine, model, share, self._folder, name=name)
        return worker_entry(name, self._stack.enter_context(worker))

    def alone(self, model: Path, *asked: tuple[str, int]) -> list[str]:
        with running_llama_server(self._engine, model, self._folder, label="alone") as alone:
            return [as_json(alone.complete(*each)) for each in asked]

    def serve(
        self, model: Path, servers: list[NewServer], workers: list[NewWorker], **options: Any
    ) -> tuple[Device, Server]:
        device = self._stack.enter_context(
            running_device(
                self._engine, model, workers, self._folder, servers=tuple(servers), **options
            )
        )
        server = self._stack.enter_context(
            running_llama_server(self._engine, model, self._folder, device_port=device.port)
        )
        return device, server


@pytest.fixture
def own(stock_engine: EngineLocation, tmp_path: Path) -> Iterator[Own]:
    with contextlib.ExitStack() as stack:
        yield Own(stock_engine, tmp_path, stack)


@pytest.mark.parametrize("name", ["qwen3moe", "gpt_oss", "qwen35moe_fused"])
def test_servers_of_its_own_give_the_same_bits(
    name: str, engine: EngineLocation, tmp_path: Path
) -> None:
    model = getattr(models, name)()
    with contextlib.ExitStack() as stack:
        own = Own(engine, tmp_path, stack)
        wanted = own.alone(model, (SHORT, 24), (LONG, 4))
        shares = uneven_overlapping_shares(model)
        servers = [own.server(f"s{k}", model, share) for k, share in enumerate(shares)]
        device, server = own.serve(model, servers, [], **UNHURRIED)
        assert [as_json(server.complete(SHORT, 24)), as_json(server.complete(LONG, 4))] == wanted
        status = device.status()
    assert all(holder["pair_count"] for holder in status["workers"])
    assert all(holder["admission"] for holder in status["workers"])
    assert status["rerouted_pair_count"] == status["failed_pair_count"] == 0


def test_servers_and_workers_share_the_experts(own: Own) -> None:
    model = models.qwen3moe()
    (wanted,) = own.alone(model, (SHORT, 24))
    first, second = even_shares(model, 2)
    device, server = own.serve(
        model, [own.server("s", model, first)], [own.worker("w", model, second)]
    )
    assert as_json(server.complete(SHORT, 24)) == wanted
    assert all(holder["pair_count"] for holder in device.status()["workers"])


def test_a_server_that_is_killed_changes_nothing(own: Own) -> None:
    model = models.qwen3moe()
    (wanted,) = own.alone(model, (SHORT, TOKENS))
    (share,) = even_shares(model, 1)
    lost = own.server("s", model, share)
    device, server = own.serve(model, [lost], [own.worker("w", model, share)])
    assert (
        answer_while(device, server, process_on(lost.port).kill, prompt=SHORT, count=TOKENS)
        == wanted
    )
    status = device.wait_until("s['workers'][1]['state'] == 'connecting'")
    assert status["workers"][1]["failure_count"] == 1
    assert status["failed_pair_count"] == 0
    device.control.delete("/workers/s").raise_for_status()
    device.wait_until("len(s['workers']) == 1")
    # Another one in its place, while the device runs.
    again = own.server("again", model, share)
    answer = device.control.post("/servers", json=again.model_dump(mode="json"))
    answer.raise_for_status()
    device.wait_until("s['workers'][1]['state'] == 'up'")
    assert as_json(server.complete(SHORT, TOKENS)) == wanted


def test_a_server_that_was_stopped_keeps_its_experts(own: Own, tmp_path: Path) -> None:
    model = models.qwen3moe()
    (wanted,) = own.alone(model, (SHORT, TOKENS))
    (share,) = even_shares(model, 1)
    source = tmp_path / "source.gguf"
    os.link(model, source)
    late = own.server("s", source, share)
    device, server = own.serve(
        model, [late], [own.worker("w", model, share)], deadline_floor_ms=100.0
    )
    # From here on nothing can be loaded again.
    source.unlink()
    process = process_on(late.port)
    assert answer_while(device, server, process.suspend, prompt=SHORT, count=TOKENS) == wanted
    status = device.wait_until("s['workers'][1]['state'] == 'connecting'")
    assert status["late_count"] >= 1
    device.wait_until("'still works' in s['workers'][1]['detail']")
    process.resume()
    device.wait_until("s['workers'][1]['state'] == 'up'")
    before = device.status()["workers"][1]["pair_count"]
    deadline = time.monotonic() + 300
    while device.status()["workers"][1]["pair_count"] == before:
        assert time.monotonic() < deadline
        assert as_json(server.complete(SHORT, TOKENS)) == wanted


def test_what_cannot_be_loaded_is_told(own: Own, tmp_path: Path) -> None:
    model = models.qwen3moe()
    (share,) = even_shares(model, 1)
    slabs = GgufSlabs(model)
    slabs.close()
    device, server = own.serve(
        model, [], [own.worker("w", model, share)], check_model_digest=slabs.model_digest
    )
    missing = own.server("missing", tmp_path / "none.gguf", share)
    other = own.server("other", models.qwen2moe(), even_shares(models.qwen2moe(), 1)[0])
    nobody = NewServer(name="nobody", port=1, slabs=str(model), segments=tuple(share))
    for each in (missing, other, nobody):
        answer = device.control.post("/servers", json=each.model_dump(mode="json"))
        answer.raise_for_status()
    again = device.control.post("/servers", json=nobody.model_dump(mode="json"))
    assert again.status_code == 409
    status = device.wait_until(
        "all(w['detail'] not in ('', 'not connected yet') for w in s['workers'][1:])"
    )
    details = {worker["name"]: worker for worker in status["workers"]}
    assert details["missing"]["state"] == "refused"
    assert "none.gguf" in details["missing"]["detail"]
    assert details["nobody"]["state"] == "connecting"
    assert "refused" in details["nobody"]["detail"]
    assert details["other"]["state"] == "refused"
    assert details["other"]["detail"] == "It holds slabs of another model."
    assert server.complete(SHORT, 4)["content"]
