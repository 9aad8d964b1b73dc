"""The experts of one layer for all tokens of a graph, as they are given to workers."""

from dataclasses import dataclass

import numpy as np

from linkcpp.worker.chain import KeyedChain
from linkcpp.worker.frames import Numbers, Pairs, Rows


@dataclass(slots=True)
class Job:
    """The experts of one layer: ``ids`` of (token, slot), ``inputs`` as in ``frames.Pairs``."""

    layer: int
    chain: KeyedChain
    ids: Numbers
    inputs: tuple[Rows, ...]

    def pairs(self, positions: Numbers) -> Pairs:
        """Take some of the pairs, with the rows that they need."""
        slots = self.ids.shape[1]
        chosen = self.ids.reshape(-1)[positions]
        rest = tuple(values[positions] for values in self.inputs[1:])
        if self.chain.is_per_pair:
            own = np.arange(len(positions), dtype=np.int32)
            return Pairs(self.layer, own, chosen, (self.inputs[0][positions], *rest))
        if len(self.ids) == 1:
            zeros = np.zeros(len(positions), np.int32)
            return Pairs(self.layer, zeros, chosen, (self.inputs[0], *rest))
        rows, index = np.unique(positions // slots, return_inverse=True)
        return Pairs(self.layer, index.astype(np.int32), chosen, (self.inputs[0][rows], *rest))
