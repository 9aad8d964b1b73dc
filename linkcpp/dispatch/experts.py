"""The experts of a layer between two graphs of the backing server."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from linkcpp.dispatch.guessing import Guesser
from linkcpp.dispatch.job import Job, Token
from linkcpp.dispatch.program import Array, BoundCall, BoundSum, Fetch, ask, read_inputs
from linkcpp.dispatch.shared_device import SharedDevice

_log = logging.getLogger(__name__)

_COMPARED_EVERY = 4096


class EarlyResult(NamedTuple):
    """A graph's result that is known before the backing server has computed it."""

    sum: BoundSum
    data: memoryview

    def is_at(self, address: int, size_bytes: int) -> bool:
        """Tell whether it is what the client believes to be there."""
        return address == self.sum.address and size_bytes == len(self.data)


class _Guess:
    """A guessed token; ``confirm`` waits for the real ids, and for what their sum needs."""

    def __init__(
        self, token: Token, ids: Callable[[], Array], summed: Sequence[Callable[[], Array]]
    ) -> None:
        self.token = token
        self.summed: list[Array] = []
        self._ids = ids
        self._answers = summed

    def confirm(self) -> list[int]:
        """Return the real ids."""
        ids: list[int] = self._ids().ravel().tolist()
        self.summed = [answer() for answer in self._answers]
        return ids


class ExpertRunner:
    """Reads what the experts need, lets the swarm compute, puts the rows where they belong.

    ``known`` is what the client itself put at an address since its last graph.
    """

    def __init__(self, device: SharedDevice) -> None:
        self._device = device
        self._guesser = Guesser()

    def run(self, call: BoundCall, known: dict[int, bytes]) -> EarlyResult | None:
        """Have the experts computed, and queue their rows for the backing server.

        Returns what the rest of the graph will come to, where that is a sum.
        """
        device = self._device
        began = time.perf_counter()
        guess = self._guess(call, known)
        if guess is not None:
            read = began
            rows, was_right = device.swarm.compute_guessed(guess.token, guess.confirm)
            self._guesser.note(call.layer, was_right)
            summed: Sequence[Array] = guess.summed
        else:
            ids, inputs, summed = read_inputs(call, self._summed(call), device.backing, known)
            read = time.perf_counter()
            rows = device.swarm.compute(Job(call.layer, call.chain, ids, inputs))
        done = time.perf_counter()
        device.counters.read_seconds += read - began
        device.counters.swarm_seconds += done - read
        device.backing.queue(call.store_head, np.ascontiguousarray(rows).data.cast("B"))
        if not summed or call.sum is None:
            return None
        return EarlyResult(call.sum, call.sum.compute(rows, summed).data.cast("B"))

    def is_right(self, early: EarlyResult, run_count: int) -> bool:
        """Compare an early result with the backing server's, now and then; it has to be equal.

        Where it once is not, the backing server has another arithmetic (a GPU that multiplies and
        adds in one step), and nothing is answered early any more.
        """
        if run_count % _COMPARED_EVERY:
            return True
        place, counters = early.sum.result, self._device.counters
        self._device.backing.queue(place.request)
        if self._device.backing.receive(place.span_bytes) == early.data:
            return True
        counters.differing_sum_count += 1
        if counters.differing_sum_count == 1:
            _log.info("the backing server adds up rows differently: it is always waited for")
        return False

    def _summed(self, call: BoundCall) -> tuple[Fetch, ...]:
        if call.sum is None or self._device.counters.differing_sum_count:
            return ()
        return call.sum.fetches

    def _guess(self, call: BoundCall, known: dict[int, bytes]) -> _Guess | None:
        """Guess the call of one token whose row is known, and ask for the real ids."""
        fetch = call.inputs[0]
        data = known.get(fetch.key)
        if call.token_count != 1 or call.late or call.between is not None:
            return None
        if len(call.inputs) > 1 or call.chain.is_per_pair:
            return None
        if data is None or len(data) != fetch.span_bytes or not fetch.is_dense:
            return None
        count = self._device.swarm.expert_count(call.layer)
        ids = self._guesser.guess(call.layer, count, call.slot_count, known.values())
        if ids is None:
            return None
        backing = self._device.backing
        real = ask(call.ids, backing, {})
        token = Token(call.layer, call.chain, ids, data)
        return _Guess(token, real, [ask(fetch, backing, known) for fetch in self._summed(call)])
