"""The expert tensors of a model, found by name and held to what a slice can be made of."""

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from linkcpp.common.errors import LinkcppError
from linkcpp.model.architecture import Architecture
from linkcpp.model.ggml_types import GgmlType
from linkcpp.model.header import TensorInfo, Value

LARGEST_EXPERT_COUNT: Final = 2**16
# Names as in llama.cpp's llama-arch.cpp. The dimensions are those besides the expert.
_EXPERT_NAME: Final = re.compile(
    r"blk\.(\d{1,6})\.(ffn_(?:gate|up|down|gate_up)_exps\.(weight|bias|scale|input_scale))"
)
_OLD_NAME: Final = re.compile(r"blk\.\d{1,6}\.ffn_(?:gate|up|down)\.\d{1,6}\.weight")
_INNER_DIMENSIONS: Final = {"weight": 2, "bias": 1, "scale": 0, "input_scale": 0}


class ExpertTensor(NamedTuple):
    """A tensor whose outermost dimension is the expert.

    ``part`` is the name without its layer (``ffn_up_exps.weight``). A weight has ``rows`` rows of
    ``width`` elements for each expert; ``rows`` is 0 for a bias (one row) and for a scale, whose
    ``width`` is 1. ``expert_count`` is the model's, also where only some are held.
    """

    layer: int
    part: str
    kind: GgmlType
    width: int
    rows: int
    expert_count: int

    @property
    def name(self) -> str:
        """The name that the model's file has for it."""
        return f"blk.{self.layer}.{self.part}"

    @property
    def slab_bytes(self) -> int:
        """Bytes of one expert."""
        return self.kind.row_bytes(self.width) * max(self.rows, 1)

    def shape(self, held_count: int) -> tuple[int, ...]:
        """The shape of the tensor with ``held_count`` experts, in ggml order."""
        inner = _INNER_DIMENSIONS[self.part.rpartition(".")[2]]
        return (*(self.width, self.rows)[:inner], held_count)


class PlacedTensor(NamedTuple):
    """An expert tensor and where its first byte is: file number and offset in that file."""

    tensor: ExpertTensor
    file: int
    offset_bytes: int


def expert_name(name: str) -> tuple[int, str] | None:
    """Split ``blk.7.ffn_up_exps.weight`` into 7 and ``ffn_up_exps.weight``; else ``None``."""
    match = _EXPERT_NAME.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def is_expert_weight(name: str) -> bool:
    """Whether a tensor is one of the matrices of the experts."""
    return name.endswith(".weight") and _EXPERT_NAME.fullmatch(name) is not None


def find_expert_tensors(
    source: str, metadata: Mapping[str, Value], tensors: Iterable[tuple[int, TensorInfo]]
) -> tuple[PlacedTensor, ...]:
    """Find a whole model's expert tensors, in the order of its files.

    Raises:
        LinkcppError: there are none, or one cannot be cut by expert; says which and why.
    """
    name = metadata.get("general.architecture")
    architecture = Architecture(source, name if isinstance(name, str) else "", metadata)
    found = []
    for file, info in tensors:
        split = expert_name(info.name)
        if split is None:
            if _OLD_NAME.fullmatch(info.name):
                raise LinkcppError(
                    f"{source} keeps every expert in a tensor of its own, as files of 2023 did.",
                    hint="Convert the model anew with llama.cpp's convert_hf_to_gguf.py.",
                )
            continue
        layer, part = split
        count = architecture.layer_number("expert_count", layer, 0)
        tensor = expert_tensor(source, info, layer, part, count, held_count=count)
        found.append(PlacedTensor(tensor, file, info.offset_bytes))
    if not found:
        raise LinkcppError(
            f"{source} has no experts.",
            hint="Only Mixture-of-Experts models can be sliced by expert.",
        )
    return tuple(found)


def expert_tensor(
    source: str, info: TensorInfo, layer: int, part: str, expert_count: int, *, held_count: int
) -> ExpertTensor:
    """Check one expert tensor, which should have ``held_count`` experts outermost.

    Raises:
        LinkcppError: it has another shape, or an expert does not end at a block's end.
    """
    inner = _INNER_DIMENSIONS[part.rpartition(".")[2]]
    # llama.cpp's tools leave out outermost dimensions of 1.
    extents = (*info.shape, 1) if len(info.shape) == inner else info.shape
    if len(extents) != inner + 1 or extents[-1] != held_count:
        shape = " x ".join(str(extent) for extent in info.shape)
        raise LinkcppError(
            f"{info.name} in {source} cannot be sliced: the outermost of its dimensions ({shape}) "
            f"is not the expert, of which there are {held_count}.",
            hint="Convert the model anew with llama.cpp's convert_hf_to_gguf.py.",
        )
    width, rows = (*extents[:-1], 1)[0], (*extents[:-1], 0, 0)[1]
    try:
        info.kind.row_bytes(width)
    except ValueError as error:
        raise LinkcppError(
            f"{info.name} in {source} cannot be sliced: an expert does not end at a block's end "
            f"({error}).",
            hint="Quantize the model with another type for this tensor.",
        ) from error
    return ExpertTensor(layer, part, info.kind, width, rows, expert_count)


def counts_by_layer(tensors: Iterable[PlacedTensor]) -> dict[int, int]:
    """The number of experts of every layer that has some."""
    return {placed.tensor.layer: placed.tensor.expert_count for placed in tensors}
