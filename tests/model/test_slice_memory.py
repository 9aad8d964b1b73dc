"""Memory does not grow with the model."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.model import gguf_bytes as raw
from tests.model import random_models as drawn

pytestmark = pytest.mark.slow

MEASURE = """
import os, sys
from pathlib import Path
from linkcpp.model.slices.segments import parse_segment
from linkcpp.model.slices.verifying import verify_file
from linkcpp.model.slices.writing import (
    choose_segments, open_whole_model, write_backbone, write_slice
)
from tests.support.memory import peak_bytes

model, output, what = sys.argv[1:]
with open_whole_model(model) as files:
    if what == "slice":
        chosen = choose_segments(files, [parse_segment("all:all")])
        written = write_slice(files, chosen, Path(output), lambda _: None)
    else:
        (written,) = write_backbone(files, Path(output), lambda _: None)
verify_file(written.path, lambda _: None)
# Not getrusage's, which counts from the process that started this one.
print(written.copied_bytes, peak_bytes(os.getpid()))
"""
F16 = 1


def sparse_model(path: Path, expert_bytes: int, other_bytes: int) -> Path:
    """A model whose weights are holes: it takes no room, but reads like any other."""
    tensors = [
        raw.Tensor("token_embd.weight", (256, other_bytes // 512), F16),
        raw.Tensor("blk.0.ffn_up_exps.weight", (4096, expert_bytes // 8192 // 16, 16), F16),
    ]
    pairs = [
        raw.text("general.architecture", "qwen3moe"),
        raw.u32("qwen3moe.block_count", 1),
        raw.u32("qwen3moe.embedding_length", 256),
        raw.u32("qwen3moe.expert_count", 16),
    ]
    tensors[1].offset = -(-drawn.size_of(tensors[0]) // 32) * 32
    header = raw.gguf(pairs, tensors)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(map(drawn.size_of, tensors)))
    return path


def peak(model: Path, output: Path, what: str) -> tuple[int, int]:
    """What was copied, and the most memory that the process had."""
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(model), str(output), what],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    copied, memory = map(int, run.stdout.split())
    output.unlink()
    return copied, memory


@pytest.mark.parametrize("what", ["slice", "backbone"])
def test_a_large_model_takes_no_more_memory_than_a_small_one(what: str, tmp_path: Path) -> None:
    small = sparse_model(tmp_path / "small.gguf", 16 * 2**20, 16 * 2**20)
    large = sparse_model(tmp_path / "large.gguf", 512 * 2**20, 512 * 2**20)
    few, little = peak(small, tmp_path / "o.gguf", what)
    many, much = peak(large, tmp_path / "o.gguf", what)
    assert many > 30 * few
    assert much - little < 16 * 2**20
