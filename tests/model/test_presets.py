"""Presets: their sizes against published files, their names, and how users meet them."""

from pathlib import Path

import pytest

from linkcpp.common.errors import LinkcppError
from linkcpp.model.inventory import read_inventory
from linkcpp.model.memory import kv_bytes
from linkcpp.model.presets import MixedType, expand_preset, find_preset, load_model, presets
from linkcpp.model.records import LayerKind
from linkcpp.model.summary import summarize
from tests.support.models import llama, smollm2_path

NAMES = [preset.aliases[0] for preset in presets()]


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_has_the_size_of_the_published_file(name: str) -> None:
    preset = find_preset(name)
    assert preset
    inventory = expand_preset(preset)
    # Beyond the weights a file has its header: 11 MB at most, felt only in the smallest.
    assert inventory.weight_bytes == pytest.approx(preset.published_bytes, rel=0.001, abs=2_000_000)


def test_the_122b_is_what_it_is_known_for() -> None:
    inventory = load_model("122B")
    summary = summarize(inventory)
    assert len(inventory.layers) == 49
    assert [layer.index for layer in inventory.layers if layer.kind is LayerKind.ATTENTION] == list(
        range(3, 48, 4)
    )
    assert inventory.layers[48].kind is LayerKind.NEXT_TOKEN
    assert summary.expert_count == 12_544
    assert summary.smallest_expert_bytes == summary.largest_expert_bytes == 5_308_416
    assert summary.expert_share == pytest.approx(0.86, abs=0.005)
    assert inventory.weight_bytes == pytest.approx(77.6e9, rel=0.001)
    assert summary.parameter_count == pytest.approx(124.64e9, rel=0.0001)
    assert inventory.shape.vocabulary_size == 248_320
    assert inventory.shape.experts_per_token == 8
    # 12 layers with 2 heads of 256 for keys and as many for values, two bytes each.
    assert sum(kv_bytes(layer, context_tokens=256) for layer in inventory.layers) == (
        256 * 12 * 2 * 2 * 256 * 2
    )


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3-30B-A3B", 30.53),
        ("Qwen3-235B-A22B", 235.09),
        ("gpt-oss-120b", 116.83),
        ("DeepSeek-V3", 671.03),
        ("Llama-3.3-70B", 70.55),
        ("Qwen3.5-35B-A3B", 34.66),
    ],
)
def test_a_preset_has_the_parameters_that_llama_bench_counts(name: str, billions: float) -> None:
    assert summarize(load_model(name)).parameter_count == pytest.approx(billions * 1e9, rel=0.0002)


def test_the_small_preset_is_its_file_to_the_byte() -> None:
    preset, file = load_model("SmolLM2-135M"), read_inventory(smollm2_path())
    assert preset.layers == file.layers
    assert preset.shape == file.shape
    assert preset.type_bytes == file.type_bytes
    assert (preset.embedding_bytes, preset.output_bytes, preset.tied_bytes) == (
        file.embedding_bytes,
        file.output_bytes,
        file.tied_bytes,
    )


def test_the_mixture_follows_llama_quantize() -> None:
    mixed = MixedType(usual="Q4_K", more_bits="Q6_K")
    more = [layer for layer in range(32) if mixed.of_layer(layer, 32) == "Q6_K"]
    assert more == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]


@pytest.mark.parametrize(
    "spelling", ["122B", "122b", " Qwen3.5-122B-A10B", "qwen3.5 122b a10b", "QWEN3.5_122B_A10B"]
)
def test_a_preset_is_found_in_any_spelling(spelling: str) -> None:
    assert load_model(spelling).name == "Qwen3.5-122B-A10B Q4_K_M"


def test_no_two_presets_share_a_name() -> None:
    names = [name.casefold() for preset in presets() for name in (preset.name, *preset.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_tells_the_source_of_its_numbers(name: str) -> None:
    inventory = load_model(name)
    assert any("https://huggingface.co/" in note for note in inventory.notes)
    assert inventory.digest is None


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(LinkcppError, match="'120B' is neither a file nor a known preset") as caught:
        load_model("120B")
    assert caught.value.hint
    assert "122B" in caught.value.hint
    assert "--list" in caught.value.hint


def test_a_name_like_nothing_still_leads_on() -> None:
    with pytest.raises(LinkcppError) as caught:
        load_model("zzzzzzzz")
    assert caught.value.hint == "`linkcpp inspect --list` shows all presets."


@pytest.mark.parametrize("path", ["absent.gguf", "./122B", "models/122B", "~/absent/122B"])
def test_what_looks_like_a_path_is_looked_for_as_one(path: str) -> None:
    with pytest.raises(LinkcppError, match="There is no file"):
        load_model(path)


def test_a_file_comes_before_a_preset_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("122B").write_bytes(llama().read_bytes())
    assert load_model("122B").name == "tiny-llama"


def test_a_folder_does_not_hide_a_preset_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("122B").mkdir()
    assert load_model("122B").digest is None


def test_an_impossible_path_is_named() -> None:
    with pytest.raises(LinkcppError, match="not a usable path"):
        load_model("a" * 5000)
    with pytest.raises(LinkcppError, match="not a usable path"):
        load_model("a\0b.gguf")
