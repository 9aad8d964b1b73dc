"""Where slabs come from: the experts' bytes of a model, by tensor and expert."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from linkcpp.model.expert_tensors import ExpertTensor
from linkcpp.model.slices.segments import Segment
from linkcpp.model.slices.slabs import ExpertSlabs

# Per-expert scales stay with the backbone: they are tiny, and its graph expands them itself.
_EXPERT_TENSOR = re.compile(r"blk\.(\d{1,6})\.(ffn_(?:gate|up|down|gate_up)_exps\.(?:weight|bias))")


def expert_tensor_name(name: str) -> tuple[int, str] | None:
    """Split ``blk.7.ffn_up_exps.weight`` into 7 and ``ffn_up_exps.weight``; else ``None``."""
    match = _EXPERT_TENSOR.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


class SlabProvider(Protocol):
    """Slabs of one model. ``segments`` are the experts that there are, sorted."""

    model_digest: str
    model_name: str
    hidden_size: int
    segments: tuple[Segment, ...]
    tensors: tuple[ExpertTensor, ...]

    def read(self, tensor: ExpertTensor, expert: int, offset_bytes: int, size_bytes: int) -> bytes:
        """Read a piece of one slab.

        Raises:
            LinkcppError: it cannot be read.
        """
        ...

    def close(self) -> None:
        """Give back files."""
        ...


class GgufSlabs:
    """Slabs of a slice, or of a whole model: a file, any part of a split one, or a URL.

    Without ``segments`` every expert of the file is offered. ``model_digest`` is the whole model's.

    Raises:
        LinkcppError: the file cannot be read, has no experts, or not those of the segments.
    """

    def __init__(self, location: str | Path, segments: Iterable[Segment] | None = None) -> None:
        self._slabs = ExpertSlabs(location, segments)
        self.model_digest = self._slabs.model_digest
        self.model_name = self._slabs.model_name
        self.hidden_size = self._slabs.hidden_size
        self.segments = self._slabs.segments
        self.tensors = tuple(
            sorted(tensor for tensor in self._slabs.tensors if expert_tensor_name(tensor.name))
        )

    def read(self, tensor: ExpertTensor, expert: int, offset_bytes: int, size_bytes: int) -> bytes:
        """Read a piece of one slab; see ``SlabProvider.read``."""
        return self._slabs.read(tensor, expert, offset_bytes, size_bytes)

    def close(self) -> None:
        """Close the files."""
        self._slabs.close()


def experts_by_layer(segments: Iterable[Segment]) -> dict[int, list[int]]:
    """Return the experts of each layer, each once and sorted; segments may overlap."""
    found: dict[int, set[int]] = {}
    for segment in segments:
        found.setdefault(segment.layer, set()).update(range(segment.first, segment.last + 1))
    return {layer: sorted(experts) for layer, experts in found.items()}
