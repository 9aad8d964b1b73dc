"""Where models are read from: single files, split files, and what a user can get wrong."""

import os
import shutil
from pathlib import Path

import psutil
import pytest

from linkcpp.common.errors import LinkcppError
from linkcpp.model.inventory import read_inventory
from linkcpp.model.parts import open_model
from linkcpp.model.source import FileSource
from tests.model import gguf_bytes as raw
from tests.support.models import llama, llama_parts


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A split model of three parts that a test may damage."""
    return [Path(shutil.copy(part, tmp_path)) for part in llama_parts()]


@pytest.mark.parametrize("named", [0, 1, 2])
def test_any_part_of_a_split_model_finds_all_of_them(parts: list[Path], named: int) -> None:
    whole, split = read_inventory(llama()), read_inventory(parts[named])
    assert split.part_count == 3
    assert split.layers == whole.layers
    assert split.type_bytes == whole.type_bytes
    assert split.file_bytes == sum(part.stat().st_size for part in parts)
    assert split.source == str(parts[0])


def test_the_digest_is_the_same_whichever_part_is_named(parts: list[Path]) -> None:
    assert len({read_inventory(part).digest for part in parts}) == 1


def test_a_relative_path_works_like_an_absolute_one(
    parts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(parts[0].parent)
    assert read_inventory(parts[1].name) == read_inventory(parts[1])


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_part_is_named(parts: list[Path], missing: int) -> None:
    parts[missing].unlink()
    named = parts[(missing + 1) % 3]
    with pytest.raises(LinkcppError) as caught:
        read_inventory(named)
    assert parts[missing].name in caught.value.message
    assert "3 parts" in caught.value.message


def test_parts_that_were_swapped_are_refused(parts: list[Path]) -> None:
    spare = parts[0].with_name("spare")
    parts[1].rename(spare)
    parts[2].rename(parts[1])
    spare.rename(parts[2])
    with pytest.raises(LinkcppError, match="by its name it is part 2, by its header part 3"):
        read_inventory(parts[0])


def test_a_part_of_another_model_is_refused(parts: list[Path]) -> None:
    parts[2].write_bytes(llama().read_bytes())
    with pytest.raises(LinkcppError, match="does not belong to its neighbours"):
        read_inventory(parts[0])


def test_a_part_given_twice_is_refused(parts: list[Path]) -> None:
    pairs = [raw.pair("split.no", 2, b"\x02\x00"), raw.pair("split.count", 2, b"\x03\x00")]
    double = raw.Tensor("blk.0.attn_norm.weight", (8,))
    parts[2].write_bytes(raw.gguf(pairs, [double], data_bytes=32))
    with pytest.raises(LinkcppError, match=r"blk\.0\.attn_norm\.weight is also in an earlier part"):
        read_inventory(parts[0])


def test_a_renamed_part_is_refused(parts: list[Path]) -> None:
    renamed = parts[0].rename(parts[0].with_name("renamed.gguf"))
    with pytest.raises(LinkcppError, match="by its header it is one of 3 parts") as caught:
        read_inventory(renamed)
    assert caught.value.hint
    assert "names that they had" in caught.value.hint


@pytest.mark.parametrize("name", ["m-00004-of-00003.gguf", "m-00000-of-00003.gguf"])
def test_an_impossible_part_number_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(raw.small_model())
    with pytest.raises(LinkcppError, match="which cannot be"):
        read_inventory(tmp_path / name)


def test_a_name_that_promises_99999_parts_opens_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-99999.gguf"
    path.write_bytes(raw.small_model())
    with pytest.raises(LinkcppError, match="which cannot be"):
        read_inventory(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LinkcppError, match=r"There is no file .*absent\.gguf"):
        read_inventory(tmp_path / "absent.gguf")


def test_a_folder_is_refused_and_the_model_in_it_offered(tmp_path: Path) -> None:
    (tmp_path / "inside.gguf").write_bytes(b"")
    with pytest.raises(LinkcppError, match="is a folder") as caught:
        read_inventory(tmp_path)
    assert caught.value.hint
    assert "inside.gguf" in caught.value.hint


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(LinkcppError, match="is empty"):
        read_inventory(tmp_path / "empty.gguf")


def test_a_pipe_is_refused_without_waiting_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(LinkcppError, match="not a regular file"):
        read_inventory(tmp_path / "pipe.gguf")


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret.gguf"
    path.write_bytes(raw.small_model())
    path.chmod(0)
    if os.access(path, os.R_OK):  # root reads everything
        monkeypatch.setattr(os, "open", _denied)
    with pytest.raises(LinkcppError, match="may not be read by this user") as caught:
        read_inventory(path)
    assert caught.value.hint
    assert "chmod" in caught.value.hint


def _denied(*_: object) -> int:
    raise PermissionError(13, "Permission denied")


def test_a_truncated_model_says_that_the_transfer_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(llama().read_bytes()[:-1000])
    with pytest.raises(LinkcppError, match="is truncated: tensor") as caught:
        read_inventory(path)
    assert caught.value.hint
    assert "cut off" in caught.value.hint


def test_reading_leaves_no_file_open(parts: list[Path]) -> None:
    process = psutil.Process()
    before = process.num_fds()
    read_inventory(parts[0])
    parts[2].unlink()
    with pytest.raises(LinkcppError):
        read_inventory(parts[0])
    assert process.num_fds() == before


def test_weights_are_read_through_the_same_sources(parts: list[Path]) -> None:
    with open_model(llama()) as whole, open_model(parts[0]) as split:
        of_whole = {tensor.name: tensor for _, tensor in whole.tensors}
        for part, tensor in split.tensors:
            there = of_whole[tensor.name]
            assert split.sources[part].read(tensor.offset_bytes, tensor.size_bytes) == (
                whole.sources[0].read(there.offset_bytes, there.size_bytes)
            )


def test_a_range_outside_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"abc")
    with FileSource(path) as source:
        assert source.read(1, 2) == b"bc"
        for offset, length in ((2, 2), (-1, 1), (0, -1), (4, 0)):
            with pytest.raises(LinkcppError, match="truncated"):
                source.read(offset, length)
