"""A dense model made into experts: only bytes move, and llama-server writes the same text."""

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest

from bin.moeify import moeify
from linkcpp.common.errors import LinkcppError
from linkcpp.engine.records import EngineLocation
from linkcpp.model.inventory import read_inventory
from tests.support.models import TINY_MODELS, llama, smollm2_mixture, smollm2_path
from tests.support.swarm import probabilities, running_llama_server

PROMPT = "The three most useful things in a kitchen are"
TIE = 0.2
F32_CACHE = ("-ctk", "f32", "-ctv", "f32", "-fa", "off")


@pytest.mark.parametrize("count", [2, 8])
def test_the_experts_of_a_layer_are_its_network_cut_in_parts(count: int, tmp_path: Path) -> None:
    output = tmp_path / "moe.gguf"
    moeify(llama(), output, count)
    dense = {tensor.name: tensor for tensor in gguf.GGUFReader(llama()).tensors}
    mixture = {tensor.name: tensor for tensor in gguf.GGUFReader(output).tensors}
    for layer in range(6):
        for part in ("gate", "up"):
            whole = dense[f"blk.{layer}.ffn_{part}.weight"]
            made = mixture[f"blk.{layer}.ffn_{part}_exps.weight"]
            assert made.data.tobytes() == whole.data.tobytes()
            assert made.shape.tolist() == [256, 512 // count, count]
        down = numbers(dense[f"blk.{layer}.ffn_down.weight"])
        experts = numbers(mixture[f"blk.{layer}.ffn_down_exps.weight"])
        together = np.concatenate(list(experts), axis=1)
        assert np.array_equal(together, down * count)
        assert not mixture[f"blk.{layer}.ffn_gate_inp.weight"].data.any()
    others = [name for name in dense if ".ffn_" not in name or "norm" in name]
    assert all(mixture[name].data.tobytes() == dense[name].data.tobytes() for name in others)


def numbers(tensor: gguf.ReaderTensor) -> np.ndarray:
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def test_the_metadata_is_kept(tmp_path: Path) -> None:
    output = tmp_path / "moe.gguf"
    moeify(llama(), output, 4)
    before, after = gguf.GGUFReader(llama()).fields, gguf.GGUFReader(output).fields
    changed = {"llama.feed_forward_length", "llama.expert_count", "llama.expert_used_count"}
    counted = {key for key in before if key.startswith("GGUF.")}
    for key in set(before) - changed - counted:
        assert after[key].contents() == before[key].contents(), key
    shape = read_inventory(output).shape
    assert (shape.expert_count, shape.experts_per_token) == (4, 4)


@pytest.mark.parametrize(
    ("model", "count", "words"),
    [
        ("llama", 3, "cannot be made exactly"),
        ("llama", 1, "cannot be made exactly"),
        ("llama", 64, "at block borders"),
        ("gemma3", 4, "not a dense model"),
        ("qwen3moe", 4, "not a dense model"),
    ],
)
def test_what_cannot_be_made_exactly_is_refused(
    model: str, count: int, words: str, tmp_path: Path
) -> None:
    output = tmp_path / "moe.gguf"
    with pytest.raises(LinkcppError, match=words) as caught:
        moeify(TINY_MODELS[model](), output, count)
    assert caught.value.hint
    assert not output.exists()


def in_f32(model: Path, output: Path) -> Path:
    """The same model with weights of F32: llama.cpp then quantizes no activations either."""
    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(output, "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            kinds = (field.types[0], field.types[-1] if is_array else None)
            writer.add_key_value(key, field.contents(), *kinds)
    for tensor in reader.tensors:
        shape = tensor.shape[::-1].tolist()
        writer.add_tensor(tensor.name, numbers(tensor).astype(np.float32).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return output


def generate(
    engine: EngineLocation, models: Sequence[Path], folder: Path, *options: str
) -> list[list[list[tuple[int, float]]]]:
    """The top-8 log-probabilities of what each model writes greedily."""
    found = []
    for number, model in enumerate(models):
        running = running_llama_server(engine, model, folder, label=str(number), extra=options)
        with running as server:
            found.append(probabilities(server.complete(PROMPT, 40)))
    return found


def test_the_function_is_the_same(engine: EngineLocation, tmp_path: Path) -> None:
    dense, mixture = in_f32(llama(), tmp_path / "dense.gguf"), tmp_path / "moe.gguf"
    moeify(dense, mixture, 8)
    one, other = generate(engine, [dense, mixture], tmp_path, *F32_CACHE)
    differences = []
    for here, there in zip(one, other, strict=True):
        assert here[0][0] == there[0][0]
        # Equal up to the last bits, so neighbours in the top 8 may change places.
        found = dict(there)
        differences += [abs(value - found[token]) for token, value in here if token in found]
    assert len(differences) > 7 * len(one)
    assert max(differences) < 1e-4


def test_the_real_model_writes_the_same_text_as_a_mixture(
    engine: EngineLocation, tmp_path: Path
) -> None:
    dense, mixture = generate(engine, [smollm2_path(), smollm2_mixture(8)], tmp_path)
    for here, there in zip(dense, mixture, strict=True):
        if here[0][0] != there[0][0]:
            # Activations are quantized, so the order of a sum matters as much as it does between
            # two kernels of llama.cpp: a tie may fall either way, and the text differs from there.
            assert here[0][1] - here[1][1] < TIE
            break
    assert [step[0][0] for step in dense[:8]] == [step[0][0] for step in mixture[:8]]


def test_the_mixture_writes_english(stock_engine: EngineLocation, tmp_path: Path) -> None:
    with running_llama_server(stock_engine, smollm2_mixture(8), tmp_path) as server:
        assert "Paris" in server.complete("The capital of France is", 8)["content"]
