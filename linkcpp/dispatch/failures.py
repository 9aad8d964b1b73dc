"""Calls whose rows nobody could compute or are in doubt: counted where others see it at once.

The counter lies in a file that both map into memory. It is raised before rows that nobody could
compute go to llama-server, so whoever reads it after a token that came of such rows sees that it
was raised. Where rows are found to be wrong they have gone already: then it is raised at once.
"""

import logging
import mmap
import struct
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import write_atomically
from linkcpp.worker.frames import Numbers

_log = logging.getLogger(__name__)

_COUNT = struct.Struct("=Q")
_REMEMBERED = 64


class FailedExperts(NamedTuple):
    """The experts of one layer that a call needed and nobody had, or whose rows are in doubt."""

    layer: int
    experts: tuple[int, ...]
    are_in_doubt: bool = False


class FailureCounter:
    """The counter in a file, which goes on over restarts of its one writer.

    Raises:
        LinkcppError: the file is not there, or is none of a counter.
    """

    def __init__(self, path: Path, *, is_writer: bool = False) -> None:
        try:
            if is_writer and not (path.is_file() and path.stat().st_size == _COUNT.size):
                write_atomically(path, _COUNT.pack(0), mode=0o600)
            with path.open("r+b" if is_writer else "rb") as file:
                access = mmap.ACCESS_WRITE if is_writer else mmap.ACCESS_READ
                self._memory = mmap.mmap(file.fileno(), _COUNT.size, access=access)
        except (OSError, ValueError) as error:
            raise LinkcppError(f"The counter of failures {path} cannot be used: {error}.") from None

    @property
    def value(self) -> int:
        """How many calls have failed."""
        return int(_COUNT.unpack_from(self._memory)[0])

    def raise_by_one(self) -> None:
        """Count one more; for the one process that writes."""
        _COUNT.pack_into(self._memory, 0, self.value + 1)


class FailureLog:
    """What failed since the start; ``path`` is where the counter goes, if anybody looks at it."""

    def __init__(self, path: Path | None = None) -> None:
        self._counter = FailureCounter(path, is_writer=True) if path else None
        # Calls fail in the dispatching thread, rows are compared in another one.
        self._lock = threading.Lock()
        self.call_count = 0
        self.pair_count = 0
        self.recent: deque[FailedExperts] = deque(maxlen=_REMEMBERED)

    def note(self, layer: int, expert_ids: Numbers) -> None:
        """Take note of pairs that nobody could compute."""
        self.call_count += 1
        self.pair_count += len(expert_ids)
        missing = FailedExperts(layer, tuple(sorted(set(expert_ids.tolist()))))
        self._fail(missing)
        _log.error(
            "layer %d: nobody has the experts %s",
            layer,
            missing.experts,
            extra={"layer": layer, "experts": missing.experts},
        )

    def withdraw(self, layer: int, experts: Iterable[int]) -> None:
        """Mark all answers under way as failed: rows of these experts are in doubt."""
        self._fail(FailedExperts(layer, tuple(experts), are_in_doubt=True))

    def _fail(self, failed: FailedExperts) -> None:
        with self._lock:
            # What it is comes first: who sees the counter raised asks for that.
            self.recent.append(failed)
            if self._counter is not None:
                self._counter.raise_by_one()
