"""What goes where: from a model's headers to the header and the byte ranges of a new file."""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Final, NamedTuple

from linkcpp.common.errors import LinkcppError
from linkcpp.model.expert_tensors import (
    LARGEST_EXPERT_COUNT,
    ExpertTensor,
    PlacedTensor,
    expert_name,
    expert_tensor,
    find_expert_tensors,
    is_expert_weight,
)
from linkcpp.model.ggml_types import TYPES_BY_NAME
from linkcpp.model.header import MAX_KEPT_ARRAY_ITEMS, Header, Value
from linkcpp.model.parts import ModelFiles
from linkcpp.model.slices.encoding import NewTensor, Pair, encode_header, padded
from linkcpp.model.slices.segments import INDEX_END, Range, Segment, count_experts, ranges_by_layer

SLICE_TYPE: Final = "slice"
SLICE_VERSION: Final = 1
# What one request or one task of a thread takes; small enough to resume after little loss.
_UNIT_BYTES: Final = 8 * 2**20
_CHUNK_BYTES: Final = 16 * 2**20
_COPIED_KEYS: Final = ("general.quantization_version", "general.file_type")
_COPIED_NUMBERS: Final = (
    "block_count",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
)
_LISTED_TENSOR: Final = re.compile(r"(\S+):(\S+)")


class CopyUnit(NamedTuple):
    """Consecutive bytes to copy from file number ``file``; each of the pieces has its own hash."""

    file: int
    source_offset_bytes: int
    target_offset_bytes: int
    piece_sizes: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """All bytes of the unit."""
        return sum(self.piece_sizes)


class CopyJob(NamedTuple):
    """A file to be made: its first bytes, what is copied behind them, and its whole size."""

    header: bytes
    units: tuple[CopyUnit, ...]
    file_bytes: int

    @property
    def copied_bytes(self) -> int:
        """What comes from the source."""
        return sum(unit.size_bytes for unit in self.units)


class SlicedTensor(NamedTuple):
    """A tensor of a slice: the experts that it has, and where its data starts in the slice."""

    tensor: ExpertTensor
    ranges: tuple[Range, ...]
    offset_bytes: int


class SlicePlan(NamedTuple):
    """A slice to be made. The units follow the tensors, each expert ascending."""

    job: CopyJob
    tensors: tuple[SlicedTensor, ...]


def plan_slice(files: ModelFiles, segments: tuple[Segment, ...]) -> SlicePlan:
    """Lay out the slice of the given segments, which must be merged and within the model."""
    ranges = ranges_by_layer(segments)
    _check_fits_in_keys(ranges)
    placed = [
        entry
        for entry in find_expert_tensors(files.sources[0].name, files.metadata, files.tensors)
        if entry.tensor.layer in ranges
    ]
    new = []
    for tensor, _, _ in placed:
        count = count_experts(ranges[tensor.layer])
        new.append(
            NewTensor(tensor.name, tensor.kind, tensor.shape(count), count * tensor.slab_bytes)
        )
    pairs = _pairs(files, [entry.tensor for entry in placed], ranges)
    header, offsets = encode_header(pairs, new)
    units: list[CopyUnit] = []
    tensors = []
    for entry, offset in zip(placed, offsets, strict=True):
        held = ranges[entry.tensor.layer]
        units += _slab_units(entry, held, offset)
        tensors.append(SlicedTensor(entry.tensor, held, offset))
    file_bytes = offsets[-1] + padded(new[-1].size_bytes)
    return SlicePlan(CopyJob(header, tuple(units), file_bytes), tuple(tensors))


def plan_backbone(header: Header, file: int, file_bytes: int) -> CopyJob:
    """Lay out the hollow copy of one file: every byte of it, except those of expert weights.

    No piece has bytes of two tensors, so that each tensor has hashes of its own.
    """
    units: list[CopyUnit] = []
    borders = [0]
    for tensor in header.tensors:
        if not is_expert_weight(tensor.name):
            borders.append(tensor.offset_bytes)
            continue
        units += _run_units(file, [*borders, tensor.offset_bytes])
        borders = [tensor.offset_bytes + tensor.size_bytes]
    units += _run_units(file, [*borders, file_bytes])
    return CopyJob(b"", tuple(units), file_bytes)


def plan_copy(file: int, file_bytes: int) -> CopyJob:
    """Lay out the whole copy of one file."""
    return CopyJob(b"", tuple(_run_units(file, [0, file_bytes])), file_bytes)


def read_slice(
    source: str, header: Header
) -> tuple[tuple[Segment, ...], tuple[SlicedTensor, ...]] | None:
    """Return what a slice's header says that it has; ``None`` for a file that is not a slice.

    Raises:
        LinkcppError: it is a slice, but of a newer format, or one that contradicts itself.
    """
    metadata = header.metadata
    if metadata.get("general.type") != SLICE_TYPE:
        return None
    version = metadata.get("linkcpp.slice.version")
    if version != SLICE_VERSION:
        raise LinkcppError(
            f"{source} has version {str(version)[:20]} of the slice format; {SLICE_VERSION} is "
            "known here.",
            hint="Use the linkcpp that made it, or slice the model again.",
        )
    segments: list[Segment] = []
    tensors = []
    held: dict[int, tuple[int, tuple[Range, ...]]] = {}
    for layer in _numbers(source, metadata, "linkcpp.slice.layers"):
        count, ranges = held[layer] = _held(source, metadata, layer)
        segments += [Segment(layer=layer, first=first, last=last) for first, last in ranges]
        _check_list(source, header, layer)
    for info in header.tensors:
        split = expert_name(info.name)
        if split is None or split[0] not in held:
            raise _contradiction(source, f"{info.name} belongs to none of its layers")
        count, ranges = held[split[0]]
        tensor = expert_tensor(source, info, *split, count, held_count=count_experts(ranges))
        tensors.append(SlicedTensor(tensor, ranges, info.offset_bytes))
    if not tensors:
        raise _contradiction(source, "it has no tensors")
    return tuple(segments), tuple(tensors)


def hidden_size(source: str, metadata: Mapping[str, Value]) -> int:
    """The width of a token's row.

    Raises:
        LinkcppError: the header does not tell it.
    """
    value = metadata.get(f"{metadata.get('general.architecture')}.embedding_length")
    if not isinstance(value, int) or not 0 < value < 2**31:
        raise LinkcppError(
            f"{source} does not tell its hidden size (embedding_length).",
            hint="Convert the model anew with llama.cpp's convert_hf_to_gguf.py.",
        )
    return value


def _pairs(
    files: ModelFiles, tensors: list[ExpertTensor], ranges: Mapping[int, tuple[Range, ...]]
) -> Iterator[Pair]:
    metadata = files.metadata
    architecture = str(metadata.get("general.architecture"))
    yield "general.architecture", architecture
    yield "general.type", SLICE_TYPE
    name = metadata.get("general.name")
    if isinstance(name, str):
        yield "general.name", name
    for key in (*_COPIED_KEYS, *(f"{architecture}.{number}" for number in _COPIED_NUMBERS)):
        value = metadata.get(key)
        # Per-layer numbers are told below, for the layers that are here.
        if isinstance(value, int) and 0 <= value < 2**32:
            yield key, int(value)
    yield "linkcpp.slice.version", SLICE_VERSION
    yield "linkcpp.slice.source_digest", files.digest
    yield "linkcpp.slice.hidden_size", hidden_size(files.sources[0].name, metadata)
    yield "linkcpp.slice.layers", tuple(sorted(ranges))
    for layer, held in sorted(ranges.items()):
        here = [tensor for tensor in tensors if tensor.layer == layer]
        prefix = f"linkcpp.slice.blk.{layer}."
        yield f"{prefix}expert_count", here[0].expert_count
        yield f"{prefix}held_count", count_experts(held)
        yield f"{prefix}expert_ranges", tuple(number for pair in held for number in pair)
        yield f"{prefix}tensors", " ".join(f"{t.part}:{t.kind.name}" for t in here)


def _check_fits_in_keys(ranges: Mapping[int, tuple[Range, ...]]) -> None:
    most = MAX_KEPT_ARRAY_ITEMS // 2
    for layer, held in ranges.items():
        if len(held) > most:
            raise LinkcppError(
                f"The experts of layer {layer} are {len(held)} separate ranges; a slice takes "
                f"{most} a layer.",
                hint="Choose experts that are next to each other.",
            )


def _slab_units(
    placed: PlacedTensor, ranges: Iterable[Range], target_offset: int
) -> Iterator[CopyUnit]:
    slab_bytes = placed.tensor.slab_bytes
    most = max(_UNIT_BYTES // slab_bytes, 1)
    for first, last in ranges:
        for expert in range(first, last + 1, most):
            count = min(most, last + 1 - expert)
            source_offset = placed.offset_bytes + expert * slab_bytes
            yield CopyUnit(placed.file, source_offset, target_offset, (slab_bytes,) * count)
            target_offset += count * slab_bytes


def _run_units(file: int, borders: list[int]) -> Iterator[CopyUnit]:
    at, sizes = borders[0], list[int]()
    for start, end in pairwise(borders):
        for piece in range(start, end, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, end - piece)
            if sizes and sum(sizes) + size > _CHUNK_BYTES:
                yield CopyUnit(file, at, at, tuple(sizes))
                at, sizes = piece, []
            sizes.append(size)
    if sizes:
        yield CopyUnit(file, at, at, tuple(sizes))


def _held(source: str, metadata: Mapping[str, Value], layer: int) -> tuple[int, tuple[Range, ...]]:
    prefix = f"linkcpp.slice.blk.{layer}."
    count = metadata.get(f"{prefix}expert_count")
    numbers = _numbers(source, metadata, f"{prefix}expert_ranges")
    ranges = tuple(zip(numbers[::2], numbers[1::2], strict=False))
    ends = [-2, *numbers]
    is_ascending = all(
        first <= last and first > before + 1
        for (first, last), before in zip(ranges, ends[::2], strict=False)
    )
    if (
        not 0 <= layer < INDEX_END
        or not isinstance(count, int)
        or not 0 < count <= LARGEST_EXPERT_COUNT
        or len(numbers) % 2
        or not is_ascending
        or numbers[-1] >= count
    ):
        raise _contradiction(source, f"the experts of layer {layer} are not ascending ranges")
    if metadata.get(f"{prefix}held_count") != count_experts(ranges):
        raise _contradiction(source, f"the counts of layer {layer} disagree")
    return count, ranges


def _check_list(source: str, header: Header, layer: int) -> None:
    key = f"linkcpp.slice.blk.{layer}.tensors"
    listed = {
        (f"blk.{layer}.{match[1]}", TYPES_BY_NAME.get(match[2]))
        for match in _LISTED_TENSOR.finditer(str(header.metadata.get(key)))
    }
    present = {
        (tensor.name, tensor.kind)
        for tensor in header.tensors
        if tensor.name.startswith(f"blk.{layer}.")
    }
    if listed != present:
        raise _contradiction(source, f"it does not have the tensors that {key} lists")


def _numbers(source: str, metadata: Mapping[str, Value], key: str) -> list[int]:
    value = metadata.get(key)
    numbers = value if isinstance(value, tuple) else ()
    found = [number for number in numbers if isinstance(number, int)]
    if not found or len(found) != len(numbers):
        raise _contradiction(source, f"{key} is missing or no list of numbers")
    return found


def _contradiction(source: str, why: str) -> LinkcppError:
    return LinkcppError(
        f"{source} is not a sound slice: {why}.", hint="Slice the model again, or copy it again."
    )
