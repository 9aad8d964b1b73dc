"""A small GGUF model being made: random weights, a printable vocabulary, the engine's own quants.

The vocabulary is printable and the output rows of byte tokens are zero: llama-server (build 10068)
answers 500 when generated text is not valid UTF-8. The seed is fixed, so every run makes the same
bytes.
"""

import ctypes
import functools
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tests.support.engines import prebuilt_engine

Array = npt.NDArray[np.float32]
QuantType = gguf.GGMLQuantizationType
Q8_0, Q4_K, Q6_K, MXFP4 = QuantType.Q8_0, QuantType.Q4_K, QuantType.Q6_K, QuantType.MXFP4

CONTROL_TOKENS = [b"<unk>", b"<s>", b"</s>"]
BYTE_TOKENS = [f"<0x{byte:02X}>".encode() for byte in range(256)]
SPACE = "\u2581"
WORDS = [
    "the", "of", "and", "to", "in", "a", "is", "that", "it", "for", "on", "was", "with", "as",
    "be", "by", "at", "this", "from", "or", "an", "are", "not", "have", "but", "which", "you",
    "all", "were", "when", "we", "there", "can", "been", "has", "more", "if", "no", "out", "do",
    "so", "my", "one",
]  # fmt: skip


@functools.cache
def _ggml() -> ctypes.CDLL:
    library = next(iter(prebuilt_engine().library_folders)) / "libggml-base.so"
    ggml = ctypes.CDLL(str(library))
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    ggml.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
        ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    ggml.ggml_row_size.restype = ctypes.c_size_t
    ggml.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
    return ggml


def quantize(values: Array, quant: QuantType) -> npt.NDArray[np.uint8]:
    """Quantize rows with the engine's own code (the gguf package cannot write K-quants)."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    width = values.shape[-1]
    rows = values.size // width
    row_bytes = _ggml().ggml_row_size(int(quant), width)
    packed = np.empty(row_bytes * rows, dtype=np.uint8)
    written = _ggml().ggml_quantize_chunk(
        int(quant), values.ctypes.data, packed.ctypes.data, 0, rows, width, None
    )
    assert written == packed.size
    return packed.reshape(*values.shape[:-1], row_bytes)


class TinyModel:
    """A GGUF being written: a thin layer over the gguf writer that draws random weights."""

    def __init__(
        self, path: Path, architecture: str, *, layers: int, hidden: int, part_tensors: int = 0
    ) -> None:
        self.path = path
        self.architecture = architecture
        self.hidden = hidden
        self.random = np.random.default_rng(0)
        # With ``part_tensors`` the model is split, that many tensors to a part.
        self.writer = gguf.GGUFWriter(path, architecture, split_max_tensors=part_tensors)
        self.writer.add_name(f"tiny-{architecture}")
        self.writer.add_context_length(8192)
        self.writer.add_embedding_length(hidden)
        self.writer.add_block_count(layers)
        self.writer.add_layer_norm_rms_eps(1e-6)
        tokens = [*CONTROL_TOKENS, *BYTE_TOKENS]
        kinds = [2, 3, 3] + [6] * len(BYTE_TOKENS)
        tokens += [(SPACE + word).encode() for word in WORDS]
        tokens += [bytes([code]) for code in range(33, 127)] + [SPACE.encode()]
        kinds += [1] * (len(tokens) - len(kinds))
        self.hidden_rows = len(CONTROL_TOKENS) + len(BYTE_TOKENS)
        self.vocabulary = len(tokens)
        scores = [0.0] * 3 + [-1000.0] * 256
        scores += [-float(rank) for rank in range(self.vocabulary - self.hidden_rows)]
        self.writer.add_tokenizer_model("llama")
        self.writer.add_token_list(tokens)
        self.writer.add_token_scores(scores)
        self.writer.add_token_types(kinds)
        self.writer.add_bos_token_id(1)
        self.writer.add_eos_token_id(2)
        self.writer.add_add_space_prefix(True)

    def key(self, name: str, value: int | float | list[Any]) -> None:
        """Write ``<architecture>.<name>`` with the type that llama.cpp expects."""
        key = f"{self.architecture}.{name}"
        if isinstance(value, list):
            self.writer.add_array(key, value)
        elif isinstance(value, float):
            self.writer.add_float32(key, value)
        else:
            self.writer.add_uint32(key, value)

    def heads(
        self, *, query: int, key_value: int, size: int, value_size: int | None = None
    ) -> None:
        """Write the attention head numbers."""
        self.writer.add_head_count(query)
        self.writer.add_head_count_kv(key_value)
        self.writer.add_key_length(size)
        self.writer.add_value_length(value_size or size)

    def experts(self, *, count: int, used: int, width: int) -> None:
        """Write the expert numbers."""
        self.writer.add_expert_count(count)
        self.writer.add_expert_used_count(used)
        self.writer.add_expert_feed_forward_length(width)

    def tensor(
        self, name: str, *shape: int, quant: QuantType | None = None, scale: float | None = None
    ) -> None:
        """Add random weights; ``shape`` is in numpy order (slowest dimension first)."""
        deviation = scale or 1 / np.sqrt(shape[-1])
        values = (self.random.standard_normal(shape) * deviation).astype(np.float32)
        self.add(name, values, quant)

    def add(self, name: str, values: Array, quant: QuantType | None = None) -> None:
        """Add given weights."""
        if quant is None:
            self.writer.add_tensor(name, values)
        else:
            self.writer.add_tensor(name, quantize(values, quant), raw_dtype=quant)

    def ones(self, name: str, width: int) -> None:
        """Add a norm that changes nothing."""
        self.add(name, np.ones(width, np.float32))

    def embeddings(self, *, tied: bool = False, norm: str = "output_norm.weight") -> None:
        """Add the token embedding, the output norm and (unless tied) the output head."""
        shape = (self.vocabulary, self.hidden)
        embedding = self.random.standard_normal(shape).astype(np.float32)
        output = (embedding if tied else self.random.standard_normal(shape)) / np.sqrt(self.hidden)
        output = output.astype(np.float32)
        output[: self.hidden_rows] = 0
        self.add("token_embd.weight", output if tied else embedding)
        if not tied:
            self.add("output.weight", output)
        self.ones(norm, self.hidden)

    def attention(self, prefix: str, *, query: int, key: int, quant: QuantType = Q8_0) -> None:
        """Add plain attention projections of the given widths."""
        self.tensor(f"{prefix}attn_q.weight", query, self.hidden, quant=quant)
        self.tensor(f"{prefix}attn_k.weight", key, self.hidden, quant=quant)
        self.tensor(f"{prefix}attn_v.weight", key, self.hidden, quant=quant)
        self.tensor(f"{prefix}attn_output.weight", self.hidden, query, quant=quant)

    def dense(self, prefix: str, width: int, *, suffix: str = "", quant: QuantType = Q8_0) -> None:
        """Add one SwiGLU feed-forward network."""
        self.tensor(f"{prefix}ffn_gate{suffix}.weight", width, self.hidden, quant=quant)
        self.tensor(f"{prefix}ffn_up{suffix}.weight", width, self.hidden, quant=quant)
        self.tensor(f"{prefix}ffn_down{suffix}.weight", self.hidden, width, quant=quant)

    def moe(
        self,
        prefix: str,
        *,
        count: int,
        width: int,
        quant: QuantType,
        down: QuantType,
        fused: bool = False,
    ) -> None:
        """Add a router and its experts, gate and up as one tensor if ``fused``."""
        self.tensor(f"{prefix}ffn_gate_inp.weight", count, self.hidden)
        if fused:
            shape = (count, 2 * width, self.hidden)
            self.tensor(f"{prefix}ffn_gate_up_exps.weight", *shape, quant=quant)
        else:
            self.tensor(f"{prefix}ffn_gate_exps.weight", count, width, self.hidden, quant=quant)
            self.tensor(f"{prefix}ffn_up_exps.weight", count, width, self.hidden, quant=quant)
        self.tensor(f"{prefix}ffn_down_exps.weight", count, self.hidden, width, quant=down)

    def finish(self) -> Path:
        """Write the file."""
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path
