"""The experts of one layer for all tokens of a graph, as they are given to workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from linkcpp.worker.chain import KeyedChain
from linkcpp.worker.frames import Buffer, Numbers, Pairs, Rows


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


class Token(NamedTuple):
    """The experts of one layer for one token, whose row is f32 bytes; a ``Job`` without numpy."""

    layer: int
    chain: KeyedChain
    expert_ids: list[int]
    row: Buffer

    @classmethod
    def of(cls, job: Job) -> Self | None:
        """Return the only token of a job; ``None`` for any job that a ``TokenCall`` cannot do."""
        if len(job.ids) != 1 or len(job.inputs) != 1 or job.chain.is_per_pair:
            return None
        row = np.ascontiguousarray(job.inputs[0]).data.cast("B")
        return cls(job.layer, job.chain, job.ids[0].tolist(), row)

    def job(self, expert_ids: Sequence[int]) -> Job:
        """Return it as a job, with these experts."""
        row = np.frombuffer(self.row, np.float32).reshape(1, -1)
        return Job(self.layer, self.chain, np.array([expert_ids], np.int32), (row,))
