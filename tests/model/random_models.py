"""Mixture models made byte by byte: any shapes and types, random bytes for weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from linkcpp.model.ggml_types import TYPES_BY_NAME
from tests.model import gguf_bytes as raw

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4", "TQ2_0")
SEPARATE = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
FUSED = ("ffn_gate_up_exps", "ffn_down_exps")


@dataclass(frozen=True)
class Layer:
    """``experts`` is 0 for a dense layer. ``extras`` are suffixes besides ``weight``."""

    experts: int
    parts: tuple[str, ...]
    types: tuple[str, ...]
    width: int
    rows: int
    extras: tuple[str, ...]


@dataclass(frozen=True)
class Model:
    """A drawn model; ``files`` is how many it is split into."""

    layers: tuple[Layer, ...]
    files: int
    seed: int

    def tensors(self) -> list[raw.Tensor]:
        """All tensors, in order, without offsets."""
        found = [raw.Tensor("token_embd.weight", (256, 3))]
        for number, layer in enumerate(self.layers):
            prefix = f"blk.{number}."
            found.append(raw.Tensor(f"{prefix}attn_norm.weight", (256,)))
            if not layer.experts:
                found.append(raw.Tensor(f"{prefix}ffn_up.weight", (256, 2)))
                continue
            for part, name in zip(layer.parts, layer.types, strict=False):
                kind = TYPES_BY_NAME[name].number
                shape = (layer.width, layer.rows, layer.experts)
                found.append(raw.Tensor(f"{prefix}{part}.weight", shape, kind))
                for extra in layer.extras:
                    inner = (layer.rows,) if extra == "bias" else ()
                    found.append(raw.Tensor(f"{prefix}{part}.{extra}", (*inner, layer.experts)))
            found.append(raw.Tensor(f"{prefix}exp_probs_b.bias", (layer.experts,)))
        return found

    def write(self, folder: Path) -> Path:
        """Write the model; gives the path of its first file."""
        tensors = self.tensors()
        share = -(-len(tensors) // self.files)
        groups = [tensors[at : at + share] for at in range(0, len(tensors), share)]
        names = ["model.gguf"]
        if len(groups) > 1:
            names = [f"model-{n + 1:05d}-of-{len(groups):05d}.gguf" for n in range(len(groups))]
        generator = np.random.default_rng(self.seed)
        for number, (name, group) in enumerate(zip(names, groups, strict=True)):
            pairs = self._pairs() if number == 0 else []
            if len(groups) > 1:
                pairs += [
                    raw.u32("split.no", number),
                    raw.u32("split.count", len(groups)),
                    raw.u32("split.tensors.count", len(tensors)),
                ]
            (folder / name).write_bytes(packed(pairs, group, generator))
        return folder / names[0]

    def _pairs(self) -> list[bytes]:
        return [
            raw.text("general.architecture", "qwen3moe"),
            raw.text("general.name", "drawn"),
            raw.u32("qwen3moe.block_count", len(self.layers)),
            raw.u32("qwen3moe.embedding_length", 256),
            counts("qwen3moe.expert_count", [layer.experts for layer in self.layers]),
            raw.strings("tokenizer.ggml.tokens", ["a", "b", "c"]),
        ]


def counts(key: str, values: Sequence[int]) -> bytes:
    """An array of u32."""
    head = raw.U32.to_bytes(4, "little") + len(values).to_bytes(8, "little")
    return raw.pair(key, raw.ARRAY, head + b"".join(v.to_bytes(4, "little") for v in values))


def packed(
    pairs: Sequence[bytes], tensors: Sequence[raw.Tensor], generator: np.random.Generator
) -> bytes:
    """A whole file with random data."""
    offset = 0
    for tensor in tensors:
        tensor.offset = offset
        offset += -(-size_of(tensor) // 32) * 32
    return raw.gguf(pairs, tensors) + generator.bytes(offset)


def size_of(tensor: raw.Tensor) -> int:
    """Bytes of a tensor."""
    kind = next(kind for kind in TYPES_BY_NAME.values() if kind.number == tensor.kind)
    elements = 1
    for extent in tensor.shape:
        elements *= extent
    return elements // kind.block_elements * kind.block_bytes


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    """A dense layer or one with experts."""
    return Layer(
        experts=draw(st.sampled_from([0, 1, 2, 3, 7, 8])),
        parts=draw(st.sampled_from([SEPARATE, FUSED])),
        types=tuple(draw(st.sampled_from(TYPES)) for _ in range(3)),
        width=draw(st.sampled_from([256, 512])),
        rows=draw(st.integers(1, 5)),
        extras=tuple(
            draw(st.lists(st.sampled_from(["bias", "scale", "input_scale"]), unique=True))
        ),
    )


@st.composite
def models(draw: st.DrawFn) -> Model:
    """A model in one to three files, at least one layer of which has experts."""
    found = draw(st.lists(layers(), min_size=1, max_size=4))
    if not any(layer.experts for layer in found):
        found.append(Layer(4, FUSED, ("Q8_0", "F16"), 256, 2, ("bias",)))
    return Model(tuple(found), files=draw(st.integers(1, 3)), seed=draw(st.integers(0, 2**32)))


def expert_counts(model: Model) -> dict[int, int]:
    """The experts of every layer that has some."""
    return {number: layer.experts for number, layer in enumerate(model.layers) if layer.experts}
