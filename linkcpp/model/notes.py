"""What is unusual about a model, in sentences for people."""

from collections import Counter

from linkcpp.common.units import format_bytes
from linkcpp.model.architecture import Architecture
from linkcpp.model.records import LayerKind, LayerRecord
from linkcpp.model.state import window_rule_is_known

# Their caches have parts that no formula here was checked against.
_UNCHECKED_CACHES = ("attention.indexer.key_length", "attention.compress_ratios")


def unusual(
    architecture: Architecture, layers: tuple[LayerRecord, ...], *, is_tied: bool
) -> tuple[str, ...]:
    """The notes of a ``ModelInventory``."""
    notes = []
    if is_tied:
        notes.append("Tied embeddings: the output head is the token embedding, loaded once more.")
    notes += _next_token_notes(layers)
    windows = Counter(layer.window_tokens for layer in layers if layer.window_tokens)
    notes += [
        f"Sliding window of {window} tokens in {count} of {len(layers)} layers."
        for window, count in windows.items()
    ]
    if any(layer.key_width and not layer.value_width for layer in layers):
        notes.append("Latent attention: only the compressed keys are cached, no values.")
    if not window_rule_is_known(architecture):
        notes.append("Estimate: which layers slide is unknown, so all count as full attention.")
    if any(architecture.has(key) for key in _UNCHECKED_CACHES):
        notes.append("Estimate: the KV cache of this attention was not checked against llama.cpp.")
    return tuple(notes)


def _next_token_notes(layers: tuple[LayerRecord, ...]) -> list[str]:
    blocks = [layer for layer in layers if layer.kind is LayerKind.NEXT_TOKEN]
    if not blocks:
        return []
    size = format_bytes(sum(layer.weight_bytes for layer in blocks))
    what = "Next-token block" if len(blocks) == 1 else f"{len(blocks)} next-token blocks"
    return [f"{what} of {size}: counted as a layer, but llama.cpp does not run it unless asked."]
