"""Gives every (token, expert) pair to a worker and gathers the rows: one round trip a layer.

A worker that fails, is late, or answers nonsense is left out, and its pairs go to the next holder,
at last to the fallback. Where nobody is left the request waits for a worker to come back, for
``patience_seconds``; then its rows are NaN (or what was wished), which the failures count.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from linkcpp.dispatch.admission import Admission
from linkcpp.dispatch.checking import Checker, find_holder, find_trial
from linkcpp.dispatch.checks import RowCheck, Trial
from linkcpp.dispatch.failures import FailureLog
from linkcpp.dispatch.fallback import Fallback
from linkcpp.dispatch.holder import Holder, LinkState, wait_for_links
from linkcpp.dispatch.holders import Holders
from linkcpp.dispatch.job import Job
from linkcpp.dispatch.routing import (
    NOBODY,
    HolderView,
    LayerRoutes,
    Routes,
    next_holders,
    plan_routes,
)
from linkcpp.dispatch.tally import RoutingTally
from linkcpp.worker.chain import Chain, KeyedChain
from linkcpp.worker.compute import split_by_expert
from linkcpp.worker.frames import (
    Compute,
    FrameError,
    FrameType,
    Numbers,
    Rows,
    pack_compute,
    parse_error,
    parse_rows,
)

_REPLAN_SECONDS = 1.0
_SCORE_DRIFT = 1.3
_RETRY_SECONDS = 0.05
_ALL_EXPERTS = 1 << 30


@dataclass(frozen=True)
class SwarmOptions:
    """How patient to be.

    ``deadline_floor_ms``: nobody is given up earlier than that. ``patience_seconds``: how long a
    request waits where there is no other holder and no fallback; its rows are
    ``missing_value`` then. ``check_rows``: whether workers are checked before they are used.
    """

    deadline_floor_ms: float = 250.0
    patience_seconds: float = 20.0
    missing_value: float = float("nan")
    check_rows: bool = True


@dataclass(slots=True)
class SwarmCounters:
    """What happened since the start."""

    call_count: int = 0
    pair_count: int = 0
    rerouted_pair_count: int = 0
    late_count: int = 0
    nonsense_count: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Request:
    """Pairs that a worker was asked for, by their positions in the call."""

    holder: Holder
    positions: Numbers
    sent_at: float
    deadline_at: float


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
        self._options = options or SwarmOptions()
        self.fallback = fallback
        self.failures = failures or FailureLog()
        self.counters = SwarmCounters()
        self.tally = RoutingTally(expert_counts, model_digest)
        self._chains: dict[str, KeyedChain] = {}
        self._trials: list[Trial] = []
        self._next_request = 1
        self._routes: Routes = plan_routes(self._expert_counts, [])
        self._calling = threading.Lock()
        self.hopeless_routes: Routes | None = None
        self._planned: dict[int, tuple[int, float]] = {}
        self._replan = threading.Event()
        self._is_closing = False
        self._checker = Checker(Admission(self._expert_counts, fallback), self._calling)
        check = self._checker.check_new if self._options.check_rows else None
        self.holders = Holders(model_digest, self._replan.set, check)
        self._planner = threading.Thread(target=self._keep_planning, daemon=True, name="routes")
        self._planner.start()

    def close(self) -> None:
        """End all links."""
        self._is_closing = True
        self._replan.set()
        self._planner.join()
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
        return self._checker.check_now(self.holders, holder, trial, expert_count)

    def chain_number(self, chain: KeyedChain) -> int:
        """Return the number that ``learn`` gave."""
        assert isinstance(chain.key, int)  # noqa: S101 - made by ``learn``
        return chain.key

    def missing_experts(self) -> int:
        """Count the (layer, expert) units that no worker that is up holds."""
        return sum(int((routes.chosen == NOBODY).sum()) for routes in self._routes.values())

    def compute(self, job: Job) -> Rows:
        """Return one row for each pair of the job, token after token."""
        self.holders.settle()
        began = time.perf_counter()
        with self._calling:
            rows = _Call(self, job).run()
        self.tally.add(job.layer, job.ids)
        self.counters.call_count += 1
        self.counters.pair_count += job.ids.size
        self.counters.seconds += time.perf_counter() - began
        return rows

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
                self._routes = plan_routes(self._expert_counts, views)
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

    def _routes_of(self, layer: int) -> LayerRoutes:
        return self._routes[layer]

    def _request_number(self) -> int:
        self._next_request = self._next_request % 0xFFFFFFFF + 1
        return self._next_request


class _Call:
    """One job on its way."""

    def __init__(self, swarm: Swarm, job: Job) -> None:
        self._swarm = swarm
        self._job = job
        self._chain_number = swarm.chain_number(job.chain)
        self._flat = job.ids.reshape(-1)
        self._result = np.empty((len(self._flat), job.chain.output_width), np.float32)
        self._pending: dict[int, _Request] = {}
        self._excluded: set[int] = set()
        self._orphans: list[Numbers] = []
        self._give_up_at = 0.0

    def run(self) -> Rows:
        positions = np.arange(len(self._flat), dtype=np.int32)
        owners = self._swarm._routes_of(self._job.layer).chosen[self._flat]
        self._ask(positions, owners)
        while True:
            self._rescue()
            if not self._pending:
                if not self._orphans:
                    return self._result
                self._wait_for_somebody()
                continue
            self._gather()

    def _ask(self, positions: Numbers, owners: Numbers) -> None:
        """Send pairs to their owners; those of a holder that is not there are asked elsewhere."""
        for number in sorted(set(owners.tolist())):
            chosen = positions[owners == number]
            holder = self._swarm.holders.get(number) if number != NOBODY else None
            if holder is None:
                if number != NOBODY:
                    self._reroute(chosen, number)
                else:
                    self._orphans.append(chosen)
            elif holder.state != LinkState.UP or holder.is_removed:
                self._reroute(chosen, number)
            else:
                self._send(holder, chosen)

    def _reroute(self, positions: Numbers, failed: int) -> None:
        self._excluded.add(failed)
        self._swarm.counters.rerouted_pair_count += len(positions)
        routes = self._swarm._routes_of(self._job.layer)
        self._ask(positions, next_holders(routes, self._flat[positions], self._excluded))

    def _send(self, holder: Holder, positions: Numbers) -> None:
        assert holder.welcome is not None  # noqa: S101 - set before a holder is up
        limits = holder.welcome.limits
        most = max(1, min(limits.pairs, limits.rows, limits.frame_bytes // self._pair_bytes()))
        parts = [positions]
        if len(positions) > most:
            split = split_by_expert(self._flat[positions], most, _ALL_EXPERTS)
            parts = [np.sort(positions[part]) for part in split]
        for part in parts:
            number = self._swarm._request_number()
            now = time.monotonic()
            floor = self._swarm._options.deadline_floor_ms
            wait = holder.latency.deadline_ms(len(part), floor) / 1000
            self._pending[number] = _Request(holder, part, now, now + wait)
            compute = Compute(self._chain_number, self._job.pairs(part))
            try:
                holder.send(pack_compute(number, compute))
            except OSError as error:
                self._drop(holder, f"cannot be sent to: {error}")
                return
            holder.request_count += 1

    def _pair_bytes(self) -> int:
        widths = sum(self._job.chain.input_widths)
        return 4 * max(widths + 2, self._job.chain.output_width + 8)

    def _drop(self, holder: Holder, why: str) -> None:
        """Do without a holder, and ask others for all that it still owes."""
        self._swarm.holders.fail(holder, why)
        lost = [number for number, r in self._pending.items() if r.holder is holder]
        for number in lost:
            self._reroute(self._pending.pop(number).positions, holder.number)

    def _rescue(self) -> None:
        """Let the fallback compute what nobody holds, while the workers compute the rest."""
        fallback = self._swarm.fallback
        if not self._orphans or fallback is None or fallback.failure is not None:
            return
        orphans = np.sort(np.concatenate(self._orphans))
        rows = fallback.compute(self._job.chain, self._job.pairs(orphans))
        if rows is not None:
            self._result[orphans] = rows
            self._orphans = []

    def _wait_for_somebody(self) -> None:
        """Wait for a holder to come back; out of patience, the call has failed."""
        now = time.monotonic()
        patience = self._swarm._options.patience_seconds
        self._give_up_at = self._give_up_at or now + patience
        orphans = np.sort(np.concatenate(self._orphans))
        self._orphans = []
        routes = self._swarm._routes
        if now < self._give_up_at and routes is not self._swarm.hopeless_routes:
            time.sleep(_RETRY_SECONDS)
            self._excluded.clear()
            owners = self._swarm._routes_of(self._job.layer).chosen[self._flat[orphans]]
            self._ask(orphans, owners)
            return
        # Until the routes change, nobody needs to wait again.
        self._swarm.hopeless_routes = routes
        self._result[orphans] = self._swarm._options.missing_value
        self._swarm.failures.note(self._job.layer, self._flat[orphans])

    def _gather(self) -> None:
        """Wait for answers until the nearest deadline and take what came."""
        now = time.monotonic()
        nearest = min(request.deadline_at for request in self._pending.values())
        asked = list({id(r.holder): r.holder for r in self._pending.values()}.values())
        for holder in wait_for_links(asked, max(nearest - now, 0) * 1000 + 1):
            try:
                holder.resume()
                if holder.receive():
                    self._take_frames(holder)
            except (OSError, FrameError) as error:
                self._drop(holder, f"failed: {error}")
        self._check_deadlines()

    def _take_frames(self, holder: Holder) -> None:
        while (frame := holder.next_frame()) is not None:
            header, payload = frame
            request = self._pending.get(header.request_id)
            if header.kind == FrameType.ERROR:
                error = parse_error(payload)
                if request is not None or header.request_id == 0:
                    raise error
                continue
            if request is None or request.holder is not holder:
                continue
            if header.kind != FrameType.ROWS:
                continue
            shape = (len(request.positions), self._job.chain.output_width)
            answer = parse_rows(payload, shape)
            if not np.isfinite(answer.rows).all() and self._inputs_are_finite():
                self._swarm.counters.nonsense_count += 1
                raise ConnectionError("it answered rows that are not finite")
            self._result[request.positions] = answer.rows
            del self._pending[header.request_id]
            holder.has_answered = True
            took = time.monotonic() - request.sent_at
            holder.latency.observe(len(request.positions), took * 1000)
            holder.pair_count += len(request.positions)
            holder.worker_seconds += answer.compute_us / 1e6
            holder.waited_seconds += took

    def _inputs_are_finite(self) -> bool:
        return all(bool(np.isfinite(values).all()) for values in self._job.inputs)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        late = [request for request in self._pending.values() if request.deadline_at <= now]
        for request in late:
            if not self._has_alternative(request):
                # Nobody else could do it: keep waiting, up to the end of patience.
                limit = request.sent_at + self._swarm._options.patience_seconds
                if now < limit:
                    request.deadline_at = limit
                    continue
            if request.holder.state != LinkState.UP:
                continue
            self._swarm.counters.late_count += 1
            waited_ms = (now - request.sent_at) * 1000
            request.holder.latency.observe_miss(len(request.positions), waited_ms)
            self._drop(request.holder, f"did not answer within {waited_ms:.0f} ms")

    def _has_alternative(self, request: _Request) -> bool:
        fallback = self._swarm.fallback
        if fallback is not None and fallback.failure is None:
            return True
        routes = self._swarm._routes_of(self._job.layer)
        excluded = self._excluded | {request.holder.number}
        others = next_holders(routes, self._flat[request.positions], excluded)
        return bool((others != NOBODY).all())
