"""What is watched in mode ``experts`` besides the workers: the dispatch process."""

import asyncio
from collections.abc import Callable

from linkcpp.common.errors import LinkcppError
from linkcpp.launch.events import Noticed
from linkcpp.launch.experts.decisions import lost_sentence
from linkcpp.launch.experts.dispatching import Dispatcher
from linkcpp.launch.experts.events import DispatchSeen
from linkcpp.launch.experts.records import ExpertsState, WorkerPhase
from linkcpp.launch.failing import BrokenError
from linkcpp.launch.watch import Emit

SILENCES_FORGIVEN = 2
# A member notices a worker that is gone by itself; this is about those that only look well.
LOOKS_FORGIVEN = 2
SERVING_SECONDS = 2.0


async def watch_dispatcher(
    dispatcher: Dispatcher,
    emit: Emit,
    experts: Callable[[], ExpertsState],
    *,
    interval: Callable[[], float],
) -> None:
    """Tell for ever what the dispatch process did, and of workers that do not answer it.

    Raises:
        BrokenError: it does not answer itself.
    """
    silences = 0
    watched = _Links(emit, experts)
    while True:
        await asyncio.sleep(min(interval(), SERVING_SECONDS))
        try:
            status = await dispatcher.status()
        except LinkcppError as error:
            silences += 1
            if silences > SILENCES_FORGIVEN:
                raise BrokenError(error.message.rstrip(".")) from None
            continue
        silences = 0
        emit(DispatchSeen(status))
        watched.look()


class _Links:
    """Workers that run and yet do not answer, stopped or overloaded, or answer what is wrong."""

    def __init__(self, emit: Emit, experts: Callable[[], ExpertsState]) -> None:
        self._emit = emit
        self._experts = experts
        self._looks: dict[int, int] = {}
        self._told: set[str] = set()

    def look(self) -> None:
        state = self._experts()
        for sentence in state.differences:
            if sentence not in self._told:
                self._told.add(sentence)
                self._emit(Noticed(sentence.rstrip(".")))
        for worker in state.workers:
            before = self._looks.get(worker.index, 0)
            is_silent = worker.phase is WorkerPhase.UP and not worker.is_linked
            now = before + 1 if is_silent else 0
            self._looks[worker.index] = now
            if now == LOOKS_FORGIVEN:
                why = worker.link_detail or "it does not answer"
                self._emit(Noticed(lost_sentence(state, worker.index, why)))
            elif before >= LOOKS_FORGIVEN and worker.is_linked:
                self._emit(Noticed(f"{worker.node_name} answers again"))
