"""What a tensor does, by its name; names as in llama.cpp's ``llama-arch.cpp``."""

import re
from enum import StrEnum

from linkcpp.model.records import TensorRole

_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)")
# The first pattern that matches decides.
_BLOCK_ROLES = tuple(
    (re.compile(pattern), role)
    for pattern, role in (
        (r"ffn_(gate|up|down|gate_up)_(exps|chexps)\b", TensorRole.EXPERT),
        (r".*_shexp\b", TensorRole.SHARED_EXPERT),
        (r"ffn_gate_inp|exp_probs_b|ffn_gate_tid2eid", TensorRole.ROUTER),
        (r"ssm_|shortconv\.|time_mix_|channel_mix_", TensorRole.RECURRENT),
        (r"nextn\.", TensorRole.OTHER),
        (r"(.*_)?norm(_\d+|_exps)?\.", TensorRole.NORM),
        (r"attn_|indexer\.|cross_attn_", TensorRole.ATTENTION),
        (r"ffn", TensorRole.FEED_FORWARD),
    )
)
# The state that llama.cpp keeps for these is sized by its recurrent memory, not by the KV cache.
_KEEPS_RECURRENT_STATE = re.compile(r"(ssm_|shortconv\.|time_mix_)")
_KEEPS_KEYS = re.compile(r"attn_(k|qkv|kv_a_mqa|kv_b|k_b)\.")

_INPUT_SIDE = ("token_embd", "token_embd_norm", "token_types", "position_embd", "per_layer_")
_EVERY_DEVICE = ("rope_freqs", "rope_factors_")
# LFM2 names its output norm like an embedding norm.
_OUTPUT_NORM_IN_DISGUISE = ("lfm2", "lfm2moe")


class Side(StrEnum):
    """Where a tensor outside the blocks lives."""

    INPUT = "input"
    OUTPUT = "output"
    EVERY_DEVICE = "every_device"


def layer_and_part(name: str) -> tuple[int | None, str]:
    """Split ``blk.7.attn_q.weight`` into 7 and ``attn_q.weight``; no layer outside the blocks."""
    match = _BLOCK.fullmatch(name)
    return (int(match[1]), match[2]) if match else (None, name)


def keeps_recurrent_state(part: str) -> bool:
    """Whether a tensor of this name in a block makes llama.cpp keep a recurrent state for it."""
    return _KEEPS_RECURRENT_STATE.match(part) is not None


def keeps_keys(part: str) -> bool:
    """Whether a tensor of this name in a block computes keys for a KV cache."""
    return _KEEPS_KEYS.match(part) is not None


def block_role(part: str) -> TensorRole:
    """The role of a tensor inside a block; ``part`` is its name after ``blk.N.``."""
    return next((role for pattern, role in _BLOCK_ROLES if pattern.match(part)), TensorRole.OTHER)


def side(name: str, architecture: str) -> Side:
    """Where llama.cpp puts a tensor that is outside the blocks."""
    if name.startswith(_EVERY_DEVICE):
        return Side.EVERY_DEVICE
    if name.startswith("token_embd_norm") and architecture in _OUTPUT_NORM_IN_DISGUISE:
        return Side.OUTPUT
    return Side.INPUT if name.startswith(_INPUT_SIDE) else Side.OUTPUT


SIDE_ROLES = {
    Side.INPUT: TensorRole.EMBEDDING,
    Side.OUTPUT: TensorRole.OUTPUT,
    Side.EVERY_DEVICE: TensorRole.OTHER,
}
