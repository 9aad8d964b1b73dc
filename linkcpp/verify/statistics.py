"""How far two runs of a model agree on the next token. Pure."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from linkcpp.verify.records import TextAgreement, WorkerReport
from linkcpp.worker.agreement import Verdict, worst

TOP = 8
# Targets for another build or backend: 99.9 % of the best tokens are the same. In fewer than a
# thousand positions one that is not (two tokens that are all but equally likely) proves nothing.
MIN_TOP1_SHARE = 0.999
MAX_MEAN_DIVERGENCE = 1e-3
# One position that is plainly wrong must not drown in many that are right.
MAX_DIVERGENCE = 0.05
# Probabilities below the rounding of f32 sums are as good as none.
_MIN_REST = 1e-7


class Position(NamedTuple):
    """The token that a run chose, and its best tokens with their natural log-probabilities."""

    token: int
    best: tuple[tuple[int, float], ...]


class Comparison(NamedTuple):
    """One position in both runs; see ``TextAgreement``."""

    is_equal: bool
    is_same_top1: bool
    top8_share: float
    difference: float
    divergence: float


def same_beginning(ours: Sequence[Position], theirs: Sequence[Position]) -> int:
    """Return how many positions have one and the same context in both runs.

    Where the tokens part, the distributions are still of the same text; after it they are not.
    """
    shared = 0
    for one, other in zip(ours, theirs, strict=False):
        shared += 1
        if one.token != other.token:
            break
    return shared


def compare(found: Position, reference: Position) -> Comparison:
    """Compare one position."""
    ours, theirs = dict(found.best), dict(reference.best)
    both = ours.keys() & theirs.keys()
    top = [{token for token, _ in position.best[:TOP]} for position in (found, reference)]
    return Comparison(
        is_equal=found == reference,
        is_same_top1=found.token == reference.token,
        top8_share=len(top[0] & top[1]) / max(len(top[1]), 1),
        difference=max((abs(ours[token] - theirs[token]) for token in both), default=math.inf),
        divergence=divergence(theirs, ours),
    )


def divergence(reference: dict[int, float], found: dict[int, float]) -> float:
    """Return a lower bound of the Kullback-Leibler divergence of two distributions, in nats.

    Both map their best tokens to natural log-probabilities. Three kinds of tokens are told apart:
    those that both tell, each by itself; those that only the reference tells, as one; the rest, as
    one. Joining outcomes never makes a divergence larger. What the second kind has in ``found`` is
    not told: at most what the told ones leave, and for each token at most the least one told. It
    is taken as what makes the divergence smallest.
    """
    both = reference.keys() & found.keys()
    total = sum(math.exp(reference[t]) * (reference[t] - found[t]) for t in both)
    left = 1 - sum(math.exp(reference[token]) for token in both)
    found_left = 1 - sum(math.exp(found[token]) for token in both)
    alone = [math.exp(value) for token, value in reference.items() if token not in both]
    most = min(
        1 - sum(map(math.exp, found.values())),
        len(alone) * math.exp(min(found.values(), default=0.0)),
    )
    known = sum(alone)
    likeliest = found_left * known / max(left, _MIN_REST)
    found_known = min(most, likeliest)
    total += _term(known, found_known) + _term(left - known, found_left - found_known)
    return max(total, 0.0)


def _term(one: float, other: float) -> float:
    one, other = max(one, _MIN_REST), max(other, _MIN_REST)
    return one * math.log(one / other)


def summarize(comparisons: Sequence[Comparison], prompt_count: int) -> TextAgreement:
    """Take all positions (at least one) together."""
    count = len(comparisons)
    misses = sum(not comparison.is_same_top1 for comparison in comparisons)
    divergences = [comparison.divergence for comparison in comparisons]
    mean = sum(divergences) / count
    equal = sum(comparison.is_equal for comparison in comparisons)
    if equal == count:
        verdict = Verdict.EXACT
    elif (
        misses <= max(1, int((1 - MIN_TOP1_SHARE) * count))
        and mean <= MAX_MEAN_DIVERGENCE
        and max(divergences) <= MAX_DIVERGENCE
    ):
        verdict = Verdict.EQUIVALENT
    else:
        verdict = Verdict.DIFFERS
    return TextAgreement(
        verdict=verdict,
        prompt_count=prompt_count,
        position_count=count,
        equal_count=equal,
        largest_difference=max(comparison.difference for comparison in comparisons),
        top1_share=1 - misses / count,
        top8_share=sum(comparison.top8_share for comparison in comparisons) / count,
        mean_divergence=mean,
        largest_divergence=max(divergences),
    )


def verdict_of(text: TextAgreement | None, workers: Iterable[WorkerReport]) -> Verdict | None:
    """Return the worst of all that was compared; ``None`` where nothing was."""
    verdicts = [worker.verdict for worker in workers if worker.verdict is not None]
    if text is not None:
        verdicts.append(text.verdict)
    return worst(verdicts) if verdicts else None


def summary_of(
    verdict: Verdict, text: TextAgreement | None, workers: Sequence[WorkerReport]
) -> str:
    """Say in one sentence what was found, and no more than was compared."""
    if verdict is Verdict.DIFFERS:
        wrong = [worker.name for worker in workers if worker.verdict is Verdict.DIFFERS]
        what = ["the rows of " + ", ".join(wrong)] if wrong else []
        if text is not None and text.verdict is Verdict.DIFFERS:
            what.append("the next tokens' probabilities")
        return f"differs: {' and '.join(what)}"
    if text is None:
        return f"{_workers_agree(workers)}; the text was not compared"
    if verdict is Verdict.EXACT:
        return "exact: difference 0"
    return f"equivalent within {_distance(text, workers)}"


def _workers_agree(workers: Sequence[WorkerReport]) -> str:
    checked = [worker for worker in workers if worker.verdict is not None]
    some = f"{len(checked)} of {len(workers)} " if len(checked) < len(workers) else ""
    is_exact = all(worker.verdict is Verdict.EXACT for worker in checked)
    distance = "difference 0" if is_exact else f"within {_distance(None, workers)}"
    return f"{some}workers agree: {distance}"


def _distance(text: TextAgreement | None, workers: Sequence[WorkerReport]) -> str:
    within = []
    if text is not None and text.verdict is Verdict.EQUIVALENT:
        within.append(
            f"{text.largest_difference:.2g} of a log-probability, top-1 {text.top1_share:.2%}"
        )
    cosines = [worker.agreement.least_cosine for worker in workers if worker.agreement is not None]
    if any(worker.verdict is Verdict.EQUIVALENT for worker in workers):
        within.append(f"a cosine of {min(cosines):.6f}")
    return " and ".join(within)
