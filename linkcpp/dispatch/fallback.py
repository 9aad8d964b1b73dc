"""The experts that no worker computes: done here, from the full model, in bounded memory."""

import logging
import threading

import numpy as np

from linkcpp.common.errors import LinkcppError
from linkcpp.engine.ops import OpTable
from linkcpp.engine.rpc_socket import RpcSocket
from linkcpp.engine.wire import WireError
from linkcpp.worker.chain import KeyedChain
from linkcpp.worker.compute import ExpertCompute
from linkcpp.worker.frames import Pairs, Rows
from linkcpp.worker.slabs import SlabProvider
from linkcpp.worker.store import CachedSlabs

_log = logging.getLogger(__name__)


class Fallback:
    """Computes pairs on an rpc-server of its own; slabs come when needed, the least used leave.

    Raises:
        LinkcppError: ``memory_bytes`` is too little for the experts of one layer's token.
    """

    def __init__(
        self, rpc: RpcSocket, ops: OpTable, provider: SlabProvider, memory_bytes: int
    ) -> None:
        self._ops = ops
        self._provider = provider
        self._memory_bytes = memory_bytes
        # Checks of workers compute here as well.
        self._lock = threading.Lock()
        self.pair_count = 0
        self.renew(rpc)

    def renew(self, rpc: RpcSocket) -> None:
        """Go on with another rpc-server; what the one before held is brought from the model again.

        Raises:
            LinkcppError: as when it is made.
        """
        with self._lock:
            self._store = CachedSlabs(rpc, self._provider, self._memory_bytes)
            self._compute = ExpertCompute(rpc, self._ops, self._store)
            self.failure: str | None = None

    @property
    def loaded_count(self) -> int:
        """How many experts were brought from the model so far."""
        return self._store.loaded_count

    def compute(self, chain: KeyedChain, pairs: Pairs) -> Rows | None:
        """Return one row a pair, or ``None`` where it cannot be done."""
        rows = self.rows(chain, pairs)
        if rows is not None:
            self.pair_count += len(rows)
        return rows

    def rows(self, chain: KeyedChain, pairs: Pairs) -> Rows | None:
        """As ``compute``, without counting: what workers are checked against."""
        with self._lock:
            if self.failure is not None:
                return None
            try:
                data = self._compute.compute(chain, pairs)
            except WireError as error:
                self.failure = error.message
                told = {"worker": "fallback", "layer": pairs.layer, "reason": error.message}
                _log.error("the fallback failed: %s", error, extra=told)
                return None
            except LinkcppError as error:
                told = {"worker": "fallback", "layer": pairs.layer, "reason": error.message}
                words = "the fallback cannot compute layer %d: %s"
                _log.error(words, pairs.layer, error, extra=told)
                return None
        return np.frombuffer(data, np.float32).reshape(len(pairs.expert_ids), chain.output_width)
