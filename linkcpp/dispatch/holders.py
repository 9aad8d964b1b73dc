"""Links to holders: opened in threads, proved by a maintenance thread, used by the dispatching one.

A link that fails, or is late, is closed at once, and opened again until the worker answers, so a
worker that comes back is used again. Opening waits for strangers, so each has a thread of its own:
workers that are silent delay nobody. Before a link is up, and whenever a layer's chain becomes
known, the maintenance thread has the worker's rows checked; one whose rows are wrong is refused.
While a link is up only who holds the lock of dispatching touches its socket, while it is opened
only that thread, else only the maintenance thread.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from linkcpp.common.errors import LinkcppError
from linkcpp.dispatch.checks import RowCheck, Trial
from linkcpp.dispatch.holder import FIRST_RETRY_SECONDS, Holder, LinkState
from linkcpp.dispatch.worker_holder import WorkerHolder
from linkcpp.link.introduced import DialledEnd
from linkcpp.worker.chain import Chain
from linkcpp.worker.frames import FrameError

_log = logging.getLogger(__name__)

_MAX_RETRY_SECONDS = 10.0
_MAX_OPENING = 16
# A worker whose rows were wrong is given another chance, since it may be another process then.
_REFUSED_SECONDS = 60.0
# One that was wrong while it was used gets it ever later: it passes what it is asked at its start.
_REFUSED_AGAIN_FACTOR = 10
_MAX_REFUSED_SECONDS = 86_400.0


class RowsRefusedError(LinkcppError):
    """A worker's rows are wrong, so it must not be used."""


class Address(Protocol):
    """How to reach a holder."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    def holder(self, number: int) -> Holder:
        """Make the holder with this number."""
        ...


Check = Callable[["Holders", Holder, Trial, Sequence[Holder]], RowCheck]
"""Compares a worker's rows; the others are those whose link is open. Raises as ``ask_alone``."""


class Holders:
    """All holders. ``on_change`` is called, from any thread, when one comes or goes.

    Without ``check`` every worker is used that greets well.
    """

    def __init__(
        self, model_digest: str | None, on_change: Callable[[], None], check: Check | None = None
    ) -> None:
        self._model_digest = model_digest
        self._on_change = on_change
        self._check = check
        self._trials: list[Trial] = []
        self._lock = threading.Lock()
        self._settled = threading.Condition(self._lock)
        self._unsettled: list[Holder] = []
        self._wake = threading.Event()
        self._holders: dict[int, Holder] = {}
        self._chains: list[tuple[int, Chain]] = []
        self._next_number = 0
        self._is_closing = False
        self._opening: set[int] = set()
        self._thread = threading.Thread(target=self._maintain, daemon=True, name="links")
        self._thread.start()

    def all(self) -> list[Holder]:
        """Return every worker, up or not."""
        with self._lock:
            return list(self._holders.values())

    def get(self, number: int) -> Holder | None:
        """Return a worker by its number."""
        return self._holders.get(number)

    def add(self, address: Address) -> Holder:
        """Take a holder in; it is used once it answers.

        Raises:
            LinkcppError: there is one of that name.
        """
        with self._lock:
            if any(holder.name == address.name for holder in self._holders.values()):
                raise LinkcppError(f"There is a worker {address.name} already.")
            holder = address.holder(self._next_number)
            self._next_number += 1
            self._holders[holder.number] = holder
        self._wake.set()
        return holder

    def change_link(self, name: str, link: DialledEnd) -> None:
        """Take other ways to a worker from now on; fine where it is gone."""
        with self._lock:
            named = [holder for holder in self._holders.values() if holder.name == name]
        for holder in named:
            if isinstance(holder, WorkerHolder):
                holder.change_link(link)

    def remove(self, name: str) -> None:
        """Do without a worker from now on.

        Raises:
            LinkcppError: there is none of that name.
        """
        with self._lock:
            for holder in self._holders.values():
                if holder.name == name:
                    holder.is_removed = True
                    self._settled.notify_all()
                    break
            else:
                raise LinkcppError(f"There is no worker {name}.")
        self._on_change()

    def retire(self) -> None:
        """Close the links of workers that were removed; while nobody is being asked."""
        with self._lock:
            for holder in [entry for entry in self._holders.values() if entry.is_removed]:
                if holder.state == LinkState.UP:
                    holder.end()
                    holder.state = LinkState.CONNECTING
                    del self._holders[holder.number]
        self._wake.set()

    def teach(self, chain_id: int, chain: Chain) -> None:
        """Send a chain to every worker that is up, and to all that come later."""
        with self._lock:
            self._chains.append((chain_id, chain))
            up = [holder for holder in self._holders.values() if holder.state == LinkState.UP]
        for holder in up:
            try:
                holder.teach(chain_id, chain)
                holder.taught_count += 1
            except OSError as error:
                self.fail(holder, str(error))

    def expect(self, trial: Trial) -> None:
        """Have every worker that holds of the layer checked before it is used again."""
        if self._check is None:
            return
        with self._lock:
            self._trials.append(trial)
            for holder in self._holders.values():
                if holder.state == LinkState.UP and not holder.has_passed(trial):
                    holder.state, holder.is_rechecked = LinkState.CHECKING, True
                    self._unsettled.append(holder)
        self._wake.set()

    def settle(self) -> None:
        """Wait until no worker is being checked because of ``expect``."""
        if not self._unsettled:
            return
        with self._settled:
            self._settled.wait_for(
                lambda: self._is_closing or not any(map(_is_checked, self._unsettled))
            )
            self._unsettled = []

    def hurry(self) -> None:
        """Try links that failed soon, however often they did: a call waits for somebody."""
        soon = time.monotonic() + FIRST_RETRY_SECONDS
        with self._lock:
            for holder in self._holders.values():
                if holder.state == LinkState.CONNECTING and holder.retry_at > soon:
                    holder.retry_at = soon
        self._wake.set()

    def fail(self, holder: Holder, why: str, layer: int | None = None) -> None:
        """Close a link that failed and let the maintenance thread try again.

        ``layer`` is the one whose rows it was asked for.
        """
        with self._lock:
            if holder.state == LinkState.UP:
                self._set_back(holder, why, LinkState.CONNECTING, layer)

    def refuse(self, holder: Holder, why: str) -> None:
        """Do without a worker whose rows are wrong, for a good while, and longer each time."""
        with self._lock:
            if holder.state == LinkState.UP:
                pause = _REFUSED_SECONDS * _REFUSED_AGAIN_FACTOR**holder.refusal_count
                holder.refusal_count = min(holder.refusal_count + 1, 4)
                pause = min(pause, _MAX_REFUSED_SECONDS)
                self._set_back(holder, why, LinkState.REFUSED, pause_seconds=pause)

    def _set_back(
        self,
        holder: Holder,
        why: str,
        state: LinkState,
        layer: int | None = None,
        pause_seconds: float | None = None,
    ) -> None:
        """Close a link that was open; the caller holds the lock."""
        if state == LinkState.REFUSED:
            # What it has may be what is wrong.
            holder.end()
        else:
            holder.close()
        holder.state = state
        holder.is_rechecked = False
        holder.failure_count += 1
        holder.detail = why
        if holder.has_answered:
            holder.retry_seconds = FIRST_RETRY_SECONDS
        else:
            # It greets well but never answers: it may cost a deadline ever more seldom.
            holder.retry_seconds = min(2 * holder.retry_seconds, _MAX_RETRY_SECONDS)
        holder.retry_at = time.monotonic() + (pause_seconds or holder.retry_seconds)
        told = {"layer": layer, "reason": why}
        _log.warning("worker %s: %s", holder.name, why, extra=_fields(holder) | told)
        self._on_change()
        self._wake.set()

    def close(self) -> None:
        """End all links."""
        self._is_closing = True
        self._wake.set()
        with self._settled:
            self._settled.notify_all()
        self._thread.join()
        for holder in self.all():
            holder.end()

    def _maintain(self) -> None:
        while not self._is_closing:
            now = time.monotonic()
            wait = _MAX_RETRY_SECONDS
            checking = []
            for holder in self.all():
                if holder.state == LinkState.UP or holder.number in self._opening:
                    continue
                if holder.is_removed:
                    self._drop(holder)
                elif holder.state == LinkState.CHECKING:
                    checking.append(holder)
                elif holder.retry_at > now:
                    wait = min(wait, holder.retry_at - now)
                elif len(self._opening) < _MAX_OPENING:
                    holder.retry_at = now + FIRST_RETRY_SECONDS
                    self._opening.add(holder.number)
                    opening = threading.Thread(target=self._open, args=(holder,), daemon=True)
                    opening.start()
            for holder in checking:
                self._have_checked(holder)
            if not checking:
                self._wake.wait(wait)
                self._wake.clear()

    def _drop(self, holder: Holder) -> None:
        with self._settled:
            self._holders.pop(holder.number, None)
            holder.end()
            holder.state = LinkState.CONNECTING
            self._settled.notify_all()

    def _have_checked(self, holder: Holder) -> None:
        try:
            while (trial := self._next_trial(holder)) is not None:
                self._prove(holder, trial)
        except (OSError, FrameError, RowsRefusedError) as error:
            self.give_up(holder, error)
        with self._settled:
            self._settled.notify_all()

    def _open(self, holder: Holder) -> None:
        try:
            self._connect(holder)
        finally:
            if self._is_closing:
                holder.end()
            self._opening.discard(holder.number)
            self._wake.set()

    def _connect(self, holder: Holder) -> None:
        taught = list(self._chains)
        try:
            holder.open(taught, self._model_digest)
        except (OSError, FrameError) as error:
            is_refusal = isinstance(error, FrameError)
            holder.detail = error.message if isinstance(error, FrameError) else str(error)
            holder.retry_at = time.monotonic() + holder.retry_seconds
            holder.retry_seconds = min(2 * holder.retry_seconds, _MAX_RETRY_SECONDS)
            holder.state = LinkState.REFUSED if is_refusal else LinkState.CONNECTING
            return
        holder.taught_count = len(taught)
        holder.checks = {}
        holder.equal_rows = set()
        holder.has_answered = False
        # What was measured before it failed says little of what it is now.
        holder.latency.score = 0.0
        holder.state, holder.detail = LinkState.CHECKING, "its rows are being checked"

    def _next_trial(self, holder: Holder) -> Trial | None:
        """Return what has to be proved yet; the link is up where that is nothing."""
        if holder.state != LinkState.CHECKING or holder.is_removed or self._is_closing:
            return None
        with self._lock:
            # Chains learned meanwhile: the socket takes them without waiting.
            for chain_id, chain in self._chains[holder.taught_count :]:
                holder.teach(chain_id, chain)
                holder.taught_count += 1
            for trial in self._trials:
                if not holder.has_passed(trial):
                    return trial
            holder.state, holder.detail, holder.is_rechecked = LinkState.UP, "", False
        _log.info("worker %s is up", holder.name, extra=_fields(holder))
        self._on_change()
        return None

    def _prove(self, holder: Holder, trial: Trial) -> None:
        assert self._check is not None  # noqa: S101 - else there are no trials
        others = [
            other
            for other in self.all()
            if other is not holder and other.link is not None and not other.is_removed
        ]
        check = self._check(self, holder, trial, others)
        holder.checks[trial.layer, trial.chain.key] = check
        if check.complaint is not None:
            raise RowsRefusedError(f"{check.complaint[0].upper()}{check.complaint[1:]}.")

    def give_up(self, holder: Holder, error: OSError | FrameError | RowsRefusedError) -> None:
        """Close a link that failed while it was checked; for the maintenance thread."""
        why = error.message if isinstance(error, LinkcppError) else str(error)
        with self._lock:
            if holder.state != LinkState.CHECKING:
                return
            is_wrong = isinstance(error, RowsRefusedError)
            is_refusal = isinstance(error, LinkcppError)
            self._set_back(
                holder,
                why,
                LinkState.REFUSED if is_refusal else LinkState.CONNECTING,
                pause_seconds=_REFUSED_SECONDS if is_wrong else None,
            )
            self._settled.notify_all()


def _fields(holder: Holder) -> dict[str, object]:
    """Say of whom a line of the log is, for machines that read it."""
    return {"worker": holder.name, "state": holder.state.value}


def _is_checked(holder: Holder) -> bool:
    return holder.state == LinkState.CHECKING and not holder.is_removed
