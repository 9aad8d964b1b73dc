"""A call for one token where all is well, which is what decides how fast tokens flow.

The same as ``call.Call`` without numpy's price for arrays of a few elements, and in two halves,
so that something else can be done while the workers compute. Whatever goes wrong is left to
``Call``.
"""

import functools
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from linkcpp.dispatch.call import Call, Request, all_finite, most_pairs
from linkcpp.dispatch.holder import Holder, LinkState
from linkcpp.dispatch.job import Job
from linkcpp.worker.frames import (
    COMPUTE,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Buffer,
    DataType,
    FrameError,
    FrameType,
    Rows,
    parse_error,
    parse_rows,
)

if TYPE_CHECKING:
    from linkcpp.dispatch.swarm import Swarm

_COMPUTE, _F32 = FrameType.COMPUTE, DataType.F32


def is_simple(job: Job) -> bool:
    """Tell whether a ``TokenCall`` can do it."""
    return len(job.ids) == 1 and len(job.inputs) == 1 and not job.chain.is_per_pair


def pack_token(
    request_id: int, chain_id: int, layer: int, expert_ids: Sequence[int], row: Buffer
) -> list[Buffer]:
    """Write COMPUTE for one token: one row, as f32 bytes, for all experts."""
    pairs, row_bytes = len(expert_ids), len(row)
    head = _token_head(pairs)
    size_bytes = head.size - HEADER_BYTES + row_bytes
    start = head.pack(
        *(MAGIC, VERSION, _COMPUTE, 0, request_id, size_bytes),
        *(chain_id, layer, 1, pairs, row_bytes // 4, _F32, _F32, 1),
        *expert_ids,
    )
    return [start, row]


@functools.cache
def _token_head(pairs: int) -> struct.Struct:
    """Header, head of COMPUTE, a row index of zeros, expert ids."""
    return struct.Struct(f"{HEADER.format}{COMPUTE.format[1:]}{4 * pairs}x{pairs}i")


class TokenCall:
    """``send``, then ``gather``; a call that was sent and is not wanted is simply forgotten."""

    def __init__(self, swarm: "Swarm", job: Job) -> None:
        self._swarm = swarm
        self._job = job
        self._ids: list[int] = job.ids[0].tolist()
        self._shares: list[tuple[Holder, list[int]]] = []
        self._waiting: dict[int, tuple[Holder, list[int]]] = {}
        self._sent_at = 0.0

    def send(self) -> bool:
        """Ask the owners; ``False`` where not all could be asked."""
        if not self._share():
            return False
        job, swarm = self._job, self._swarm
        row = np.ascontiguousarray(job.inputs[0]).data.cast("B")
        chain_number = swarm.chain_number(job.chain)
        self._sent_at = time.monotonic()
        for holder, positions in self._shares:
            number = swarm.request_number()
            experts = [self._ids[position] for position in positions]
            try:
                holder.send(pack_token(number, chain_number, job.layer, experts, row))
            except OSError as error:
                swarm.holders.fail(holder, f"cannot be sent to: {error}", job.layer)
                return False
            holder.request_count += 1
            self._waiting[number] = holder, positions
        return True

    def _share(self) -> bool:
        owners = self._swarm.routes_of(self._job.layer).owners
        positions_of: dict[int, list[int]] = {}
        for position, expert in enumerate(self._ids):
            positions_of.setdefault(owners[expert], []).append(position)
        for number, positions in positions_of.items():
            holder = self._swarm.holders.get(number)
            if (
                holder is None
                or holder.state != LinkState.UP
                or holder.is_removed
                or holder.is_sending
                or holder.welcome is None
                or len(positions) > most_pairs(holder.welcome.limits, self._job.chain)
            ):
                return False
            self._shares.append((holder, positions))
        return True

    def gather(self) -> Rows:
        """Return one row for each pair."""
        result = np.empty((len(self._ids), self._job.chain.output_width), np.float32)
        floor_ms = self._swarm.options.deadline_floor_ms
        # Whoever was asked last answers last most times: the other answers are there then, and
        # this process has slept once.
        for number, (holder, _) in reversed(list(self._waiting.items())):
            try:
                while number in self._waiting:
                    if not holder.receive(floor_ms):
                        return self._take_over(result)
                    self._take_frames(holder, result)
            except (OSError, FrameError) as error:
                self._swarm.holders.fail(holder, f"failed: {error}", self._job.layer)
                return self._take_over(result)
        return result

    def _take_over(self, result: Rows) -> Rows:
        requests = [
            (number, Request(holder, np.array(positions, np.int32), self._sent_at, 0.0))
            for number, (holder, positions) in self._waiting.items()
        ]
        return Call(self._swarm, self._job).take_over(result, requests)

    def _take_frames(self, holder: Holder, result: Rows) -> None:
        while (frame := holder.next_frame()) is not None:
            header, payload = frame
            known = self._waiting.get(header.request_id)
            if header.kind == FrameType.ERROR and (known or header.request_id == 0):
                raise parse_error(payload)
            if header.kind != FrameType.ROWS or known is None or known[0] is not holder:
                continue
            positions = known[1]
            answer = parse_rows(payload, (len(positions), result.shape[1]))
            if not all_finite(answer.rows) and all_finite(self._job.inputs[0]):
                self._swarm.counters.nonsense_count += 1
                raise ConnectionError("it answered rows that are not finite")
            result[positions] = answer.rows
            del self._waiting[header.request_id]
            took = time.monotonic() - self._sent_at
            holder.note_answer(len(positions), took, answer.compute_us)
