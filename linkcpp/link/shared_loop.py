"""An event loop for a program whose threads block: whoever waits for its link runs it meanwhile.

A thread of its own for the event loop would have to be woken for each message and to wake the
thread that waits for it, which costs more than all that a link does to the message. Here the thread
that waits runs the loop itself, and a caretaker runs it while nobody waits, so that pings are
answered and lost paths replaced.
"""

import asyncio
import contextlib
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from linkcpp.common.closing import Closing

T = TypeVar("T")

# Between two steps of a computation the loop stays with the thread that computes: the caretaker
# would be woken by each message only to see that it is not needed.
_RECENT_SECONDS = 0.2
_TICK_SECONDS = 0.05
_ROUNDS = 3


class SharedLoop(Closing):
    """One event loop. Everything of it is used inside ``turn`` only, or by what runs in it."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self.loop = asyncio.SelectorEventLoop(self._selector)
        self._have_turn = self._Turn(self)
        self._turn = threading.Lock()
        self._line = threading.Lock()
        self._used_at = time.monotonic()
        self._is_closed = False
        # Whether the caretaker runs it now, and no user sees what happens.
        self.is_cared_for = False
        self._caretaker = threading.Thread(target=self._care, daemon=True)
        self._caretaker.start()

    def fileno(self) -> int:
        """What ``poll`` can wait for: readable when the loop has something to do."""
        return self._selector.fileno()

    def turn(self) -> "SharedLoop._Turn":
        """Have the loop for oneself, with ``with``; it runs only when its ``run_…`` is called."""
        return self._have_turn

    class _Turn:
        def __init__(self, shared: "SharedLoop") -> None:
            self._shared = shared

        def __enter__(self) -> asyncio.AbstractEventLoop:
            shared = self._shared
            shared._used_at = time.monotonic()
            if shared._line.locked() or not shared._turn.acquire(blocking=False):
                # In line: whoever has the turn gives it to the first who waits, not to itself.
                with shared._line:
                    with contextlib.suppress(RuntimeError):  # closed meanwhile
                        shared.loop.call_soon_threadsafe(shared.loop.stop)
                    shared._turn.acquire()
            return shared.loop

        def __exit__(self, *_: object) -> None:
            self._shared._turn.release()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end; raises what it raises."""
        with self.turn() as loop:
            return self._finish(loop.create_task(work))

    def act(self, work: Callable[[], T]) -> T:
        """Call what belongs into the loop without running it; inside ``turn``."""
        # What it makes, tasks and timers, finds its loop by this; the loop does the same.
        asyncio._set_running_loop(self.loop)
        try:
            return work()
        finally:
            asyncio._set_running_loop(None)

    def step(self) -> None:
        """Do what there is to do now; inside ``turn``."""
        # What a first round makes ready is done in the next ones: ``poll`` does not tell of it.
        for _ in range(_ROUNDS):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    def run_until_stopped(self, seconds: float) -> None:
        """Run until something in the loop stops it, or for so long; inside ``turn``."""
        timer = self.loop.call_later(seconds, self.loop.stop)
        self.loop.run_forever()
        timer.cancel()

    def close(self) -> None:
        """End all that runs in the loop, and the loop; also fine when it is closed already."""
        if self._is_closed:
            return
        with self.turn() as loop:
            self._is_closed = True
            self._finish(loop.create_task(_end_all()))
        self._caretaker.join()
        self.loop.close()

    def _finish(self, task: "asyncio.Task[T]") -> T:
        task.add_done_callback(lambda _: self.loop.stop())
        # Whoever wanted a turn just before this one may stop the loop once more.
        while not task.done():
            self.loop.run_forever()
        return task.result()

    def _care(self) -> None:
        while not self._is_closed:
            is_used = time.monotonic() - self._used_at < _RECENT_SECONDS
            if is_used:
                time.sleep(_TICK_SECONDS)
            if not self._turn.acquire(blocking=not is_used):
                continue
            try:
                if self._is_closed:
                    return
                self.is_cared_for = True
                if is_used or self._line.locked():
                    self.step()
                else:  # until a turn is wanted
                    self.loop.run_forever()
            finally:
                self.is_cared_for = False
                self._turn.release()


async def _end_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()
