"""How far two computations of the same rows agree. Pure.

The bounds are those of an engine of another build or backend: DESIGN's target is a cosine of at
least 0.9999. A cosine does not see a wrong length, so the relative error is bounded too: by what
two vectors of equal length with that very cosine differ by, sqrt(2 * (1 - cosine)).
"""

import math
from collections.abc import Iterable
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from linkcpp.common.records import WireRecord
from linkcpp.worker.frames import Rows

MIN_COSINE = 0.9999
MAX_RELATIVE_ERROR = math.sqrt(2 * (1 - MIN_COSINE))


class Verdict(StrEnum):
    """What a comparison found; the worst of several is the last in this order."""

    EXACT = "exact"
    EQUIVALENT = "equivalent"
    DIFFERS = "differs"


class Agreement(WireRecord):
    """Rows against their reference, the worst row of all.

    ``least_cosine`` is 1 and both errors are 0 where every bit is equal. ``largest_difference`` is
    absolute, ``relative_error`` the length of the difference by that of the reference row; both are
    ``None`` where a row is not finite though its reference is, or the other way round.
    """

    verdict: Verdict
    row_count: int
    least_cosine: float
    largest_difference: float | None
    relative_error: float | None


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst verdict; of none, that nothing differs."""
    order = list(Verdict)
    return max(verdicts, key=order.index, default=Verdict.EXACT)


def compare_rows(found: Rows, reference: Rows) -> Agreement:
    """Compare rows of shape (count, width), which must be equal."""
    count = len(found)
    if found.shape != reference.shape:
        raise ValueError(f"rows of shape {found.shape} and {reference.shape}")
    # Bytes tell more than numbers: NaN is equal to itself here, and -0 is not 0.
    if found.tobytes() == reference.tobytes():
        return Agreement(
            verdict=Verdict.EXACT,
            row_count=count,
            least_cosine=1.0,
            largest_difference=0.0,
            relative_error=0.0,
        )
    if not (np.isfinite(found).all() and np.isfinite(reference).all()):
        return Agreement(
            verdict=Verdict.DIFFERS,
            row_count=count,
            least_cosine=-1.0,
            largest_difference=None,
            relative_error=None,
        )
    ours, theirs = found.astype(np.float64), reference.astype(np.float64)
    cosine = float(_cosines(ours, theirs).min())
    error = float(_relative_errors(ours, theirs).max())
    is_close = cosine >= MIN_COSINE and error <= MAX_RELATIVE_ERROR
    return Agreement(
        verdict=Verdict.EQUIVALENT if is_close else Verdict.DIFFERS,
        row_count=count,
        least_cosine=cosine,
        largest_difference=float(np.abs(ours - theirs).max()),
        relative_error=error,
    )


def merge(parts: Iterable[Agreement]) -> Agreement:
    """Take several comparisons as one."""
    known = list(parts)
    differences = [part.largest_difference for part in known]
    errors = [part.relative_error for part in known]
    return Agreement(
        verdict=worst(part.verdict for part in known),
        row_count=sum(part.row_count for part in known),
        least_cosine=min((part.least_cosine for part in known), default=1.0),
        largest_difference=_largest(differences),
        relative_error=_largest(errors),
    )


def _largest(values: Iterable[float | None]) -> float | None:
    known = list(values)
    finite = [value for value in known if value is not None]
    return max(finite, default=0.0) if len(finite) == len(known) else None


Doubles = npt.NDArray[np.float64]


def _cosines(ours: Doubles, theirs: Doubles) -> Doubles:
    # Scaled first: the square of a large float overflows nothing then, and a small one stays.
    left, right = _unit(ours), _unit(theirs)
    both_zero = ~left.any(axis=1) & ~right.any(axis=1)
    cosines: Doubles = np.where(both_zero, 1.0, np.clip((left * right).sum(axis=1), -1.0, 1.0))
    return cosines


def _unit(rows: Doubles) -> Doubles:
    largest = np.abs(rows).max(axis=1, keepdims=True)
    scaled = np.divide(rows, largest, out=np.zeros_like(rows), where=largest > 0)
    lengths = np.linalg.norm(scaled, axis=1, keepdims=True)
    unit: Doubles = np.divide(scaled, lengths, out=np.zeros_like(rows), where=lengths > 0)
    return unit


def _relative_errors(ours: Doubles, theirs: Doubles) -> Doubles:
    wrong = np.linalg.norm(ours - theirs, axis=1)
    lengths = np.linalg.norm(theirs, axis=1)
    errors: Doubles = np.divide(
        wrong, lengths, out=np.where(wrong > 0, np.inf, 0.0), where=lengths > 0
    )
    return errors
