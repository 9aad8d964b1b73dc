"""Which values of a chain may lie in the same memory, as they are not needed at once. Pure."""

from typing import NamedTuple

from linkcpp.worker.chain import Chain, SourceKind

# Enough for every backend's alignment of tensors in a buffer.
ALIGNMENT_BYTES = 128


class Slots(NamedTuple):
    """Memory that the values of one step share: ``widths`` in elements for each pair.

    ``of_step[k]`` is the slot of step k; a view has that of what it looks at. Where rows are
    gathered first, they are in slot 0.
    """

    widths: tuple[int, ...]
    of_step: tuple[int, ...]


def assign_slots(chain: Chain, *, gathers_rows: bool) -> Slots:
    """Give every step of a checked chain a slot whose other values are not needed meanwhile.

    The widest values choose first, which wastes least.
    """
    base = _bases(chain)
    spans = [_Span(step.width, number, number) for number, step in enumerate(chain.steps)]
    rows = _Span(chain.inputs[0].width, -1, -1)
    for number, step in enumerate(chain.steps):
        for source in step.sources:
            if source.kind == SourceKind.STEP:
                at = base[source.index]
                spans[at] = spans[at]._replace(last=number)
            elif source.kind == SourceKind.INPUT and source.index == 0:
                rows = rows._replace(last=number)
    own = [number for number, place in enumerate(base) if place == number]
    widest_first = sorted(own, key=lambda number: (-spans[number].width, number))
    slots: list[list[_Span]] = [[rows]] if gathers_rows else []
    slot_of = {number: _choose(slots, spans[number]) for number in widest_first}
    widths = tuple(max(span.width for span in slot) for slot in slots)
    return Slots(widths, tuple(slot_of[place] for place in base))


class _Span(NamedTuple):
    """A value: the step that makes it, and the last one that reads it."""

    width: int
    first: int
    last: int


def _bases(chain: Chain) -> list[int]:
    """Return for each step whose memory it has: its own, or for a view what it looks at."""
    base: list[int] = []
    for number, step in enumerate(chain.steps):
        base.append(base[step.sources[0].index] if step.op == "VIEW" else number)
    return base


def _choose(slots: list[list[_Span]], value: _Span) -> int:
    """Put a value into the first slot where it meets no other, and return which."""
    for number, others in enumerate(slots):
        if all(value.last < other.first or other.last < value.first for other in others):
            others.append(value)
            return number
    slots.append([value])
    return len(slots) - 1


class ScratchNeed(NamedTuple):
    """A bound of the scratch memory of a step, in bytes: by itself, for a row, and for a pair."""

    fixed_bytes: int
    row_bytes: int
    pair_bytes: int

    def total_bytes(self, rows: int, pairs: int) -> int:
        """Return what a step needs for pairs of so many rows of input 0."""
        return self.fixed_bytes + self.row_bytes * rows + self.pair_bytes * pairs

    def max_pairs(self, rows: int, scratch_bytes: int) -> int:
        """Return how many pairs of so many rows fit, at least one."""
        return max((scratch_bytes - self.total_bytes(rows, 0)) // self.pair_bytes, 1)


def scratch_need(chain: Chain) -> ScratchNeed:
    """Return what steps of a checked chain need, however their pairs lie."""
    first, *further = (entry.width for entry in chain.inputs)
    slots = max(sum(assign_slots(chain, gathers_rows=gathers).widths) for gathers in (True, False))
    return ScratchNeed(
        fixed_bytes=ALIGNMENT_BYTES * (len(chain.steps) + len(chain.inputs) + 4),
        row_bytes=4 * first,
        pair_bytes=4 * (2 + sum(further) + slots),
    )
