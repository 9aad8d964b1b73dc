"""Slices: valid GGUF files that have exactly the chosen experts' bytes."""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linkcpp.common.errors import LinkcppError
from linkcpp.engine.records import EngineLocation
from linkcpp.model.inventory import read_inventory
from linkcpp.model.slices.manifest import manifest_path, read_manifest
from linkcpp.model.slices.segments import Segment, parse_segment
from linkcpp.model.slices.slabs import ExpertSlabs
from linkcpp.model.slices.verifying import Verification, verify_file
from linkcpp.model.slices.writing import (
    WrittenFile,
    choose_segments,
    open_whole_model,
    write_slice,
)
from tests.model import gguf_bytes as raw
from tests.model import random_models as drawn
from tests.support.lengths import repeated
from tests.support.models import TINY_MODELS, llama, qwen3moe

SlabBytes = dict[tuple[str, int], bytes]


def cut(model: Path | str, output: Path, *segments: str) -> WrittenFile:
    with open_whole_model(model) as files:
        chosen = choose_segments(files, [parse_segment(text) for text in segments])
        return write_slice(files, chosen, output, lambda _: None)


def verify(path: Path) -> Verification:
    return verify_file(path, lambda _: None)


def slabs_by_gguf(path: Path) -> SlabBytes:
    """Every slab of a model or slice, read by the gguf package."""
    reader = gguf.GGUFReader(path)
    found: SlabBytes = {}
    for tensor in reader.tensors:
        if "_exps." not in tensor.name:
            continue
        layer = tensor.name.split(".")[1]
        ranges = reader.fields.get(f"linkcpp.slice.blk.{layer}.expert_ranges")
        experts = list(range(int(tensor.shape[-1])))
        if ranges is not None:
            ends = ranges.contents()
            experts = [
                expert
                for first, last in zip(ends[::2], ends[1::2], strict=True)
                for expert in range(first, last + 1)
            ]
            # llama.cpp's tools leave out outermost dimensions of 1.
            assert len(experts) in (1, int(tensor.shape[-1]))
        size = int(tensor.n_bytes) // len(experts)
        data = tensor.data.tobytes()
        for number, expert in enumerate(experts):
            found[tensor.name, expert] = data[number * size : (number + 1) * size]
    return found


def read_all(slabs: ExpertSlabs) -> SlabBytes:
    return {
        (slab.tensor.name, slab.expert): slabs.read(
            slab.tensor, slab.expert, 0, slab.tensor.slab_bytes
        )
        for slab in slabs
    }


@pytest.mark.parametrize("architecture", ["qwen3moe", "qwen35moe", "gpt-oss", "deepseek2"])
def test_a_slice_has_the_bytes_of_its_experts_and_nothing_else(
    architecture: str, tmp_path: Path
) -> None:
    model = TINY_MODELS[architecture]()
    written = cut(model, tmp_path / "s.gguf", "1-2:1-3,6", "3:7")
    whole, part = slabs_by_gguf(model), slabs_by_gguf(written.path)
    assert set(part) == {
        (name, expert)
        for name, expert in whole
        if (int(name.split(".")[1]) in (1, 2) and expert in (1, 2, 3, 6))
        or (int(name.split(".")[1]) == 3 and expert == 7)
    }  # fmt: skip
    assert all(part[key] == whole[key] for key in part)
    assert written.copied_bytes == sum(map(len, part.values()))
    assert verify(written.path).is_sound


def test_the_header_tells_what_a_worker_needs_and_no_more(tmp_path: Path) -> None:
    written = cut(qwen3moe(), tmp_path / "s.gguf", "0-1:0-3", "3:2-3,9")
    fields = gguf.GGUFReader(written.path).fields
    told = {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}
    assert not any(key.startswith(("tokenizer.", "qwen3moe.attention")) for key in told)
    inventory = read_inventory(qwen3moe())
    assert told["general.architecture"] == "qwen3moe"
    assert told["general.type"] == "slice"
    assert told["qwen3moe.expert_count"] == 16
    assert told["linkcpp.slice.source_digest"] == inventory.digest
    assert told["linkcpp.slice.hidden_size"] == inventory.shape.hidden_size
    assert told["linkcpp.slice.layers"] == [0, 1, 3]
    assert told["linkcpp.slice.blk.3.expert_count"] == 16
    assert told["linkcpp.slice.blk.3.held_count"] == 3
    assert told["linkcpp.slice.blk.3.expert_ranges"] == [2, 3, 9, 9]
    assert told["linkcpp.slice.blk.3.tensors"].split() == [
        "ffn_gate_exps.weight:Q4_K",
        "ffn_up_exps.weight:Q4_K",
        "ffn_down_exps.weight:Q6_K",
    ]


@pytest.mark.slow
@given(drawn.models(), st.data())
@settings(max_examples=repeated(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_slices_that_cover_everything_give_back_the_model(
    model: drawn.Model, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = model.write(folder)
        with ExpertSlabs(path) as slabs:
            whole = read_all(slabs)
        assert whole
        shares = data.draw(st.integers(1, 3), "shares")
        chosen: list[list[str]] = [[] for _ in range(shares)]
        for layer, count in drawn.expert_counts(model).items():
            for expert in range(count):
                for share in data.draw(st.sets(st.integers(0, shares - 1), min_size=1)):
                    chosen[share].append(f"{layer}:{expert}")
        together: SlabBytes = {}
        for number, segments in enumerate(chosen):
            if not segments:
                continue
            written = cut(path, folder / f"{number}.slice", *segments)
            assert verify(written.path).is_sound
            with ExpertSlabs(written.path) as slabs:
                part = read_all(slabs)
                assert slabs.segments == written.segments
            assert part == slabs_by_gguf(written.path)
            assert {f"{key[0].split('.')[1]}:{key[1]}" for key in part} == set(segments)
            together |= part
        assert together == whole


@given(drawn.models(), st.data())
@settings(max_examples=repeated(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_one_changed_byte_is_found_and_named(model: drawn.Model, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written = cut(model.write(folder), folder / "s.gguf", "all:all")
        manifest = read_manifest(written.path)
        tensor = data.draw(st.sampled_from(manifest.tensors))
        number = data.draw(st.integers(0, len(tensor.sha256) - 1))
        offset = data.draw(st.integers(0, tensor.slab_bytes - 1))
        flip(written.path, tensor.offset_bytes + number * tensor.slab_bytes + offset)
        found = verify(written.path)
        assert found.damaged == (f"expert {number} of {tensor.name}",)
        assert not found.is_sound


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_a_changed_header_is_found(tmp_path: Path) -> None:
    written = cut(qwen3moe(), tmp_path / "s.gguf", "0:0-3")
    flip(written.path, 60)
    assert verify(written.path).damaged[0].startswith("bytes 0 to")


def test_a_slice_cut_off_is_found(tmp_path: Path) -> None:
    written = cut(qwen3moe(), tmp_path / "s.gguf", "0:0-3")
    os.truncate(written.path, written.file_bytes - 1000)
    found = verify(written.path)
    assert found.damaged == ("expert 3 of blk.0.ffn_down_exps.weight",)
    assert found.problems


def test_a_manifest_of_another_slice_is_found(tmp_path: Path) -> None:
    one = cut(qwen3moe(), tmp_path / "1.gguf", "0:0-3")
    two = cut(qwen3moe(), tmp_path / "2.gguf", "0:4-7")
    shutil.copy(two.manifest, one.manifest)
    assert not verify(one.path).is_sound


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "damaged"),
        ("{}", "damaged"),
        ('{"version": 2}', "damaged"),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str, words: str) -> None:
    written = cut(qwen3moe(), tmp_path / "s.gguf", "0:0-3")
    written.manifest.write_text(text)
    with pytest.raises(LinkcppError, match=words):
        verify(written.path)


def test_a_manifest_that_lies_about_places_damages_nothing_but_itself(tmp_path: Path) -> None:
    written = cut(qwen3moe(), tmp_path / "s.gguf", "0:0-3")
    content = json.loads(written.manifest.read_text())
    content["tensors"][0]["offset_bytes"] = -5
    content["tensors"][1]["slab_bytes"] = 2**60
    content["tensors"][2]["experts"] = [[0, 10**9]]
    written.manifest.write_text(json.dumps(content))
    assert not verify(written.path).is_sound


def test_without_a_manifest_nothing_is_called_sound(tmp_path: Path) -> None:
    written = cut(qwen3moe(), tmp_path / "s.gguf", "0:0-3")
    manifest_path(written.path).unlink()
    with pytest.raises(LinkcppError, match="no manifest"):
        verify(written.path)


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LinkcppError, match="has no experts"):
        cut(llama(), tmp_path / "s.gguf", "0:0")


def test_a_dense_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LinkcppError, match="Layer 0 is dense"):
        cut(TINY_MODELS["deepseek2"](), tmp_path / "s.gguf", "0-1:0")


def test_a_slice_of_a_slice_is_refused(tmp_path: Path) -> None:
    written = cut(qwen3moe(), tmp_path / "s.gguf", "0:0-3")
    with pytest.raises(LinkcppError, match="is itself a slice"):
        cut(written.path, tmp_path / "t.gguf", "0:0")


def test_a_slice_is_not_taken_for_a_model(tmp_path: Path) -> None:
    written = cut(qwen3moe(), tmp_path / "s.gguf", "0:0-3")
    with pytest.raises(LinkcppError, match="type 'slice', not a language model"):
        read_inventory(written.path)


def odd_model(folder: Path, *tensors: raw.Tensor) -> Path:
    pairs = [
        raw.text("general.architecture", "qwen3moe"),
        raw.u32("qwen3moe.block_count", 1),
        raw.u32("qwen3moe.embedding_length", 256),
        raw.u32("qwen3moe.expert_count", 4),
    ]
    path = folder / "odd.gguf"
    path.write_bytes(drawn.packed(pairs, tensors, np.random.default_rng(0)))
    return path


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (raw.Tensor("blk.0.ffn_up_exps.weight", (256, 4, 8)), "promises 4 experts"),
        (raw.Tensor("blk.0.ffn_up_exps.weight", (4, 256)), "outermost"),
        (raw.Tensor("blk.0.ffn_up_exps.weight", (256, 2, 2, 4)), "outermost"),
        (raw.Tensor("blk.0.ffn_up_exps.bias", (4, 256)), "outermost"),
        (raw.Tensor("blk.0.ffn_up_exps.scale", (256, 4)), "outermost"),
        (raw.Tensor("blk.0.ffn_up.3.weight", (256, 4)), "tensor of its own"),
    ],
)
def test_what_cannot_be_cut_by_expert_is_refused_by_name(
    tmp_path: Path, tensor: raw.Tensor, words: str
) -> None:
    with pytest.raises(LinkcppError, match=words) as caught:
        cut(odd_model(tmp_path, tensor), tmp_path / "s.gguf", "0:0")
    assert caught.value.hint


def test_an_expert_that_ends_within_a_block_is_refused(tmp_path: Path) -> None:
    # 32 numbers are one block of Q8_0: no expert of the eight has a block of its own.
    q8_0 = 8
    path = odd_model(tmp_path, raw.Tensor("blk.0.ffn_up_exps.scale", (32,), q8_0))
    content = path.read_bytes().replace(
        raw.u32("qwen3moe.expert_count", 4), raw.u32("qwen3moe.expert_count", 32)
    )
    path.write_bytes(content)
    with pytest.raises(LinkcppError, match="does not end at a block's end"):
        cut(path, tmp_path / "s.gguf", "0:0")


def test_a_pipe_or_device_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(LinkcppError, match="is not a file"):
        cut(qwen3moe(), pipe, "0:0")
    assert pipe.is_fifo()


def test_the_model_itself_is_not_overwritten(tmp_path: Path) -> None:
    model = Path(shutil.copy(qwen3moe(), tmp_path))
    with pytest.raises(LinkcppError, match="is the model itself"):
        cut(model, model, "0:0")
    assert model.read_bytes() == qwen3moe().read_bytes()


def test_a_slice_offers_only_what_it_has(tmp_path: Path) -> None:
    written = cut(qwen3moe(), tmp_path / "s.gguf", "0-1:2-5")
    with ExpertSlabs(written.path, [Segment(layer=1, first=3, last=4)]) as slabs:
        assert {slab.expert for slab in slabs} == {3, 4}
        assert {tensor.layer for tensor in slabs.tensors} == {1}
    for layer, first, words in ((2, 2, "Layer 2 has no experts"), (0, 1, "experts 2-5, not 1-3")):
        with pytest.raises(LinkcppError, match=words):
            ExpertSlabs(written.path, [Segment(layer=layer, first=first, last=3)])


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("linkcpp.slice.version", 9, "version 9"),
        ("linkcpp.slice.blk.0.held_count", 3, "counts of layer 0"),
        ("linkcpp.slice.blk.0.expert_count", 3, "not ascending ranges"),
        ("linkcpp.slice.blk.0.expert_count", 2**31, "not ascending ranges"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(
    tmp_path: Path, key: str, value: int, words: str
) -> None:
    written = cut(qwen3moe(), tmp_path / "s.gguf", "0:0-3")
    content = written.path.read_bytes()
    place = content.index(raw.string(key)) + len(raw.string(key)) + 4
    changed = content[:place] + value.to_bytes(4, "little") + content[place + 4 :]
    written.path.write_bytes(changed)
    with pytest.raises(LinkcppError, match=words):
        ExpertSlabs(written.path)


def test_llama_cpps_own_tools_read_a_slice(engine: EngineLocation, tmp_path: Path) -> None:
    assert engine.llama_server
    tool = engine.llama_server.with_name("llama-gguf-split")
    if not tool.exists():
        pytest.skip("this engine has no llama-gguf-split")
    written = cut(qwen3moe(), tmp_path / "s.gguf", "0-1:2-5", "3:1")
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, engine.library_folders))}

    def run(*words: str) -> None:
        subprocess.run(
            [str(tool), *words], env=environment, check=True, capture_output=True, timeout=60
        )

    run("--split", "--split-max-tensors", "4", str(written.path), str(tmp_path / "cut"))
    run("--merge", str(tmp_path / "cut-00001-of-00003.gguf"), str(tmp_path / "merged.gguf"))
    assert slabs_by_gguf(tmp_path / "merged.gguf") == slabs_by_gguf(written.path)
    with ExpertSlabs(tmp_path / "merged.gguf") as merged, ExpertSlabs(written.path) as ours:
        assert read_all(merged) == read_all(ours)
