"""Every kind of mixture on any workers, with prompts of any length: difference 0, always.

The regular run covers each value of each axis at least once for each architecture. The whole
matrix is ``bin/test --long tests/dispatch/test_architectures.py``.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from linkcpp.engine.records import EngineLocation
from linkcpp.model.slices.segments import Segment
from tests.dispatch.test_exactness import even_shares, swarm, uneven_overlapping_shares
from tests.support import lengths, models
from tests.support.swarm import Server, as_json, running_llama_server

MIXTURES: dict[str, Callable[[], Path]] = {
    "smollm2": lambda: models.smollm2_mixture(8),
    "qwen3moe": models.qwen3moe,
    "qwen35moe": models.qwen35moe,
    "qwen35moe fused": models.qwen35moe_fused,
    "qwen2moe": models.qwen2moe,
    "gpt-oss": models.gpt_oss,
    "deepseek2": models.deepseek2,
}
SHARES: dict[str, Callable[[Path], list[list[Segment]]]] = {
    "1 worker": lambda model: even_shares(model, 1),
    "2 workers": lambda model: even_shares(model, 2),
    "3 uneven": uneven_overlapping_shares,
    "7 workers": lambda model: even_shares(model, 7),
}
PROMPT_TOKENS = (1, 2, 40, 700, 2000)
# Which workers and prompts each architecture meets in the regular run.
REGULAR = {
    "smollm2": ("3 uneven", (1, 40)),
    "qwen3moe": ("7 workers", (1, 2, 2000)),
    "qwen35moe": ("2 workers", (2, 700)),
    "qwen35moe fused": ("3 uneven", (1, 40)),
    "qwen2moe": ("3 uneven", (2, 700)),
    "gpt-oss": ("7 workers", (1, 700)),
    "deepseek2": ("1 worker", (40, 700)),
}
SEQUENCES = 4
BATCHED = ("--parallel", "4", "--no-kv-unified")


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Tokens of words: ids above the control and byte tokens of every tiny vocabulary."""
    return [259 + (7 * number + 13 * seed) % 40 for number in range(tokens)]


def answers(server: Server, lengths: Sequence[int], count: int) -> list[str]:
    return [as_json(server.complete(prompt(length), count)) for length in lengths]


@contextlib.contextmanager
def alone(engine: EngineLocation, model: Path, folder: Path, *extra: str) -> Iterator[Server]:
    with running_llama_server(engine, model, folder, label="alone", extra=extra) as server:
        yield server


def cases_of_run(full: bool) -> list[tuple[str, str, tuple[int, ...]]]:
    if full:
        return [(name, share, PROMPT_TOKENS) for name in MIXTURES for share in SHARES]
    return [(name, *REGULAR[name]) for name in MIXTURES]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "lengths" in metafunc.fixturenames:
        cases = cases_of_run(lengths.is_long)
        ids = [f"{name}-{share}" for name, share, _ in cases]
        metafunc.parametrize(("mixture", "share", "lengths"), cases, ids=ids)


def test_a_mixture_on_workers_is_the_model_in_one_process_to_the_bit(
    mixture: str, share: str, lengths: tuple[int, ...], engine: EngineLocation, tmp_path: Path
) -> None:
    model = MIXTURES[mixture]()
    shares = SHARES[share](model)
    with alone(engine, model, tmp_path) as server:
        wanted = answers(server, lengths, 8)
    with swarm(engine, model, shares, tmp_path) as (device, server):
        assert answers(server, lengths, 8) == wanted
        status = device.status()
    assert status["failed_pair_count"] == status["rerouted_pair_count"] == 0
    assert status["missing_expert_count"] == 0
    # Sums were told early, and are what the backing server had.
    assert status["early_count"] > 0
    assert status["differing_sum_count"] == 0
    assert sum(worker["pair_count"] for worker in status["workers"]) == status["pair_count"] > 0


@pytest.mark.slow
def test_gate_and_up_in_one_tensor_are_sliced_and_served() -> None:
    from linkcpp.worker.slabs import GgufSlabs

    slabs = GgufSlabs(models.qwen35moe_fused(), [Segment(layer=0, first=3, last=5)])
    slabs.close()
    assert {tensor.part for tensor in slabs.tensors} == {
        "ffn_gate_up_exps.weight",
        "ffn_down_exps.weight",
    }


def together(server: Server, count: int) -> list[str]:
    """Ask for several sequences in one request, so that both runs compose the same batches."""
    prompts = [prompt(24, seed) for seed in range(SEQUENCES)]
    found = server.complete(prompts, count)  # type: ignore[arg-type]
    assert isinstance(found, list)
    return [as_json(answer) for answer in found]


@pytest.mark.parametrize("mixture", ["qwen3moe", "gpt-oss"])
def test_four_sequences_at_once_are_exact_where_their_batches_are_equal(
    mixture: str, engine: EngineLocation, tmp_path: Path
) -> None:
    model = MIXTURES[mixture]()
    with alone(engine, model, tmp_path, *BATCHED) as server:
        wanted = together(server, 12)
        # Only what llama.cpp itself repeats to the bit can be compared.
        is_repeatable = wanted == together(server, 12)
    assert len(set(wanted)) == SEQUENCES
    assert is_repeatable
    with swarm(engine, model, even_shares(model, 3), tmp_path, *BATCHED) as (_, server):
        assert together(server, 12) == wanted
