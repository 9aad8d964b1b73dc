"""Hollow models: the same header and all but the experts' weights, with holes for these."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from linkcpp.common.errors import LinkcppError
from linkcpp.engine.records import EngineLocation
from linkcpp.model.expert_tensors import is_expert_weight
from linkcpp.model.inventory import read_inventory
from linkcpp.model.parts import open_model
from linkcpp.model.slices.target import Target
from linkcpp.model.slices.verifying import DamagedError, checked_manifest, verify_file
from linkcpp.model.slices.writing import (
    WrittenFile,
    backbone_paths,
    holes_notes,
    open_whole_model,
    write_backbone,
)
from tests.model import random_models as drawn
from tests.model.server_log import buffer_sizes
from tests.model.test_slices import flip
from tests.support.lengths import repeated
from tests.support.models import gpt_oss, llama, qwen3moe


def hollow(model: Path, output: Path) -> list[WrittenFile]:
    with open_whole_model(model) as files:
        return write_backbone(files, output, lambda _: None)


def emptied(model: Path) -> list[bytes]:
    """What the files of a hollow model should read as: zeros for the experts' weights."""
    found = []
    with open_model(model) as files:
        for source, header in zip(files.sources, files.headers, strict=True):
            content = bytearray(source.read(0, source.size_bytes))
            for tensor in header.tensors:
                if is_expert_weight(tensor.name):
                    end = tensor.offset_bytes + tensor.size_bytes
                    content[tensor.offset_bytes : end] = bytes(tensor.size_bytes)
            found.append(bytes(content))
    return found


@pytest.mark.parametrize("make", [qwen3moe, gpt_oss])
def test_all_but_the_experts_weights_is_there(make: object, tmp_path: Path) -> None:
    model: Path = make()  # type: ignore[operator]
    (written,) = hollow(model, tmp_path / "b.gguf")
    assert written.path.read_bytes() == emptied(model)[0]
    assert read_inventory(written.path).digest == read_inventory(model).digest


@given(drawn.models())
@settings(max_examples=repeated(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_model_and_its_parts_can_be_hollow(model: drawn.Model) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        path = model.write(Path(name))
        written = hollow(path, Path(name) / "b.gguf")
        assert [file.path.read_bytes() for file in written] == emptied(path)
        assert read_inventory(written[0].path).digest == read_inventory(path).digest
        assert all(verify_file(file.path, lambda _: None).is_sound for file in written)


def test_the_holes_take_no_room(tmp_path: Path) -> None:
    layer = drawn.Layer(8, drawn.SEPARATE, ("Q8_0",) * 3, 512, 1000, ())
    model = drawn.Model((layer, layer), files=1, seed=0).write(tmp_path)
    (written,) = hollow(model, tmp_path / "b.gguf")
    if not keeps_holes(tmp_path):
        assert "does not keep holes" in written.notes[0]
        return
    assert written.notes == ()
    assert written.file_bytes > 25_000_000
    assert written.path.stat().st_blocks * 512 == written.allocated_bytes < 100_000


def keeps_holes(folder: Path) -> bool:
    """Whether this file system keeps holes."""
    path = folder / "probe"
    with path.open("wb") as file:
        file.truncate(2**20)
    return path.stat().st_blocks == 0


def test_a_file_system_without_holes_is_told() -> None:
    path = Path("/somewhere/b.gguf")
    (note,) = holes_notes(path, 10**6, allocated_bytes=10**9, file_bytes=10**9)
    assert "/somewhere does not keep holes" in note
    assert "1.00 GB" in note
    assert holes_notes(path, 10**6, allocated_bytes=10**6 + 8192, file_bytes=10**9) == ()


def test_a_changed_byte_of_a_hollow_model_is_found(tmp_path: Path) -> None:
    (written,) = hollow(qwen3moe(), tmp_path / "b.gguf")
    flip(written.path, 100)
    assert not verify_file(written.path, lambda _: None).is_sound


def test_a_begun_hollow_model_goes_on(tmp_path: Path) -> None:
    layer = drawn.Layer(2, drawn.FUSED, ("Q8_0", "F16"), 512, 4, ())
    model = drawn.Model((layer,) * 4, files=3, seed=5).write(tmp_path)
    paths = backbone_paths(tmp_path / "b.gguf", 3)
    total = sum(file.copied_bytes for file in hollow(model, tmp_path / "other.gguf"))
    done = 0

    def stop(more_bytes: int) -> None:
        nonlocal done
        done += more_bytes
        if done > total * 2 // 3:
            raise KeyboardInterrupt

    with open_whole_model(model) as files, pytest.raises(KeyboardInterrupt):
        write_backbone(files, tmp_path / "b.gguf", stop)
    assert not any(path.exists() for path in paths)
    assert Target(paths[0]).partial.exists()
    written = hollow(model, tmp_path / "b.gguf")
    assert written[0].reused_bytes == written[0].copied_bytes
    assert [path.read_bytes() for path in paths] == emptied(model)


def test_a_dense_model_is_not_hollowed(tmp_path: Path) -> None:
    with pytest.raises(LinkcppError, match="has no experts"):
        hollow(llama(), tmp_path / "b.gguf")
    assert list(tmp_path.glob("b.gguf*")) == []


def test_llama_server_loads_a_hollow_model(engine: EngineLocation, tmp_path: Path) -> None:
    (written,) = hollow(qwen3moe(), tmp_path / "b.gguf")
    hollow_sizes = buffer_sizes(engine, written.path, "-c", "512", "-ngl", "0")
    assert hollow_sizes.model == buffer_sizes(engine, qwen3moe(), "-c", "512", "-ngl", "0").model


def test_the_order_of_parts_does_not_matter(tmp_path: Path) -> None:
    layer = drawn.Layer(2, drawn.FUSED, ("Q8_0", "F16"), 512, 4, ())
    model = drawn.Model((layer,) * 3, files=3, seed=6)
    last = sorted(model.write(tmp_path).parent.glob("model-*"))[-1]
    written = hollow(last, tmp_path / "b.gguf")
    assert [file.path.read_bytes() for file in written] == emptied(last)


def test_a_file_is_read_again_only_where_something_of_it_changed(tmp_path: Path) -> None:
    (written,) = hollow(qwen3moe(), tmp_path / "b.gguf")
    path, read = written.path, list[int]()
    checked_manifest(path, lambda _: None)
    checked_manifest(path, read.append)
    assert read == []
    path.touch()
    checked_manifest(path, read.append)
    assert sum(read) == written.copied_bytes
    checked_manifest(path, read.append)
    assert sum(read) == written.copied_bytes


def test_damage_is_found_though_size_and_time_are_what_they_were(tmp_path: Path) -> None:
    (written,) = hollow(qwen3moe(), tmp_path / "b.gguf")
    before = written.path.stat()
    flip(written.path, 5000)
    os.utime(written.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    for _ in range(2):
        with pytest.raises(DamagedError, match="is damaged: bytes 0 to"):
            checked_manifest(written.path, lambda _: None)
    flip(written.path, 5000)
    checked_manifest(written.path, lambda _: None)
