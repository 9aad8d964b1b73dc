"""A dense model as a mixture of experts that computes the same: for demos and tests.

No small mixture of experts that writes sensible text is published, but a dense SwiGLU model *is*
one. Its feed-forward network ``down · (silu(gate · x) * (up · x))`` is a sum over the inner
dimension, so the inner dimension cut into N equal parts makes N experts whose outputs add up to the
network's. What llama.cpp does with them then is exact up to the order of that one sum:

- the router is all zeros, so softmax gives each expert the weight 1/N: exp(0) is 1, and 1/N is
  exact for a power of two; all N are chosen, and weights that sum to 1 are not changed by
  normalising them;
- the down matrices are scaled by N, which undoes the weight. Only the f16 scales of the quantized
  blocks (or the floating-point numbers) change, by a power of two, so only their exponents do:
  exact unless one overflows, which is refused.

Gate and up are cut by rows, down by columns at block borders, so no weight is quantized anew.

Log-probabilities of the two agree to 2e-5 where weights are F32. With quantized weights llama.cpp
quantizes the activations of every layer too, which makes of the last bits of that sum what another
kernel for the same operation makes of them (as flash attention on or off does): near-ties between
two words may fall the other way.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt

from linkcpp.common.errors import LinkcppError

Bytes = npt.NDArray[np.uint8]

# llama.cpp runs dense and mixture models under this one architecture name.
_ARCHITECTURE: Final = "llama"
_LENGTH_KEY: Final = f"{_ARCHITECTURE}.feed_forward_length"
# Where in a block its f16 scales (and minima) are, as (first byte, bytes): ggml-common.h.
_SCALES: Final = {
    "F16": (0, 2),
    "Q4_0": (0, 2),
    "Q4_1": (0, 4),
    "Q5_0": (0, 2),
    "Q5_1": (0, 4),
    "Q8_0": (0, 2),
    "Q2_K": (80, 4),
    "Q3_K": (108, 2),
    "Q4_K": (0, 4),
    "Q5_K": (0, 4),
    "Q6_K": (208, 2),
}


def moeify(model: Path, output: Path, expert_count: int) -> None:
    """Write a dense Llama-architecture GGUF as ``expert_count`` experts, all used for each token.

    The result computes the same function; see the module. Holds the feed-forward weights in memory
    while it writes.

    Raises:
        LinkcppError: the model is not of this kind, or cannot be cut into so many experts exactly.
    """
    if expert_count < 2 or expert_count & (expert_count - 1):
        raise LinkcppError(
            f"{expert_count} experts cannot be made exactly.", hint="Choose a power of two."
        )
    reader = gguf.GGUFReader(model)
    architecture = reader.fields["general.architecture"].contents()
    if architecture != _ARCHITECTURE or f"{_ARCHITECTURE}.expert_count" in reader.fields:
        raise LinkcppError(
            f"{model} is not a dense model of the architecture {_ARCHITECTURE}.",
            hint="Take one that is, for instance SmolLM2.",
        )
    writer = gguf.GGUFWriter(output, architecture)
    try:
        _copy_metadata(reader, writer, expert_count)
        for tensor in reader.tensors:
            for name, data, kind in _as_experts(tensor, expert_count):
                writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _copy_metadata(reader: Any, writer: Any, expert_count: int) -> None:
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = field.contents()
        if key == _LENGTH_KEY:
            value //= expert_count
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(key, value, field.types[0], field.types[-1] if is_array else None)
    writer.add_expert_count(expert_count)
    writer.add_expert_used_count(expert_count)


_Made = tuple[str, npt.NDArray[Any], Any]


def _as_experts(tensor: Any, count: int) -> Iterator[_Made]:
    name, kind = tensor.name, tensor.tensor_type
    part = name.partition(".ffn_")[2]
    expert_name = name.replace(".weight", "_exps.weight")
    if part in ("gate.weight", "up.weight"):
        rows, row = tensor.data.shape
        if rows % count:
            raise _cannot_cut(tensor, count)
        yield expert_name, tensor.data.reshape(count, rows // count, row), kind
        if part == "gate.weight":
            router = np.zeros((count, int(tensor.shape[0])), np.float32)
            yield name.replace("ffn_gate", "ffn_gate_inp"), router, None
    elif part == "down.weight":
        yield expert_name, _cut_down(tensor, count), kind
    elif part.endswith(".bias") and part != "norm.bias":
        raise LinkcppError(
            f"{name} is a bias of a feed-forward network, which cannot be divided among experts.",
            hint="Take a model without them.",
        )
    else:
        yield name, tensor.data, kind


def _cut_down(tensor: Any, count: int) -> npt.NDArray[Any]:
    data: npt.NDArray[Any] = tensor.data
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    columns = int(tensor.shape[0])
    if columns % (count * block_elements):
        raise _cannot_cut(tensor, count)
    rows = data.shape[0]
    cut = data.reshape(rows, count, -1).transpose(1, 0, 2).copy()
    if tensor.tensor_type.name == "F32":
        cut *= np.float32(count)
        _check_finite(tensor, cut)
        return cut
    place = _SCALES.get(tensor.tensor_type.name)
    if place is None:
        raise LinkcppError(
            f"{tensor.name} has the type {tensor.tensor_type.name}, whose scales are not in f16.",
            hint="Take a model quantized to Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 or a K-quant.",
        )
    start, size = place
    blocks: Bytes = cut.view(np.uint8).reshape(-1, block_bytes)
    with np.errstate(over="ignore"):
        scaled = blocks[:, start : start + size].copy().view(np.float16) * np.float16(count)
    _check_finite(tensor, scaled)
    blocks[:, start : start + size] = scaled.view(np.uint8)
    return cut


def _check_finite(tensor: Any, scaled: npt.NDArray[Any]) -> None:
    if not np.isfinite(scaled).all():
        raise LinkcppError(
            f"The scales of {tensor.name} overflow when they are multiplied.",
            hint="Choose fewer experts.",
        )


def _cannot_cut(tensor: Any, count: int) -> LinkcppError:
    return LinkcppError(
        f"{tensor.name} cannot be cut into {count} experts at block borders.",
        hint="Choose fewer experts.",
    )
