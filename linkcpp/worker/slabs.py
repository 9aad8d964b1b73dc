"""Where slabs come from: the experts' bytes of a model, by tensor and expert."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from linkcpp.common.errors import LinkcppError
from linkcpp.model.ggml_types import GgmlType
from linkcpp.model.parts import ModelFiles, open_model
from linkcpp.worker.frames import Segment

# Per-expert scales stay with the backbone: they are tiny, and its graph expands them itself.
_EXPERT_TENSOR = re.compile(r"blk\.(\d{1,6})\.(ffn_(?:gate|up|down|gate_up)_exps\.(?:weight|bias))")


def expert_tensor_name(name: str) -> tuple[int, str] | None:
    """Split ``blk.7.ffn_up_exps.weight`` into 7 and ``ffn_up_exps.weight``; else ``None``."""
    match = _EXPERT_TENSOR.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


class ExpertTensor(NamedTuple):
    """A tensor whose outermost dimension is the expert.

    ``part`` is the name without its layer. ``rows`` is 0 for a bias, which is ``width`` wide.
    """

    layer: int
    part: str
    kind: GgmlType
    width: int
    rows: int
    expert_count: int

    @property
    def slab_bytes(self) -> int:
        """Bytes of one expert."""
        return self.kind.row_bytes(self.width) * max(self.rows, 1)


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
    """Slabs of a whole GGUF model: a file, any part of a split one, or a URL.

    Without ``segments`` every expert is offered.

    Raises:
        LinkcppError: the model cannot be read, has no experts, or not those of the segments.
    """

    def __init__(self, location: str | Path, segments: Iterable[Segment] | None = None) -> None:
        self._files: ModelFiles = open_model(location)
        try:
            self._places: dict[tuple[int, str], tuple[int, int]] = {}
            self.tensors = self._find_tensors()
            counts = {tensor.layer: tensor.expert_count for tensor in self.tensors}
            if segments is None:
                wanted = [Segment(layer=a, first=0, last=n - 1) for a, n in counts.items()]
            else:
                wanted = list(segments)
            self.segments = _checked(wanted, counts)
            metadata = self._files.metadata
            hidden = metadata.get(f"{metadata.get('general.architecture')}.embedding_length")
            self.hidden_size = hidden if isinstance(hidden, int) else 0
            self.model_digest = self._files.digest
            self.model_name = Path(self._files.sources[0].name).name
        except BaseException:
            self._files.__exit__(None, None, None)
            raise

    def read(self, tensor: ExpertTensor, expert: int, offset_bytes: int, size_bytes: int) -> bytes:
        """Read a piece of one slab; see ``SlabProvider.read``."""
        part, start = self._places[tensor.layer, tensor.part]
        at = start + expert * tensor.slab_bytes + offset_bytes
        return self._files.sources[part].read(at, size_bytes)

    def close(self) -> None:
        """Close the files."""
        self._files.__exit__(None, None, None)

    def _find_tensors(self) -> tuple[ExpertTensor, ...]:
        found = []
        for part, info in self._files.tensors:
            split = expert_tensor_name(info.name)
            if split is None:
                continue
            layer, name = split
            is_bias = name.endswith(".bias")
            if len(info.shape) != (2 if is_bias else 3):
                raise LinkcppError(f"{info.name} has no expert dimension where it should be.")
            rows = 0 if is_bias else info.shape[1]
            self._places[layer, name] = (part, info.offset_bytes)
            found.append(ExpertTensor(layer, name, info.kind, info.shape[0], rows, info.shape[-1]))
        if not found:
            raise LinkcppError(
                f"{self._files.sources[0].name} has no experts.",
                hint="Only Mixture-of-Experts models can be spread by expert.",
            )
        return tuple(sorted(found))


def _checked(segments: Sequence[Segment], counts: dict[int, int]) -> tuple[Segment, ...]:
    if not segments:
        raise LinkcppError("No experts were asked for.", hint="Name at least one segment.")
    for segment in segments:
        count = counts.get(segment.layer)
        if count is None:
            raise LinkcppError(f"Layer {segment.layer} has no experts.")
        if not 0 <= segment.first <= segment.last < count:
            raise LinkcppError(
                f"Layer {segment.layer} has experts 0 to {count - 1}, "
                f"not {segment.first} to {segment.last}."
            )
    return tuple(sorted(segments, key=lambda entry: (entry.layer, entry.first, entry.last)))


def experts_by_layer(segments: Iterable[Segment]) -> dict[int, list[int]]:
    """Return the experts of each layer, each once and sorted; segments may overlap."""
    found: dict[int, set[int]] = {}
    for segment in segments:
        found.setdefault(segment.layer, set()).update(range(segment.first, segment.last + 1))
    return {layer: sorted(experts) for layer, experts in found.items()}
