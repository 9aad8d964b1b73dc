"""Which experts of which layers: written by people, checked against a model, and merged."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from linkcpp.common.errors import LinkcppError
from linkcpp.common.records import WireRecord

ALL: Final = "all"
MAXIMUM_RANGES: Final = 10_000
# Layers times ranges of experts, over all requests: far above any model's every other expert.
MAXIMUM_SEGMENTS: Final = 2**17
_RANGE: Final = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")

Range = tuple[int, int]
# Layers and experts have lower numbers; enough for all that ``parse_ranges`` reads.
INDEX_END: Final = 2**20
_Index = Annotated[int, Field(ge=0, lt=INDEX_END)]


class Segment(WireRecord):
    """Experts ``first`` to ``last`` (both included) of one layer."""

    layer: _Index
    first: _Index
    last: _Index

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.first > self.last:
            raise ValueError("the range runs backwards")
        return self


@dataclass(frozen=True, slots=True)
class SegmentRequest:
    """What a user asked for: ranges with both ends included; ``None`` stands for all there are."""

    layers: tuple[Range, ...] | None
    experts: tuple[Range, ...] | None


def parse_ranges(text: str, what: str) -> tuple[Range, ...] | None:
    """Read ``0-3,7`` as ranges, and ``all`` as ``None``; ``what`` names them in errors.

    Raises:
        LinkcppError: the text is neither.
    """
    if text.strip() == ALL:
        return None
    ranges: list[Range] = []
    for item in text.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None or len(ranges) == MAXIMUM_RANGES:
            raise LinkcppError(
                f"{text[:80]!r} does not name {what}.",
                hint="Write numbers and ranges like 0-3,7, or all.",
            )
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first:
            raise LinkcppError(
                f"The range {first}-{last} of {what} runs backwards.",
                hint=f"Write {last}-{first}.",
            )
        ranges.append((first, last))
    return tuple(ranges)


def parse_segment(text: str) -> SegmentRequest:
    """Read ``LAYERS:EXPERTS``, for instance ``4:16-63,128-255``.

    Raises:
        LinkcppError: the text has another form.
    """
    layers, colon, experts = text.partition(":")
    if not colon:
        raise LinkcppError(
            f"{text[:80]!r} is not a segment.",
            hint="Write LAYERS:EXPERTS, for instance 0-3:0-31 or 4:16-63,128-255.",
        )
    return SegmentRequest(parse_ranges(layers, "layers"), parse_ranges(experts, "experts"))


def resolve(
    requests: Iterable[SegmentRequest], expert_counts: Mapping[int, int], layer_count: int
) -> tuple[Segment, ...]:
    """Turn requests into segments that the model has: sorted, merged, none empty.

    ``expert_counts`` has the layers with experts. All layers means all of these.

    Raises:
        LinkcppError: nothing was asked for, or a layer or expert that is not there.
    """
    wanted: dict[int, list[Range]] = defaultdict(list)
    segment_count = 0
    for request in requests:
        layers = _layers(request.layers, expert_counts, layer_count)
        # Merged first: what is named a thousand times over costs no more than once.
        experts = merge_ranges(request.experts) if request.experts is not None else None
        segment_count += len(layers) * (1 if experts is None else len(experts))
        if segment_count > MAXIMUM_SEGMENTS:
            raise LinkcppError(
                f"The slice is asked for in more than {MAXIMUM_SEGMENTS} pieces.",
                hint="Name each layer's experts once, in few ranges.",
            )
        for layer in layers:
            count = expert_counts[layer]
            if experts and experts[-1][1] >= count:
                raise _no_such_experts(layer, count, request.experts or ())
            wanted[layer] += experts or ((0, count - 1),)
    if not wanted:
        raise LinkcppError(
            "The slice would be empty: no experts were asked for.",
            hint="Name some with --layers and --experts, or with --segment LAYERS:EXPERTS.",
        )
    return tuple(
        Segment(layer=layer, first=first, last=last)
        for layer in sorted(wanted)
        for first, last in merge_ranges(wanted[layer])
    )


def merge_segments(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Sort segments and join those that touch or overlap."""
    return tuple(
        Segment(layer=layer, first=first, last=last)
        for layer, ranges in sorted(ranges_by_layer(segments).items())
        for first, last in merge_ranges(ranges)
    )


def ranges_by_layer(segments: Iterable[Segment]) -> dict[int, tuple[Range, ...]]:
    """Group the expert ranges by layer, in the order of the segments."""
    found: dict[int, list[Range]] = defaultdict(list)
    for segment in segments:
        found[segment.layer].append((segment.first, segment.last))
    return {layer: tuple(ranges) for layer, ranges in found.items()}


def merge_ranges(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Sort ranges and join those that touch or overlap."""
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def count_experts(ranges: Iterable[Range]) -> int:
    """How many experts the ranges have, none of which may overlap."""
    return sum(last - first + 1 for first, last in ranges)


def describe(segments: Iterable[Segment]) -> tuple[str, ...]:
    """Write segments as ``--segment`` takes them; neighbour layers of equal ranges together."""
    grouped: dict[tuple[Range, ...], list[Range]] = defaultdict(list)
    for layer, ranges in sorted(ranges_by_layer(segments).items()):
        grouped[ranges].append((layer, layer))
    return tuple(
        f"{write_ranges(merge_ranges(layers))}:{write_ranges(ranges)}"
        for ranges, layers in grouped.items()
    )


def write_ranges(ranges: Iterable[Range]) -> str:
    """Write ranges as ``parse_ranges`` reads them."""
    return ",".join(_write(first, last) for first, last in ranges)


def _write(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _no_such_experts(layer: int, count: int, asked: Iterable[Range]) -> LinkcppError:
    first, last = next(asked_range for asked_range in asked if asked_range[1] >= count)
    return LinkcppError(
        f"Layer {layer} has experts 0 to {count - 1}, not {_write(first, last)}.",
        hint=f"Name experts below {count}.",
    )


def _layers(
    ranges: tuple[Range, ...] | None, expert_counts: Mapping[int, int], layer_count: int
) -> list[int]:
    if ranges is None:
        return sorted(expert_counts)
    for first, last in ranges:
        if last >= layer_count:
            raise LinkcppError(
                f"The model has layers 0 to {layer_count - 1}, not {_write(first, last)}.",
                hint=f"Name layers below {layer_count}.",
            )
    layers = []
    for first, last in merge_ranges(ranges):
        for layer in range(first, last + 1):
            if layer not in expert_counts:
                raise LinkcppError(
                    f"Layer {layer} is dense: it has no experts to slice.",
                    hint=f"Leave it out; layers with experts: {_with_experts(expert_counts)}.",
                )
            layers.append(layer)
    return layers


def _with_experts(expert_counts: Mapping[int, int]) -> str:
    return write_ranges(merge_ranges((layer, layer) for layer in expert_counts)) or "none"
