"""What each layer keeps of the past, as llama.cpp's memory modules size it.

Sources: ``llama-hparams.cpp`` (widths, recurrent sizes, window patterns), ``llama-kv-cache*.cpp``
and ``llama-memory-recurrent.cpp`` of llama.cpp; checked against the logs of build 10068
(RPC 4.0.3) and of commit 0c1e570 (RPC 7.0.0).
"""

from dataclasses import dataclass

from linkcpp.model.architecture import Architecture

F32_BYTES = 4


@dataclass(frozen=True, slots=True)
class LayerState:
    """Widths of the KV cache in elements per token, window, and bytes per sequence."""

    key_width: int = 0
    value_width: int = 0
    window_tokens: int | None = None
    recurrent_state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _WindowRule:
    """Which layers slide: ``period - 1`` of every ``period``, the full one first or last."""

    period: int
    full_first: bool = False
    window_tokens: int | None = None
    only_with_layer_count: int | None = None


# Architectures whose window pattern llama.cpp knows without (or before) the header's telling.
_WINDOW_RULES = {
    "afmoe": _WindowRule(4),
    "cohere2": _WindowRule(4),
    "cohere2moe": _WindowRule(4, full_first=True),
    "exaone-moe": _WindowRule(4, window_tokens=128),
    "exaone4": _WindowRule(4, window_tokens=4096, only_with_layer_count=64),
    "gemma-embedding": _WindowRule(6),
    "gemma2": _WindowRule(2, window_tokens=4096),
    "gemma3": _WindowRule(6),
    "gemma3n": _WindowRule(5),
    "gpt-oss": _WindowRule(2),
    "laguna": _WindowRule(4, full_first=True),
    "llama4": _WindowRule(4, window_tokens=8192),
    "olmo2": _WindowRule(4),
    "smallthinker": _WindowRule(4, full_first=True, window_tokens=4096),
}
# The header names a window, but llama.cpp attends to everything.
_WINDOW_IGNORED = ("phi3", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "llama", "mistral3")
_ATTENTION_BESIDE_RECURRENCE = ("falcon-h1",)


def window_rule_is_known(architecture: Architecture) -> bool:
    """Whether the layers with a sliding window are known, or all are taken as full attention."""
    return (
        not architecture.number("attention.sliding_window", 0)
        or architecture.has("attention.sliding_window_pattern")
        or architecture.name in _WINDOW_RULES
        or architecture.name in _WINDOW_IGNORED
    )


def layer_state(
    architecture: Architecture, layer: int, *, has_keys: bool, has_recurrence: bool
) -> LayerState:
    """What one layer that runs keeps.

    ``has_keys`` and ``has_recurrence`` tell which kinds of tensors the block has.
    """
    recurrent = recurrent_state_bytes(architecture) if has_recurrence else 0
    attends = not has_recurrence or architecture.name in _ATTENTION_BESIDE_RECURRENCE
    if not (has_keys and attends) or _uses_cache_of_another(architecture, layer):
        return LayerState(recurrent_state_bytes=recurrent)
    window = _window_tokens(architecture, layer)
    key_width, value_width = _cache_widths(architecture, layer, slides=window is not None)
    return LayerState(key_width, value_width, window, recurrent)


def _uses_cache_of_another(architecture: Architecture, layer: int) -> bool:
    """Whether the layer reads the keys of an earlier one (Gemma 3n and 4: the last layers do)."""
    shared = architecture.number("attention.shared_kv_layers", 0)
    return shared > 0 and layer >= architecture.number("block_count") - shared


def _cache_widths(architecture: Architecture, layer: int, *, slides: bool) -> tuple[int, int]:
    """Elements per token of the K and the V cache."""
    heads = architecture.positive_of_layer("attention.head_count", layer)
    key_heads = architecture.layer_number("attention.head_count_kv", layer, heads)
    usual = architecture.number("embedding_length") // max(
        architecture.layer_number("attention.head_count", 0, 0), 1
    )
    key = architecture.number("attention.key_length", usual)
    value = architecture.number("attention.value_length", usual)
    if slides:
        key = architecture.number("attention.key_length_swa", key)
        value = architecture.number("attention.value_length_swa", value)
    is_latent = architecture.number("attention.key_length_mla", 0) and architecture.number(
        "attention.value_length_mla", 0
    )
    # Latent attention rebuilds the values from the cached keys.
    value = 0 if is_latent else value
    indexer = architecture.number("attention.indexer.key_length", 0)
    return key * key_heads + indexer, value * key_heads


def _window_tokens(architecture: Architecture, layer: int) -> int | None:
    if architecture.name in _WINDOW_IGNORED:
        return None
    rule = _WINDOW_RULES.get(architecture.name)
    usual = (rule and rule.window_tokens) or 0
    window = architecture.number("attention.sliding_window", usual)
    pattern = architecture.raw("attention.sliding_window_pattern")
    if isinstance(pattern, tuple):
        slides = layer < len(pattern) and bool(pattern[layer])
    elif rule is None and not isinstance(pattern, int):
        slides = False
    else:
        period = pattern if isinstance(pattern, int) else rule.period if rule else 0
        full_first = rule is not None and rule.full_first
        full_place = 0 if full_first else period - 1
        slides = period == 0 or layer % period != full_place
    if rule and rule.only_with_layer_count not in (None, architecture.number("block_count")):
        slides = False
    return window if slides and window else None


def recurrent_state_bytes(architecture: Architecture) -> int:
    """Bytes that one recurrent layer keeps for one sequence: convolution and state, in f32."""
    hidden = architecture.number("embedding_length")
    number = architecture.number
    if head_size := number("wkv.head_size", 0):
        elements = number("token_shift_count", 2) * hidden + hidden * head_size
    elif kernel := number("shortconv.l_cache", 0):
        elements = hidden * (kernel - 1)
    elif head_size := number("kda.head_dim", 0):
        inner = number("attention.head_count") * head_size
        kernel = number("ssm.conv_kernel", 0)
        elements = 3 * (kernel - 1 if kernel else 3) * inner + inner * head_size
    else:
        inner, state = number("ssm.inner_size"), number("ssm.state_size")
        kernel, groups = number("ssm.conv_kernel"), number("ssm.group_count", 0)
        convolution = max(kernel - 1, 0) * (inner + 2 * groups * state)
        elements = convolution + state * inner
    return elements * F32_BYTES
