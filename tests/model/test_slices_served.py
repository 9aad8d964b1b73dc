"""A hollow backbone and workers that have only their slices: the bits of the whole model."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from linkcpp.engine.records import EngineLocation
from linkcpp.model.slices.writing import open_whole_model, write_backbone
from tests.model.test_slices import cut
from tests.support.models import gpt_oss, qwen35moe, smollm2_mixture
from tests.support.swarm import (
    as_json,
    running_device,
    running_llama_server,
    running_worker,
    worker_entry,
)

PROMPT = "the of and to in a is that it for on was with"
MODELS: dict[str, tuple[Callable[[], Path], tuple[str, ...]]] = {
    "gpt-oss": (gpt_oss, ("all:0-2,7", "all:3-6")),
    "qwen35moe": (qwen35moe, ("all:1-5", "all:0,6-31")),
    "smollm2": (lambda: smollm2_mixture(8), ("all:0-3", "0-14:4-7", "15-29:4-7")),
}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_slices_and_a_hollow_backbone_give_the_whole_models_bits(
    name: str, engine: EngineLocation, tmp_path: Path
) -> None:
    make, shares = MODELS[name]
    model = make()
    with running_llama_server(engine, model, tmp_path, label="alone") as alone:
        wanted = as_json(alone.complete(PROMPT, 16))
    with open_whole_model(model) as files:
        (backbone,) = write_backbone(files, tmp_path / "backbone.gguf", lambda _: None)
    with contextlib.ExitStack() as stack:
        entries = []
        for number, share in enumerate(shares):
            worker = f"w{number}"
            held = cut(model, tmp_path / f"{worker}.gguf", share)
            running = running_worker(engine, held.path, None, tmp_path, name=worker)
            entries.append(worker_entry(worker, stack.enter_context(running)))
        device = stack.enter_context(running_device(engine, backbone.path, entries, tmp_path))
        server = stack.enter_context(
            running_llama_server(engine, backbone.path, tmp_path, device_port=device.port)
        )
        assert as_json(server.complete(PROMPT, 16)) == wanted
        status = device.status()
    assert all(worker["pair_count"] for worker in status["workers"])
