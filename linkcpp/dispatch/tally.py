"""How often each expert is chosen: counted for every token, and kept in a file over restarts."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import write_atomically
from linkcpp.planning.routing_counts import RoutingCounts, parse_counts
from linkcpp.worker.frames import Numbers

_log = logging.getLogger(__name__)

SAVE_SECONDS = 60.0
MAX_FILE_BYTES = 64 * 2**20
# For so few, a loop takes 1 to 2 us, and numpy's bincount 4 to 6, whatever their number is.
_FEW = 24


class RoutingTally:
    """Counts (token, expert) pairs by layer and expert. One thread adds, any may read."""

    def __init__(self, expert_counts: Mapping[int, int], model_digest: str | None) -> None:
        self.model_digest = model_digest
        self._few = {layer: [0] * count for layer, count in expert_counts.items()}
        self._many: dict[int, npt.NDArray[np.int64]] = {
            layer: np.zeros(count, np.int64) for layer, count in expert_counts.items()
        }

    def add(self, layer: int, expert_ids: Numbers) -> None:
        """Count the experts of some tokens, each an expert of the layer."""
        if expert_ids.size <= _FEW:
            self.add_few(layer, expert_ids.ravel().tolist())
        else:
            many = self._many[layer]
            many += np.bincount(expert_ids.ravel(), minlength=len(many))

    def add_few(self, layer: int, expert_ids: Sequence[int]) -> None:
        """As ``add``, without an array."""
        counts = self._few[layer]
        for expert in expert_ids:
            counts[expert] += 1

    def restore(self, counts: RoutingCounts) -> None:
        """Go on from what was counted before; what the model does not have is left out."""
        for layer, experts in counts.layers.items():
            many = self._many.get(layer, ())
            for expert, count in experts.items():
                if expert < len(many):
                    self._many[layer][expert] += count

    def counts(self) -> RoutingCounts:
        """Return what was counted so far; experts never chosen are left out."""
        layers = {}
        for layer, many in self._many.items():
            sums = many + np.array(self._few[layer], np.int64)
            chosen = np.flatnonzero(sums)
            layers[layer] = dict(zip(chosen.tolist(), sums[chosen].tolist(), strict=True))
        return RoutingCounts(model_digest=self.model_digest, layers=layers)


@contextlib.asynccontextmanager
async def kept_tally(tally: RoutingTally, path: Path | None) -> AsyncIterator[None]:
    """Go on with the counts in a file, if they are of the same model, and save every minute."""
    if path is None:
        yield
        return
    file = await asyncio.to_thread(_TallyFile, tally, path)
    keeping = asyncio.create_task(file.keep())
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.to_thread(file.save)


class _TallyFile:
    def __init__(self, tally: RoutingTally, path: Path) -> None:
        self._tally = tally
        self._path = path
        self._saving = threading.Lock()
        earlier = _read(path)
        if earlier is not None and earlier.model_digest == tally.model_digest:
            tally.restore(earlier)
        self._saved = tally.counts()

    async def keep(self) -> None:
        """Save for ever, every minute."""
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            await asyncio.to_thread(self.save)

    def save(self) -> None:
        """Save what is new; a full disk must not end a deployment."""
        with self._saving:
            counts = self._tally.counts()
            if counts == self._saved:
                return
            try:
                write_atomically(self._path, counts.model_dump_json())
            except LinkcppError as error:
                _log.warning("the routing counts were not saved: %s", error)
            else:
                self._saved = counts


def _read(path: Path) -> RoutingCounts | None:
    try:
        with path.open("rb") as file:
            return parse_counts(file.read(MAX_FILE_BYTES), source=str(path))
    except FileNotFoundError:
        return None
    except (OSError, LinkcppError) as error:
        _log.warning("counting starts anew: %s", error)
        return None
