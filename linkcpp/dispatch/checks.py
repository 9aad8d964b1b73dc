"""What a check of a worker's rows found. Pure."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from linkcpp.common.records import WireRecord
from linkcpp.model.slices.segments import Segment
from linkcpp.worker.agreement import Agreement, Verdict, merge, worst
from linkcpp.worker.chain import KeyedChain

THE_MODEL = "the model"
NOBODY_ELSE = "nobody"


class Trial(NamedTuple):
    """What has to be proved: the experts of one layer with one chain."""

    layer: int
    chain: KeyedChain


class RowCheck(WireRecord):
    """A worker's rows of one layer's ``experts`` against a reference.

    ``against`` is ``the model``, ``worker NAME`` or ``nobody``; ``agreement`` is ``None`` in the
    last case only. ``complaint`` says why the worker must not be used, if so.
    """

    layer: int
    experts: tuple[int, ...]
    against: str
    agreement: Agreement | None
    complaint: str | None = None


class AdmissionStatus(WireRecord):
    """All checks of a worker since it was linked, as one."""

    layer_count: int
    against: tuple[str, ...]
    agreement: Agreement | None


def held_experts(segments: Sequence[Segment], layer: int, count: int) -> list[int]:
    """Return the experts of a layer in segments, each once, none beyond the layer's ``count``."""
    found: set[int] = set()
    for segment in segments:
        if segment.layer == layer:
            found.update(range(max(segment.first, 0), min(segment.last + 1, count)))
    return sorted(found)


def majority(checks: Sequence[RowCheck]) -> RowCheck | None:
    """Take the word of at least half of the other holders, where there are any."""
    good = [check for check in checks if check.complaint is None]
    bad = [check for check in checks if check.complaint is not None]
    if good and len(good) >= len(bad):
        return good[0]
    return bad[0] if bad else None


def is_difference(verdict: Verdict, *, were_equal: bool) -> bool:
    """Tell whether two that computed the same rows cannot both be right.

    ``were_equal``: they had the same bits before. Others may differ as two backends do.
    """
    return verdict == Verdict.DIFFERS or (were_equal and verdict != Verdict.EXACT)


def who_is_wrong(first: Verdict, second: Verdict, *, is_certain: bool) -> tuple[bool, bool]:
    """Judge two whose rows differ by how each agrees with a third.

    ``is_certain``: the third cannot be wrong. Where neither is nearer to it, it cannot be told
    which of the two is wrong, unless both are.
    """
    if first == second:
        are_both = is_certain and first == Verdict.DIFFERS
        return are_both, are_both
    is_first = worst((first, second)) == first
    return is_first, not is_first


def admission_status(checks: Iterable[RowCheck]) -> AdmissionStatus | None:
    """Sum up the checks of a worker; ``None`` where there were none yet."""
    known = list(checks)
    if not known:
        return None
    agreements = [check.agreement for check in known if check.agreement is not None]
    return AdmissionStatus(
        layer_count=len({check.layer for check in known}),
        against=tuple(sorted({check.against for check in known})),
        agreement=merge(agreements) if agreements else None,
    )
