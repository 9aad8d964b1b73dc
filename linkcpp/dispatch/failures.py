"""Calls whose rows nobody could compute: counted where another process sees it at once.

The counter lies in a file that both map into memory. It is raised before the rows go to
llama-server, so whoever reads it after a token that came of such rows sees that it was raised.
"""

import logging
import mmap
import struct
from collections import deque
from pathlib import Path
from typing import NamedTuple

from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import write_atomically
from linkcpp.worker.frames import Numbers

_log = logging.getLogger(__name__)

_COUNT = struct.Struct("=Q")
_REMEMBERED = 64


class MissingExperts(NamedTuple):
    """The experts of one layer that a call needed and nobody had."""

    layer: int
    experts: tuple[int, ...]


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
        self.call_count = 0
        self.pair_count = 0
        self.recent: deque[MissingExperts] = deque(maxlen=_REMEMBERED)

    def note(self, layer: int, expert_ids: Numbers) -> None:
        """Take note of pairs that nobody could compute."""
        if self._counter is not None:
            self._counter.raise_by_one()
        self.call_count += 1
        self.pair_count += len(expert_ids)
        missing = MissingExperts(layer, tuple(sorted(set(expert_ids.tolist()))))
        self.recent.append(missing)
        _log.error(
            "layer %d: nobody has the experts %s",
            layer,
            missing.experts,
            extra={"layer": layer, "experts": missing.experts},
        )
