"""The slabs of several slices of one model as those of one."""

from collections.abc import Sequence

from linkcpp.common.errors import LinkcppError
from linkcpp.model.expert_tensors import ExpertTensor
from linkcpp.model.slices.segments import Segment
from linkcpp.worker.slabs import SlabProvider, experts_by_layer


class JoinedSlabs:
    """Takes each expert from the first part that has it, and closes the parts.

    Raises:
        LinkcppError: the parts are of different models.
    """

    def __init__(self, parts: Sequence[SlabProvider]) -> None:
        self._parts = parts
        first = parts[0]
        self.model_digest = first.model_digest
        self.model_name = first.model_name
        self.hidden_size = first.hidden_size
        self._owners: dict[tuple[int, int], SlabProvider] = {}
        tensors: dict[tuple[int, str], ExpertTensor] = {}
        for part in parts:
            if part.model_digest != self.model_digest:
                raise LinkcppError(
                    f"A slice of {part.model_name} and one of {first.model_name} are of different "
                    "models.",
                    hint="Run one worker for each model.",
                )
            for layer, experts in experts_by_layer(part.segments).items():
                for expert in experts:
                    self._owners.setdefault((layer, expert), part)
            for tensor in part.tensors:
                if tensors.setdefault((tensor.layer, tensor.part), tensor) != tensor:
                    raise LinkcppError(f"Two slices have another {tensor.name}.")
        self.tensors = tuple(sorted(tensors.values()))
        self.segments: tuple[Segment, ...] = tuple(
            sorted(
                (segment for part in parts for segment in part.segments),
                key=lambda entry: (entry.layer, entry.first, entry.last),
            )
        )

    def read(self, tensor: ExpertTensor, expert: int, offset_bytes: int, size_bytes: int) -> bytes:
        """Read a piece of one slab; see ``SlabProvider.read``."""
        owner = self._owners[tensor.layer, expert]
        return owner.read(tensor, expert, offset_bytes, size_bytes)

    def close(self) -> None:
        """Close all parts."""
        for part in self._parts:
            part.close()
