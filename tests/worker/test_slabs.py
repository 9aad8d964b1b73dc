"""Slabs as workers read them, held against the gguf package."""

from pathlib import Path

import gguf
import pytest

from linkcpp.model.source import PIECE_BYTES
from linkcpp.worker.slabs import GgufSlabs
from tests.support.tiny_model import Q4_K, Q6_K, TinyModel


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of experts whose slabs are as large as those of real models."""
    path = tmp_path_factory.mktemp("model") / "large.gguf"
    made = TinyModel(path, "qwen3moe", layers=1, hidden=1024)
    made.experts(count=3, used=2, width=768)
    made.moe("blk.0.", count=3, width=768, quant=Q4_K, down=Q6_K)
    return made.finish()


def test_slabs_of_several_pieces_are_read_whole(model: Path) -> None:
    wanted = {tensor.name: tensor.data for tensor in gguf.GGUFReader(model).tensors}
    slabs = GgufSlabs(model)
    for tensor in slabs.tensors:
        assert tensor.slab_bytes > PIECE_BYTES
        for expert in range(3):
            data = slabs.read(tensor, expert, 0, tensor.slab_bytes)
            assert data == wanted[tensor.name][expert].tobytes()
    slabs.close()
