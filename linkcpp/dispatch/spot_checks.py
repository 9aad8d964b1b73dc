"""Spot checks: now and then somebody else computes all rows of one expert in a step as well.

What is checked is drawn once its rows are there, and the same rows go to another holder or to the
fallback as any others would, so neither side can tell. Nothing waits for it: tokens go on while a
thread asks, compares, and judges. Where rows differ, answers under way are marked as failed.
"""

import logging
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from linkcpp.dispatch.checks import THE_MODEL, is_difference, who_is_wrong
from linkcpp.dispatch.holder import Answer, Holder, LinkState, next_request_number
from linkcpp.dispatch.job import Job, Token
from linkcpp.dispatch.swarm_state import SwarmState
from linkcpp.worker.agreement import Verdict, compare_rows
from linkcpp.worker.chain import KeyedChain
from linkcpp.worker.frames import FrameError, Numbers, Pairs, Rows
from linkcpp.worker.sampling import SECRET_BYTES, start_sampling

_log = logging.getLogger(__name__)

# More would tell of a difference long after it was used.
_MAX_WAITING = 64
_MAX_WAITING_BYTES = 32 * 2**20
_MAX_ROWS = 512
_ANSWER_SECONDS = 10.0
_LOOK_SECONDS = 0.01
# The fallback may have to read experts from disk; tokens need the processor more.
_REST_FACTOR = 3
_MAX_SENTENCES = 64
_MAX_REMEMBERED = 1 << 14
_CLOSE_SECONDS = 5.0
_MODELS = f"those of {THE_MODEL}"


class Sample(NamedTuple):
    """All rows of one expert in a step: who computed them, from what, and what he answered."""

    holder: Holder
    chain: KeyedChain
    pairs: Pairs
    rows: Rows

    @property
    def expert(self) -> int:
        """The expert."""
        return int(self.pairs.expert_ids[0])

    @property
    def size_bytes(self) -> int:
        """What it takes while it waits."""
        return self.rows.nbytes + sum(rows.nbytes for rows in self.pairs.inputs)


@dataclass(slots=True)
class SpotCounters:
    """What happened since the start.

    ``skipped_count`` samples were not compared: nobody else has the expert, or there was no time.
    """

    check_count: int = 0
    pair_count: int = 0
    skipped_count: int = 0
    difference_count: int = 0


class _Waiting:
    """A request whose answer comes by another thread."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.rows: bytes | None = None
        self.is_over = threading.Event()

    def take(self, answer: Answer) -> None:
        """Take the answer, if it is to this request."""
        if answer.request_id == self.number:
            self.rows = bytes(answer.rows)
            self.is_over.set()


Judge = Holder | None
"""Another holder, or ``None`` for the fallback: the model itself."""


class SpotChecks:
    """Takes samples in the dispatching thread, and compares them in one of its own."""

    def __init__(self, swarm: SwarmState) -> None:
        self._swarm = swarm
        self._calling = swarm.calling
        self.rate = swarm.options.spot_check_rate
        self._sampler = start_sampling(secrets.token_bytes(SECRET_BYTES), self.rate)
        self._random = random.SystemRandom()
        self.counters = SpotCounters()
        self._told: dict[str, str] = {}
        self._samples: deque[Sample] = deque()
        self._waiting_bytes = 0
        self._has_news = threading.Condition()
        self._is_closing = threading.Event()
        self._model_rests_until = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True, name="spot checks")
        self._thread.start()

    def close(self) -> None:
        """Compare nothing more."""
        with self._has_news:
            self._is_closing.set()
            self._has_news.notify_all()
        self._thread.join(_CLOSE_SECONDS)

    @property
    def sentences(self) -> tuple[str, ...]:
        """What differed, one sentence for each group of holders."""
        return tuple(self._told.values())

    # In the dispatching thread, while it holds the lock of calls.

    def sample_token(
        self, holder: Holder, token: Token, positions: Sequence[int], rows: Rows
    ) -> None:
        """Maybe take some of a token's experts; ``rows`` are those of all its pairs."""
        taken, self._sampler = self._sampler.take(len(positions))
        for number in taken:
            position = positions[number]
            row = np.frombuffer(bytes(token.row), np.float32).reshape(1, -1)
            expert = np.array([token.expert_ids[position]], np.int32)
            pairs = Pairs(token.layer, np.zeros(1, np.int32), expert, (row,))
            self._add(Sample(holder, token.chain, pairs, rows[position : position + 1].copy()))

    def sample_job(self, holder: Holder, job: Job, positions: Numbers, rows: Rows) -> None:
        """Maybe take some of the experts that a holder computed in these positions of a job."""
        if not self.rate:
            return
        ids = job.ids.reshape(-1)[positions]
        experts = np.unique(ids)
        taken, self._sampler = self._sampler.take(len(experts))
        for number in taken:
            own = positions[ids == experts[number]]
            pairs = job.pairs(own)
            inputs = tuple(values.copy() for values in pairs.inputs)
            self._add(Sample(holder, job.chain, pairs._replace(inputs=inputs), rows[own]))

    def _add(self, sample: Sample) -> None:
        with self._has_news:
            size_bytes = self._waiting_bytes + sample.size_bytes
            is_full = len(self._samples) >= _MAX_WAITING or size_bytes > _MAX_WAITING_BYTES
            if is_full or len(sample.rows) > _MAX_ROWS:
                self.counters.skipped_count += 1
                return
            self._waiting_bytes = size_bytes
            self._samples.append(sample)
            self._has_news.notify()

    # In the thread of its own.

    def _run(self) -> None:
        while (sample := self._next()) is not None:
            try:
                with np.errstate(all="ignore"):
                    self._check(sample)
            except Exception:
                _log.exception("a spot check ended by an internal error")

    def _next(self) -> Sample | None:
        with self._has_news:
            self._has_news.wait_for(lambda: self._samples or self._is_closing.is_set())
            if self._is_closing.is_set():
                return None
            sample = self._samples.popleft()
            self._waiting_bytes -= sample.size_bytes
            return sample

    def _check(self, sample: Sample) -> None:
        holders = self._other_holders(sample)
        judges: list[Judge] = [*holders]
        if not holders or time.monotonic() >= self._model_rests_until:
            judges.append(None)
        self._random.shuffle(judges)
        for judge in judges:
            rows = self._rows_of(judge, sample)
            if rows is None:
                continue
            self.counters.check_count += 1
            self.counters.pair_count += len(rows)
            if self._is_difference(sample, judge, rows):
                thirds = [None, *(holder for holder in holders if holder is not judge)]
                self._settle(sample, judge, rows, thirds if judge is not None else [])
            return
        self.counters.skipped_count += 1

    def _other_holders(self, sample: Sample) -> list[Holder]:
        routes = self._swarm.routes_of(sample.pairs.layer)
        numbers: list[int] = routes.numbers[routes.holds[:, sample.expert]].tolist()
        return [
            holder
            for holder in map(self._swarm.holders.get, numbers)
            if holder is not None
            and holder is not sample.holder
            and holder.state == LinkState.UP
            and holder.max_pairs(sample.chain) >= len(sample.rows)
        ]

    def _rows_of(self, judge: Judge, sample: Sample) -> Rows | None:
        """Have a judge compute a sample; ``None`` where it cannot now."""
        if judge is not None:
            return self._holder_rows(sample, judge)
        fallback = self._swarm.fallback
        if fallback is None:
            return None
        self._is_closing.wait(max(self._model_rests_until - time.monotonic(), 0))
        began = time.monotonic()
        rows = fallback.rows(sample.chain, sample.pairs)
        ended = time.monotonic()
        self._model_rests_until = ended + _REST_FACTOR * (ended - began)
        return rows

    def _holder_rows(self, sample: Sample, judge: Holder) -> Rows | None:
        data = self._ask(judge, sample)
        width = sample.chain.output_width
        if data is None or len(data) != 4 * len(sample.rows) * width:
            return None
        return np.frombuffer(data, np.float32).reshape(-1, width)

    def _ask(self, judge: Holder, sample: Sample) -> bytes | None:
        """Ask between two calls; whoever reads the link next hands the answer over."""
        waiting = _Waiting(next_request_number())
        with self._calling:
            link = judge.link
            if judge.state != LinkState.UP or judge.is_removed or judge.is_sending:
                return None
            judge.on_other_answer = waiting.take
            try:
                judge.ask(waiting.number, sample.chain, sample.pairs)
            except (OSError, FrameError) as error:
                self._swarm.holders.fail(judge, f"cannot be asked: {error}", sample.pairs.layer)
        give_up_at = time.monotonic() + _ANSWER_SECONDS
        while not waiting.is_over.wait(_LOOK_SECONDS):
            with self._calling:
                is_late = time.monotonic() > give_up_at
                if judge.link is not link or link is None or is_late or self._is_closing.is_set():
                    judge.forget(waiting.number)
                    break
                # While it is being checked, another thread reads its link.
                if judge.state == LinkState.UP:
                    self._read(judge)
        judge.on_other_answer = None
        return waiting.rows

    def _read(self, judge: Holder) -> None:
        """Read what is there while no call does."""
        try:
            judge.resume()
            if judge.receive():
                while (answer := judge.next_answer()) is not None:
                    judge.pass_over(answer)
        except (OSError, FrameError) as error:
            self._swarm.holders.fail(judge, f"failed: {error}")

    def _is_difference(self, sample: Sample, judge: Judge, rows: Rows) -> bool:
        """Compare bits where both had the same ones before, for as many rows of the layer."""
        verdict = compare_rows(sample.rows, rows).verdict
        holder, layer, count = sample.holder, sample.pairs.layer, len(rows)
        if not all(
            each is None or each.has_bits_of_model(layer, sample.chain) for each in (holder, judge)
        ):
            return is_difference(verdict, were_equal=False)
        ours, theirs = (holder.name, layer, count), (_name(judge), layer, count)
        were_equal = theirs in holder.equal_rows and (judge is None or ours in judge.equal_rows)
        if verdict == Verdict.EXACT:
            _remember(holder, theirs)
            if judge is not None:
                _remember(judge, ours)
        return is_difference(verdict, were_equal=were_equal)

    def _settle(self, sample: Sample, judge: Judge, rows: Rows, thirds: Sequence[Judge]) -> None:
        """Mark answers under way as failed, and find out who is wrong where that can be told."""
        self.counters.difference_count += 1
        self._withdraw(sample)
        where = f"for expert {sample.expert} of layer {sample.pairs.layer}"
        if judge is None:
            self._refuse(sample, {sample.holder: sample.rows}, f"{where} are not {_MODELS}", rows)
            return
        for third in thirds:
            word = self._rows_of(third, sample)
            if word is None:
                continue
            wrong = who_is_wrong(
                compare_rows(sample.rows, word).verdict,
                compare_rows(rows, word).verdict,
                is_certain=third is None,
            )
            both = {sample.holder: sample.rows, judge: rows}
            guilty = {one: both[one] for one, bad in zip(both, wrong, strict=True) if bad}
            if guilty:
                right = judge if sample.holder in guilty else sample.holder
                whose = _MODELS if third is None else f"those of {third.name} and {right.name}"
                self._refuse(sample, guilty, f"{where} are not {whose}", word)
                return
        names = " and ".join(sorted((sample.holder.name, judge.name)))
        least = compare_rows(sample.rows, rows).least_cosine
        self._tell(
            names,
            f"Workers {names} have different rows {where} (cosine {least:.6f}). Which of them is "
            "wrong nobody can tell without the whole model here or a third worker with that "
            "expert. The answers under way were marked as failed.",
        )

    def _refuse(
        self, sample: Sample, guilty: Mapping[Holder, Rows], what: str, right: Rows
    ) -> None:
        for holder, rows in guilty.items():
            complaint = f"ts rows {what} (cosine {compare_rows(rows, right).least_cosine:.6f})."
            with self._calling:
                self._swarm.holders.refuse(holder, f"I{complaint}")
            self._tell(
                holder.name,
                f"Worker {holder.name} is no longer used: i{complaint} The answers under way were "
                "marked as failed.",
            )
        # Those that began meanwhile may have used its rows, too.
        self._withdraw(sample)

    def _withdraw(self, sample: Sample) -> None:
        self._swarm.failures.withdraw(sample.pairs.layer, [sample.expert])

    def _tell(self, whose: str, sentence: str) -> None:
        """Tell something once of each holder or pair of holders."""
        _log.error("%s", sentence, extra={"worker": whose})
        if len(self._told) < _MAX_SENTENCES:
            self._told.setdefault(whose, sentence)


def _name(judge: Judge) -> str:
    return THE_MODEL if judge is None else judge.name


def _remember(holder: Holder, whose: tuple[str, int, int]) -> None:
    if len(holder.equal_rows) < _MAX_REMEMBERED:
        holder.equal_rows.add(whose)
