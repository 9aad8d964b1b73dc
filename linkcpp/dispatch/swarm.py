"""Gives every (token, expert) pair to a worker and gathers the rows: one round trip a layer.

A worker that fails, is late, or answers nonsense is left out, and its pairs go to the next holder,
at last to the fallback. Where nobody is left the request waits for a worker to come back, for
``patience_seconds``; then its rows are NaN (or what was wished), which the failures count.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from linkcpp.dispatch.admission import Admission
from linkcpp.dispatch.call import Call
from linkcpp.dispatch.checking import Checker, find_holder, find_trial
from linkcpp.dispatch.checks import RowCheck, Trial
from linkcpp.dispatch.failures import FailureLog
from linkcpp.dispatch.fallback import Fallback
from linkcpp.dispatch.holder import Holder
from linkcpp.dispatch.holders import Holders
from linkcpp.dispatch.job import Job, Token
from linkcpp.dispatch.routing import (
    NOBODY,
    HolderView,
    plan_routes,
)
from linkcpp.dispatch.spot_checks import SpotChecks
from linkcpp.dispatch.swarm_state import SwarmOptions, SwarmState
from linkcpp.dispatch.tally import RoutingTally
from linkcpp.dispatch.token_call import TokenCall
from linkcpp.worker.chain import Chain, KeyedChain
from linkcpp.worker.frames import Rows

_REPLAN_SECONDS = 1.0
_SCORE_DRIFT = 1.3


class Swarm:
    """All workers and the fallback, as one function. ``compute`` is for one thread at a time."""

    def __init__(
        self,
        expert_counts: Mapping[int, int],
        model_digest: str | None,
        fallback: Fallback | None,
        options: SwarmOptions | None = None,
        failures: FailureLog | None = None,
    ) -> None:
        self._expert_counts = dict(expert_counts)
        options = options or SwarmOptions()
        self.tally = RoutingTally(expert_counts, model_digest)
        self._chains: dict[str, KeyedChain] = {}
        self._trials: list[Trial] = []
        self._calling = threading.Lock()
        self._planned: dict[int, tuple[int, float]] = {}
        self._replan = threading.Event()
        self._is_closing = False
        self._checker = Checker(Admission(self._expert_counts, fallback), self._calling)
        check = self._checker.check_new if options.check_rows else None
        self.fallback = fallback
        self.failures = failures or FailureLog()
        self.holders = Holders(model_digest, self._replan.set, check)
        self._state = SwarmState(
            expert_counts=self._expert_counts,
            holders=self.holders,
            fallback=fallback,
            options=options,
            failures=self.failures,
            calling=self._calling,
        )
        self.counters = self._state.counters
        self.spot_checks = SpotChecks(self._state)
        self._planner = threading.Thread(target=self._keep_planning, daemon=True, name="routes")
        self._planner.start()

    def close(self) -> None:
        """End all links."""
        self._is_closing = True
        self._replan.set()
        self._planner.join()
        self.spot_checks.close()
        self.holders.close()

    def learn(self, layer: int, chain: Chain) -> KeyedChain:
        """Give a chain its number on the links, teaching it to the workers when it is new.

        Workers that hold of the layer are checked with it before they are used.
        """
        digest = chain.digest()
        known = self._chains.get(digest)
        if known is not None and Trial(layer, known) in self._trials:
            return known
        with self._calling:
            if known is None:
                known = self._chains[digest] = KeyedChain.of(len(self._chains) + 1, chain)
                self.holders.teach(len(self._chains), chain)
            trial = Trial(layer, known)
            self._trials.append(trial)
            self.holders.expect(trial)
        return known

    def check(self, name: str, layer: int, expert_count: int) -> RowCheck:
        """Compare a worker's rows for some experts of a layer with the reference, now.

        Raises:
            LinkcppError: there is no such worker, it cannot be asked, or the layer's function is
                not known yet.
        """
        holder = find_holder(self.holders.all(), name)
        trial = find_trial(self._trials, layer)
        found = self._checker.check_now(self.holders, holder, trial, expert_count)
        if found.complaint is not None:
            self.failures.withdraw(layer, found.experts)
        return found

    def missing_experts(self) -> int:
        """Count the (layer, expert) units that no worker that is up holds."""
        return sum(int((routes.chosen == NOBODY).sum()) for routes in self._state.routes.values())

    def compute(self, job: Job) -> Rows:
        """Return one row for each pair of the job, token after token."""
        self.tally.add(job.layer, job.ids)
        return self._timed(job.ids.size, lambda: self._run(job))

    def compute_guessed(
        self, guess: Token, confirm: Callable[[], Sequence[int]]
    ) -> tuple[Rows, bool]:
        """As ``compute``, asking the workers before the ids are known for sure.

        ``confirm`` asks for the real ids, and waits for them while the workers compute. Also
        returns whether the guess was right.
        """
        was_right = True

        def run() -> Rows:
            nonlocal was_right
            call = TokenCall(self._state, self.spot_checks, guess)
            was_sent = call.send()
            ids = confirm()
            self.tally.add_few(guess.layer, ids)
            was_right = list(ids) == guess.expert_ids
            if was_sent and was_right:
                return call.gather()
            call.forget()
            return self._run(guess.job(ids))

        return self._timed(len(guess.expert_ids), run), was_right

    def _run(self, job: Job) -> Rows:
        token = Token.of(job)
        if token is not None:
            call = TokenCall(self._state, self.spot_checks, token)
            if call.send():
                return call.gather()
        return Call(self._state, self.spot_checks, job).run()

    def _timed(self, pairs: int, run: Callable[[], Rows]) -> Rows:
        self.holders.settle()
        began = time.perf_counter()
        with self._calling:
            rows = run()
        self.counters.call_count += 1
        self.counters.pair_count += pairs
        self.counters.seconds += time.perf_counter() - began
        return rows

    def expert_count(self, layer: int) -> int:
        """How many experts a layer has, 0 where it has none."""
        return self._expert_counts.get(layer, 0)

    def _keep_planning(self) -> None:
        while not self._is_closing:
            was_told = self._replan.wait(_REPLAN_SECONDS)
            self._replan.clear()
            up = [
                holder
                for holder in self.holders.all()
                if holder.is_expected and not holder.is_removed and holder.welcome
            ]
            now = {holder.number: holder for holder in up}
            for number, (requests, _) in self._planned.items():
                if number in now and now[number].request_count == requests and len(up) > 1:
                    now[number].latency.forgive()
            if any(holder.is_removed for holder in self.holders.all()):
                with self._calling:
                    self.holders.retire()
            if was_told or self._has_drifted(up):
                views = [
                    HolderView(holder.number, holder.welcome.segments, holder.latency.score)
                    for holder in up
                    if holder.welcome
                ]
                self._state.routes = plan_routes(self._expert_counts, views)
                self._planned = {h.number: (h.request_count, h.latency.score) for h in up}

    def _has_drifted(self, up: list[Holder]) -> bool:
        if len(up) != len(self._planned):
            return True
        for holder in up:
            before = self._planned.get(holder.number, (0, 0.0))[1]
            low, high = sorted((before, holder.latency.score))
            if high > low * _SCORE_DRIFT:
                return True
        return False
