"""llama-server with its experts elsewhere: text and log-probabilities equal to the bit."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from linkcpp.engine.records import EngineLocation
from linkcpp.model.slices.segments import Segment
from linkcpp.worker.slabs import GgufSlabs
from tests.support import models
from tests.support.swarm import (
    UNHURRIED,
    Device,
    Server,
    as_json,
    running_device,
    running_llama_server,
    running_worker,
    worker_entry,
)

SHORT = "the of and to in a is that it for on was with"
# More than one ubatch of 512 tokens: the last layer then sees a graph without any row.
LONG = "but not what all were when we there can been has more if no out do so my one " * 32


def even_shares(model: Path, count: int) -> list[list[Segment]]:
    """Every layer's experts, cut into ``count`` runs."""
    return [
        [
            Segment(layer=layer, first=n * k // count, last=n * (k + 1) // count - 1)
            for layer, n in expert_counts(model).items()
        ]
        for k in range(count)
    ]


def uneven_overlapping_shares(model: Path) -> list[list[Segment]]:
    """Three workers: one expert alone, most of the rest, and a part of both; by layer."""
    shares: list[list[Segment]] = [[], [], []]
    for layer, count in expert_counts(model).items():
        shares[0].append(Segment(layer=layer, first=0, last=0))
        shares[1].append(Segment(layer=layer, first=1, last=count - 1))
        if layer % 2:
            shares[2].append(Segment(layer=layer, first=0, last=count // 2))
    return shares


def expert_counts(model: Path) -> dict[int, int]:
    slabs = GgufSlabs(model)
    slabs.close()
    return {tensor.layer: tensor.expert_count for tensor in slabs.tensors}


@contextlib.contextmanager
def swarm(
    engine: EngineLocation,
    model: Path,
    shares: Sequence[Sequence[Segment]],
    folder: Path,
    *extra: str,
) -> Iterator[tuple[Device, Server]]:
    """llama-server on a virtual device with one worker for each share."""
    with contextlib.ExitStack() as stack:
        entries = []
        for number, share in enumerate(shares):
            name = f"w{number}"
            worker = running_worker(engine, model, share, folder, name=name)
            entries.append(worker_entry(name, stack.enter_context(worker)))
        device: Device = stack.enter_context(
            running_device(engine, model, entries, folder, **UNHURRIED)
        )
        server: Server = stack.enter_context(
            running_llama_server(engine, model, folder, device_port=device.port, extra=extra)
        )
        yield device, server


def test_uneven_and_overlapping_workers_are_exact(engine: EngineLocation, tmp_path: Path) -> None:
    model = models.qwen3moe()
    with running_llama_server(engine, model, tmp_path, label="alone") as alone:
        wanted = [as_json(alone.complete(SHORT, 32)), as_json(alone.complete(LONG, 4))]
    shares = uneven_overlapping_shares(model)
    with swarm(engine, model, shares, tmp_path) as (device, server):
        found = [as_json(server.complete(SHORT, 32)), as_json(server.complete(LONG, 4))]
        status = device.status()
    assert found == wanted
    assert all(worker["pair_count"] for worker in status["workers"])
    assert sum(worker["pair_count"] for worker in status["workers"]) == status["pair_count"]
    assert status["rerouted_pair_count"] == status["failed_pair_count"] == 0


@pytest.mark.parametrize("count", [1, 2, 7])
def test_any_number_of_workers_gives_the_same_bits(
    count: int, stock_engine: EngineLocation, tmp_path: Path
) -> None:
    model = models.qwen3moe()
    with running_llama_server(stock_engine, model, tmp_path, label="alone") as alone:
        wanted = as_json(alone.complete(SHORT, 24))
    with swarm(stock_engine, model, even_shares(model, count), tmp_path) as (device, server):
        assert as_json(server.complete(SHORT, 24)) == wanted
        assert device.status()["missing_expert_count"] == 0


def test_the_weights_of_experts_go_nowhere(stock_engine: EngineLocation, tmp_path: Path) -> None:
    import psutil

    model = models.qwen3moe()
    with swarm(stock_engine, model, even_shares(model, 1), tmp_path) as (device, server):
        server.complete(SHORT, 2)
        family = psutil.Process(device.running.process.pid).children(recursive=True)
        backing = next(child for child in family if child.name() == "ggml-rpc-server")
        weights = sum(
            tensor.slab_bytes * tensor.expert_count for tensor in GgufSlabs(model).tensors
        )
        assert device.status()["dropped_bytes"] == weights
        # The backing server has its libraries and compute buffers, not the experts as well.
        assert backing.memory_info().data < 400 * 2**20
