"""Whether a worker computes what it should: before it is used, and whenever somebody asks.

A few of its experts compute random rows, which nobody can know before. The reference is the full
model on an rpc-server of this machine, where there is one; else the other holders of the same
experts. With neither, a worker is used unchecked, and its status says so.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from linkcpp.dispatch.checks import (
    NOBODY_ELSE,
    THE_MODEL,
    RowCheck,
    Trial,
    held_experts,
    majority,
)
from linkcpp.dispatch.holder import Holder
from linkcpp.worker.agreement import Agreement, Verdict, compare_rows
from linkcpp.worker.chain import KeyedChain
from linkcpp.worker.frames import FrameError, Pairs, Rows

EXPERTS_A_LAYER = 2
ROWS_AN_EXPERT = 2


class Reference(Protocol):
    """Computes pairs rightly, or not at all (``None``)."""

    def rows(self, chain: KeyedChain, pairs: Pairs) -> Rows | None:
        """Return one row a pair."""
        ...


class Asking(NamedTuple):
    """How workers are asked.

    ``ask`` lets a worker compute, and raises what ``asking.ask_alone`` raises. ``give_up`` is told
    of another worker for which it raised.
    """

    ask: Callable[[Holder, KeyedChain, Pairs], Rows]
    give_up: Callable[[Holder, OSError | FrameError], None]


class _Sample(NamedTuple):
    """Rows for one expert, and what the reference makes of them."""

    inputs: tuple[Rows, ...]
    rows: Rows


class Admission:
    """Checks workers; for one thread at a time.

    ``expert_counts`` are the experts by layer. What the reference answers for an expert is kept, so
    that a worker that comes back costs no second look into the model.
    """

    def __init__(self, expert_counts: Mapping[int, int], reference: Reference | None) -> None:
        self._expert_counts = expert_counts
        self._reference = reference
        self._random = np.random.default_rng()
        self._known: dict[tuple[int, object, int], _Sample] = {}

    def check(
        self,
        holder: Holder,
        trial: Trial,
        others: Iterable[Holder],
        asking: Asking,
        *,
        expert_count: int = EXPERTS_A_LAYER,
        is_fresh: bool = False,
    ) -> RowCheck:
        """Compare a worker's rows for some of its experts of a layer.

        ``others`` may hold any experts. ``is_fresh`` takes rows that were never used before.

        Raises:
            OSError: the link broke, or the worker does not answer in time.
            FrameError: it refuses, or answers what makes no sense.
        """
        held = self._experts_of(holder, trial.layer)
        count = min(expert_count, len(held))
        if not count:
            return RowCheck(layer=trial.layer, experts=(), against=NOBODY_ELSE, agreement=None)
        experts: list[int] = sorted(self._random.choice(held, count, replace=False).tolist())
        samples = self._samples(trial, experts, is_fresh)
        if samples is None:
            return self._against_others(holder, trial, experts, others, asking)
        inputs = tuple(
            np.concatenate(rows) for rows in zip(*(s.inputs for s in samples), strict=True)
        )
        rows = asking.ask(holder, trial.chain, _pairs(trial.layer, experts, inputs))
        agreement = compare_rows(rows, np.concatenate([sample.rows for sample in samples]))
        return _row_check(trial.layer, experts, THE_MODEL, agreement)

    def _experts_of(self, holder: Holder, layer: int) -> list[int]:
        segments = holder.welcome.segments if holder.welcome else ()
        return held_experts(segments, layer, self._expert_counts.get(layer, 0))

    def _samples(self, trial: Trial, experts: list[int], is_fresh: bool) -> list[_Sample] | None:
        """Return a sample for each expert, or ``None`` where there is no reference."""
        found = []
        for expert in experts:
            key = (trial.layer, trial.chain.key, expert)
            sample = None if is_fresh else self._known.get(key)
            if sample is None and self._reference is not None:
                inputs = self._draw(trial.chain, ROWS_AN_EXPERT)
                pairs = _pairs(trial.layer, [expert], inputs)
                rows = self._reference.rows(trial.chain, pairs)
                sample = None if rows is None else _Sample(inputs, np.array(rows))
            if sample is None:
                return None
            self._known[key] = sample
            found.append(sample)
        return found

    def _draw(self, chain: KeyedChain, count: int) -> tuple[Rows, ...]:
        """Draw rows of about the size that a norm leaves."""
        return tuple(
            self._random.standard_normal((count, width), np.float32) for width in chain.input_widths
        )

    def _against_others(
        self,
        holder: Holder,
        trial: Trial,
        experts: list[int],
        others: Iterable[Holder],
        asking: Asking,
    ) -> RowCheck:
        inputs = self._draw(trial.chain, ROWS_AN_EXPERT * len(experts))
        rows = asking.ask(holder, trial.chain, _pairs(trial.layer, experts, inputs))
        nothing = RowCheck(
            layer=trial.layer, experts=tuple(experts), against=NOBODY_ELSE, agreement=None
        )
        if not np.isfinite(rows).all():
            return nothing.model_copy(update={"complaint": "its rows are not finite"})
        found = []
        for other in others:
            shared = sorted(set(experts) & set(self._experts_of(other, trial.layer)))
            if not shared:
                continue
            mine = np.repeat(np.isin(experts, shared), ROWS_AN_EXPERT)
            pairs = _pairs(trial.layer, shared, tuple(values[mine] for values in inputs))
            try:
                theirs = asking.ask(other, trial.chain, pairs)
            except (OSError, FrameError) as error:
                asking.give_up(other, error)
                continue
            if np.isfinite(theirs).all():
                agreement = compare_rows(rows[mine], theirs)
                name = f"worker {other.name}"
                found.append(_row_check(trial.layer, shared, name, agreement))
        return majority(found) or nothing


def _pairs(layer: int, experts: Sequence[int], inputs: tuple[Rows, ...]) -> Pairs:
    """Give each expert its ``ROWS_AN_EXPERT`` rows."""
    ids = np.repeat(np.array(experts, np.int32), ROWS_AN_EXPERT)
    return Pairs(layer, np.arange(len(ids), dtype=np.int32), ids, inputs)


def _row_check(layer: int, experts: list[int], against: str, agreement: Agreement) -> RowCheck:
    complaint = None
    if agreement.verdict == Verdict.DIFFERS:
        complaint = (
            f"its rows for layer {layer} are not those of {against} "
            f"(cosine {agreement.least_cosine:.6f})"
        )
        if against != THE_MODEL:
            complaint += "; without the full model here nobody can say whose are right"
    return RowCheck(
        layer=layer,
        experts=tuple(experts),
        against=against,
        agreement=agreement,
        complaint=complaint,
    )
