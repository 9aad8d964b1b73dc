"""Reading experts: one view of a whole model and of a slice, whatever the bytes come from."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from linkcpp.common.closing import Closing
from linkcpp.common.errors import LinkcppError
from linkcpp.model.expert_tensors import ExpertTensor, find_expert_tensors
from linkcpp.model.parts import open_model
from linkcpp.model.slices.layout import SlicedTensor, hidden_size, read_slice
from linkcpp.model.slices.segments import (
    Segment,
    describe,
    merge_segments,
    ranges_by_layer,
    write_ranges,
)


class _Place(NamedTuple):
    file: int
    offset_bytes: int
    # The number of each held expert in the tensor.
    numbers: dict[int, int]


class Slab(NamedTuple):
    """One expert's bytes in one tensor, in file number ``file``."""

    tensor: ExpertTensor
    expert: int
    file: int
    offset_bytes: int


class ExpertSlabs(Closing):
    """The slabs of a slice, or of a whole model (a file, any part of a split one, or a URL).

    Without ``segments`` all experts of the file are offered. ``model_digest`` is that of the whole
    model, also for a slice. Use it in a ``with`` block, or close it.

    Raises:
        LinkcppError: the file cannot be read, has no experts, or lacks some of the segments.
    """

    def __init__(self, location: str | Path, segments: Iterable[Segment] | None = None) -> None:
        self._files = open_model(location)
        try:
            self._places: dict[tuple[int, str], _Place] = {}
            self.tensors: tuple[ExpertTensor, ...]
            self.segments: tuple[Segment, ...]
            described = read_slice(self._files.sources[0].name, self._files.headers[0])
            if described is None:
                self._take_model()
            else:
                self._take_slice(*described)
            if segments is not None:
                self.segments = self._checked(merge_segments(segments))
            layers = {segment.layer for segment in self.segments}
            self.tensors = tuple(entry for entry in self.tensors if entry.layer in layers)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give back files and connections; may be called twice."""
        self._files.closer.close()

    def __iter__(self) -> Iterator[Slab]:
        """All slabs of the segments, in the order of the files."""
        ranges = ranges_by_layer(self.segments)
        for tensor in self.tensors:
            place = self._places[tensor.layer, tensor.part]
            for first, last in ranges[tensor.layer]:
                for expert in range(first, last + 1):
                    offset = place.offset_bytes + place.numbers[expert] * tensor.slab_bytes
                    yield Slab(tensor, expert, place.file, offset)

    def read(self, tensor: ExpertTensor, expert: int, offset_bytes: int, size_bytes: int) -> bytes:
        """Read a piece of one slab.

        Raises:
            LinkcppError: the expert is not here, or its bytes cannot be read.
        """
        place = self._places[tensor.layer, tensor.part]
        number = place.numbers.get(expert)
        if number is None or not 0 <= offset_bytes <= tensor.slab_bytes - size_bytes:
            raise LinkcppError(
                f"{self._files.sources[0].name} does not have bytes {offset_bytes} to "
                f"{offset_bytes + size_bytes} of expert {expert} in {tensor.name}."
            )
        at = place.offset_bytes + number * tensor.slab_bytes + offset_bytes
        pieces = self._files.sources[place.file].stream(at, size_bytes)
        # A piece is valid until the next one only, and ``join`` would take all of them first.
        return b"".join(bytes(piece) for piece in pieces)

    def _take_slice(self, segments: tuple[Segment, ...], sliced: tuple[SlicedTensor, ...]) -> None:
        metadata = self._files.metadata
        self.segments = segments
        self.tensors = tuple(entry.tensor for entry in sliced)
        for entry in sliced:
            held = (e for first, last in entry.ranges for e in range(first, last + 1))
            numbers = {expert: number for number, expert in enumerate(held)}
            place = _Place(0, entry.offset_bytes, numbers)
            self._places[entry.tensor.layer, entry.tensor.part] = place
        self.model_digest = str(metadata.get("linkcpp.slice.source_digest"))
        source = self._files.sources[0].name
        self.model_name = str(metadata.get("general.name", Path(source).name))
        self.hidden_size = hidden_size(source, metadata)

    def _take_model(self) -> None:
        files = self._files
        source = files.sources[0].name
        placed = find_expert_tensors(source, files.metadata, files.tensors)
        self.tensors = tuple(entry.tensor for entry in placed)
        for tensor, file, offset in placed:
            numbers = {expert: expert for expert in range(tensor.expert_count)}
            self._places[tensor.layer, tensor.part] = _Place(file, offset, numbers)
        self.segments = tuple(
            Segment(layer=layer, first=0, last=count - 1)
            for layer, count in sorted({t.layer: t.expert_count for t in self.tensors}.items())
        )
        self.model_digest = files.digest
        self.model_name = Path(source).name
        self.hidden_size = hidden_size(source, files.metadata)

    def _checked(self, wanted: tuple[Segment, ...]) -> tuple[Segment, ...]:
        name = self._files.sources[0].name
        if not wanted:
            raise LinkcppError("No experts were asked for.", hint="Name at least one segment.")
        held = ranges_by_layer(self.segments)
        for segment in wanted:
            ranges = held.get(segment.layer)
            if ranges is None:
                raise LinkcppError(
                    f"Layer {segment.layer} has no experts in {name}.",
                    hint=f"It has: {'; '.join(describe(self.segments))}.",
                )
            if not any(a <= segment.first <= segment.last <= b for a, b in ranges):
                raise LinkcppError(
                    f"Of layer {segment.layer}, {name} has experts {write_ranges(ranges)}, not "
                    f"{write_ranges([(segment.first, segment.last)])}.",
                    hint="Slice the model for these experts.",
                )
        return wanted
