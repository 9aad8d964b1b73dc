"""The experts of a layer between two graphs of the backing server."""

import time
from typing import TYPE_CHECKING

import numpy as np

from linkcpp.dispatch.guessing import Guesser
from linkcpp.dispatch.job import Job
from linkcpp.dispatch.program import BoundCall, read_inputs
from linkcpp.dispatch.token_call import is_simple
from linkcpp.worker.frames import Numbers

if TYPE_CHECKING:
    from linkcpp.dispatch.device import VirtualDevice


class ExpertRunner:
    """Reads what the experts need, lets the swarm compute, puts the rows where they belong.

    ``known`` is what the client itself put at an address since its last graph.
    """

    def __init__(self, device: "VirtualDevice") -> None:
        self._device = device
        self._guesser = Guesser()

    def run(self, call: BoundCall, known: dict[int, bytes]) -> None:
        """Have the experts computed, and queue their rows for the backing server."""
        device = self._device
        began = time.perf_counter()
        guess = self._guess(call, known)
        if guess is not None:
            read = began
            rows, was_right = device.swarm.compute_guessed(
                guess, device.backing.flush, lambda: self._real_ids(call)
            )
            self._guesser.note(call.layer, was_right)
        else:
            ids, inputs = read_inputs(call, device.backing, known)
            read = time.perf_counter()
            rows = device.swarm.compute(Job(call.layer, call.chain, ids, inputs))
        done = time.perf_counter()
        device.counters.read_seconds += read - began
        device.counters.swarm_seconds += done - read
        device.backing.queue(call.store_head, np.ascontiguousarray(rows).data.cast("B"))

    def _guess(self, call: BoundCall, known: dict[int, bytes]) -> Job | None:
        """Guess the call of one token whose row is known, and ask for the real ids."""
        fetch = call.inputs[0]
        data = known.get(fetch.key)
        if call.token_count != 1 or call.late or call.between is not None:
            return None
        if data is None or len(data) != fetch.span_bytes or not fetch.is_dense:
            return None
        count = self._device.swarm.expert_count(call.layer)
        ids = self._guesser.guess(call.layer, count, call.slot_count, known.values())
        if ids is None:
            return None
        guess = Job(call.layer, call.chain, ids, (fetch.view(data).reshape(-1, fetch.shape[0]),))
        if len(call.inputs) > 1 or not is_simple(guess):
            return None
        self._device.backing.queue(call.ids.request)
        return guess

    def _real_ids(self, call: BoundCall) -> Numbers:
        data = self._device.backing.receive(call.ids.span_bytes)
        return call.ids.view(data).reshape(call.token_count, call.slot_count)
