"""One call of the experts of a layer: pairs to their owners, rows back, and what to do without.

A worker that fails, is late, or answers nonsense is left out, and its pairs go to the next holder,
at last to the fallback.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from linkcpp.dispatch.holder import Holder, LinkState, next_request_number, wait_for_links
from linkcpp.dispatch.job import Job
from linkcpp.dispatch.routing import NOBODY, next_holders
from linkcpp.dispatch.spot_checks import SpotChecks
from linkcpp.dispatch.swarm_state import SwarmState
from linkcpp.worker.compute import split_by_expert
from linkcpp.worker.frames import FrameError, Numbers, Rows

_RETRY_SECONDS = 0.05
_ALL_EXPERTS = 1 << 30


@dataclass(slots=True)
class Request:
    """Pairs that a worker was asked for, by their positions in the call."""

    holder: Holder
    positions: Numbers
    sent_at: float
    deadline_at: float


def all_finite(values: Rows) -> bool:
    """Tell whether there is no infinity and no NaN."""
    flat = values.reshape(-1)
    # One product is much faster than a test of each element; it may overflow, but not hide one.
    return math.isfinite(flat.dot(flat)) or bool(np.isfinite(flat).all())


class Call:
    """One job on its way."""

    def __init__(self, swarm: SwarmState, spot_checks: SpotChecks, job: Job) -> None:
        self._swarm = swarm
        self._spot_checks = spot_checks
        self._job = job
        self._flat = job.ids.reshape(-1)
        self._result = np.empty((len(self._flat), job.chain.output_width), np.float32)
        self._pending: dict[int, Request] = {}
        self._excluded: set[int] = set()
        self._orphans: list[Numbers] = []
        self._give_up_at = 0.0

    def run(self) -> Rows:
        """Return one row for each pair."""
        positions = np.arange(len(self._flat), dtype=np.int32)
        owners = self._swarm.routes_of(self._job.layer).chosen[self._flat]
        self._ask(positions, owners)
        return self._finish()

    def take_over(self, result: Rows, requests: Sequence[tuple[int, Request]]) -> Rows:
        """Go on where some rows are there and the rest was asked for; returns as ``run``."""
        self._result = result
        floor = self._swarm.options.deadline_floor_ms
        for number, request in requests:
            wait = request.holder.latency.deadline_ms(len(request.positions), floor) / 1000
            request.deadline_at = request.sent_at + wait
            self._pending[number] = request
        for holder in [r.holder for _, r in requests if r.holder.state != LinkState.UP]:
            self._ask_others(holder)
        return self._finish()

    def _finish(self) -> Rows:
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
        routes = self._swarm.routes_of(self._job.layer)
        self._ask(positions, next_holders(routes, self._flat[positions], self._excluded))

    def _send(self, holder: Holder, positions: Numbers) -> None:
        most = holder.max_pairs(self._job.chain)
        parts = [positions]
        if len(positions) > most:
            split = split_by_expert(self._flat[positions], most, _ALL_EXPERTS)
            parts = [np.sort(positions[part]) for part in split]
        for part in parts:
            number = next_request_number()
            now = time.monotonic()
            floor = self._swarm.options.deadline_floor_ms
            wait = holder.latency.deadline_ms(len(part), floor) / 1000
            self._pending[number] = Request(holder, part, now, now + wait)
            try:
                holder.ask(number, self._job.chain, self._job.pairs(part))
            except (OSError, FrameError) as error:
                self._drop(holder, f"cannot be asked: {error}")
                return
            holder.request_count += 1

    def _drop(self, holder: Holder, why: str) -> None:
        """Do without a holder, and ask others for all that it still owes."""
        self._swarm.holders.fail(holder, why, self._job.layer)
        self._ask_others(holder)

    def _ask_others(self, holder: Holder) -> None:
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
        patience = self._swarm.options.patience_seconds
        self._give_up_at = self._give_up_at or now + patience
        orphans = np.sort(np.concatenate(self._orphans))
        self._orphans = []
        routes = self._swarm.routes
        if now < self._give_up_at and routes is not self._swarm.hopeless_routes:
            self._swarm.holders.hurry()
            self._swarm.pause(_RETRY_SECONDS)
            self._excluded.clear()
            owners = self._swarm.routes_of(self._job.layer).chosen[self._flat[orphans]]
            self._ask(orphans, owners)
            return
        # Until the routes change, nobody needs to wait again.
        self._swarm.hopeless_routes = routes
        self._result[orphans] = self._swarm.options.missing_value
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
                    self._take_answers(holder)
            except (OSError, FrameError) as error:
                self._drop(holder, f"failed: {error}")
        self._check_deadlines()

    def _take_answers(self, holder: Holder) -> None:
        while (answer := holder.next_answer()) is not None:
            request = self._pending.get(answer.request_id)
            if request is None or request.holder is not holder:
                holder.pass_over(answer)
                continue
            shape = (len(request.positions), self._job.chain.output_width)
            rows = np.frombuffer(answer.rows, np.float32).reshape(shape)
            if not all_finite(rows) and self._inputs_are_finite():
                self._swarm.counters.nonsense_count += 1
                raise ConnectionError("it answered rows that are not finite")
            self._result[request.positions] = rows
            del self._pending[answer.request_id]
            took = time.monotonic() - request.sent_at
            holder.note_answer(len(request.positions), took, answer.compute_us)
            self._spot_checks.sample_job(holder, self._job, request.positions, self._result)

    def _inputs_are_finite(self) -> bool:
        return all(map(all_finite, self._job.inputs))

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        late = [request for request in self._pending.values() if request.deadline_at <= now]
        for request in late:
            if not self._has_alternative(request):
                # Nobody else could do it: keep waiting, up to the end of patience.
                limit = request.sent_at + self._swarm.options.patience_seconds
                if now < limit:
                    request.deadline_at = limit
                    continue
            if request.holder.state != LinkState.UP:
                continue
            self._swarm.counters.late_count += 1
            waited_ms = (now - request.sent_at) * 1000
            request.holder.latency.observe_miss(len(request.positions), waited_ms)
            self._drop(request.holder, f"did not answer within {waited_ms:.0f} ms")

    def _has_alternative(self, request: Request) -> bool:
        fallback = self._swarm.fallback
        if fallback is not None and fallback.failure is None:
            return True
        routes = self._swarm.routes_of(self._job.layer)
        excluded = self._excluded | {request.holder.number}
        others = next_holders(routes, self._flat[request.positions], excluded)
        return bool((others != NOBODY).all())
