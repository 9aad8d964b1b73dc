"""Bytes that llama.cpp allocates for weights, KV cache and recurrent state: pure functions.

Rules, measured on build 10068 (RPC 4.0.3) and commit 0c1e570 (RPC 7.0.0) and equal in both:

- ``llama_context``: the context of one sequence is padded to 256 cells.
- ``llama_kv_cache``: per layer one K and one V tensor of ``cells x width`` elements per stream.
- ``llama_kv_cache_iswa``: a layer with a sliding window has
  ``pad(min(cells, window + ubatch), 256)`` cells.
- ``llama_memory_recurrent``: per recurrent layer one f32 state for each sequence.
- Every tensor starts at a multiple of 32 bytes in a CPU buffer (GPU backends pad to 128 or 256).
"""

from collections.abc import Iterable

from linkcpp.common.errors import LinkcppError
from linkcpp.model.ggml_types import row_bytes
from linkcpp.model.records import LayerKind, LayerRecord, ModelInventory

CELL_PADDING = 256


def padded_cells(tokens: int) -> int:
    """KV cells for ``tokens`` of context."""
    return -(-tokens // CELL_PADDING) * CELL_PADDING


def kv_bytes(
    layer: LayerRecord,
    *,
    context_tokens: int,
    parallel: int = 1,
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
    ubatch_tokens: int = 512,
) -> int:
    """Bytes of a layer's KV cache on the device that has the layer.

    ``context_tokens`` is per sequence: llama-server gets ``-c context_tokens x parallel`` and
    ``-np parallel``, and then keeps one stream a sequence, since plans give ``--no-kv-unified``.
    ``ubatch_tokens`` is ``-ub`` (no more than ``-b``).

    Raises:
        LinkcppError: a cache type does not fit the widths of this model.
    """
    cells = padded_cells(context_tokens)
    if layer.window_tokens is not None:
        cells = padded_cells(min(cells, layer.window_tokens + ubatch_tokens))
    token_bytes = kv_token_bytes(layer, cache_type_k=cache_type_k, cache_type_v=cache_type_v)
    return parallel * cells * token_bytes


def kv_token_bytes(
    layer: LayerRecord, *, cache_type_k: str = "f16", cache_type_v: str = "f16"
) -> int:
    """Bytes that one token takes in a layer's KV cache.

    Raises:
        LinkcppError: a cache type does not fit the widths of this model.
    """
    try:
        return row_bytes(cache_type_k, layer.key_width) + row_bytes(cache_type_v, layer.value_width)
    except ValueError as error:
        raise LinkcppError(
            f"The KV cache of layer {layer.index} cannot have these types: {error}.",
            hint="Choose f16 for the K and V cache.",
        ) from error


def recurrent_bytes(layer: LayerRecord, *, parallel: int = 1) -> int:
    """Bytes of a layer's recurrent state for all sequences."""
    return layer.recurrent_state_bytes * parallel


def layer_weight_bytes(layer: LayerRecord, *, loads_next_token: bool = True) -> int:
    """Bytes of a layer's weights in a buffer, padding included.

    ``loads_next_token`` tells whether the build loads next-token blocks: build 10068 does, builds
    with RPC 7 do not.
    """
    if layer.kind is LayerKind.NEXT_TOKEN and not loads_next_token:
        return 0
    return layer.weight_bytes + layer.padding_bytes


def window_weight_bytes(
    inventory: ModelInventory,
    layers: Iterable[LayerRecord],
    *,
    holds_output: bool,
    loads_next_token: bool = True,
) -> int:
    """Bytes of the weight buffer of a device (not the coordinator's CPU) with these layers.

    Counts the device's copy of the rotary tables, and the output side where it has that.
    """
    window = tuple(layers)
    total = sum(layer_weight_bytes(layer, loads_next_token=loads_next_token) for layer in window)
    if window:
        total += inventory.other_bytes
    return total + (inventory.output_bytes if holds_output else 0)


def coordinator_weight_bytes(
    inventory: ModelInventory,
    layers: Iterable[LayerRecord],
    *,
    holds_output: bool,
    loads_next_token: bool = True,
) -> int:
    """Bytes of the coordinator's CPU weights: the input side, its own layers, maybe the output.

    A tied embedding is shared where input and output are both here. With memory mapping llama.cpp
    logs the mapped span of the file instead, which has the padding of the file in it.
    """
    total = inventory.embedding_bytes + window_weight_bytes(
        inventory, layers, holds_output=holds_output, loads_next_token=loads_next_token
    )
    if holds_output:
        total -= inventory.tied_bytes
    return total
