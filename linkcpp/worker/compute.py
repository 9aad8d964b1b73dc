"""The expert function on a stock rpc-server: (rows, experts) in, rows out."""

import functools
import struct
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from linkcpp.common.errors import LinkcppError
from linkcpp.engine import wire_messages as messages
from linkcpp.engine.ops import OpTable
from linkcpp.engine.rpc_socket import RpcSocket
from linkcpp.engine.wire import Buffer, Command, encode_request
from linkcpp.worker.chain import ChainError, KeyedChain, check_chain
from linkcpp.worker.frames import ErrorCode, FrameError, Numbers, Pairs, Rows, TokenPairs
from linkcpp.worker.plan import (
    Layout,
    PlanTarget,
    StepPlan,
    StepShape,
    plan_step,
)
from linkcpp.worker.slots import ScratchNeed, scratch_need
from linkcpp.worker.step_graph import Scratch
from linkcpp.worker.store import Group, SlabStore

DEFAULT_SCRATCH_BYTES = 64 * 2**20
_FIRST_SCRATCH_BYTES = 2**20
_MAX_PLANS = 1024
_MAX_CHAINS = 1024


def split_by_expert(expert_ids: Numbers, max_pairs: int, max_experts: int) -> list[Numbers]:
    """Cut pairs into parts of at most so many pairs and experts; return each part's positions.

    The rows of one expert stay together and in order, even where they are more than
    ``max_pairs``: some builds take another kernel, with other last bits, for many rows.
    """
    order = np.argsort(expert_ids, kind="stable").astype(np.int32)
    _, counts = np.unique(expert_ids, return_counts=True)
    parts = []
    start = end = experts = 0
    for count in counts.tolist():
        if end > start and (end + count - start > max_pairs or experts == max_experts):
            parts.append(order[start:end])
            start, experts = end, 0
        end += count
        experts += 1
    parts.append(order[start:end])
    return parts


@functools.cache
def _pack_ids(count: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{count}i").pack


def _used_rows(rows: Rows, row_index: Numbers) -> tuple[Rows, Numbers]:
    """Leave rows out that no pair uses, where that is worth a copy of the others."""
    used = np.zeros(len(rows), np.bool_)
    used[row_index] = True
    if 2 * np.count_nonzero(used) > len(rows):
        return rows, row_index
    return rows[used], (np.cumsum(used, dtype=np.int32) - 1)[row_index]


class Step(NamedTuple):
    """What to send to the rpc-server, and how many bytes it answers behind their number.

    ``makes_room``: it allocates or frees, so its answer has to be taken note of.
    """

    parts: list[Buffer]
    answer_bytes: int
    makes_room: bool = False


Steps = Generator[Step, Buffer, Buffer]
"""Steps that are given their answers; returns all rows as f32 bytes. Raises as ``compute``."""

_Result = TypeVar("_Result")
_Planning = Generator[Step, Buffer, _Result]


class ExpertCompute:
    """Computes pairs. Not for several threads at once; it owns its connection.

    ``scratch_bytes`` is what a step takes besides the weights: larger requests are done in several
    steps, each expert wholly in one of them; only the rows of a single expert may take more.
    """

    def __init__(
        self,
        rpc: RpcSocket,
        ops: OpTable,
        store: SlabStore,
        *,
        scratch_bytes: int = DEFAULT_SCRATCH_BYTES,
    ) -> None:
        self._rpc = rpc
        self._ops = ops
        self._store = store
        self._max_scratch_bytes = scratch_bytes
        self._scratch = Scratch(0, 0, 0)
        self._plans: OrderedDict[tuple[object, ...], StepPlan] = OrderedDict()
        # The same for single tokens, found with less work.
        self._token_plans: dict[tuple[object, ...], StepPlan] = {}
        self._token_pairs: dict[Hashable, int] = {}
        self._checked: set[tuple[object, ...]] = set()
        self._needs: dict[Hashable, ScratchNeed] = {}
        self._last: StepPlan | None = None
        self._unanswered: list[Buffer] = []

    def compute(self, chain: KeyedChain, pairs: Pairs) -> Buffer:
        """Return the rows of all pairs as f32 bytes, in the order of the pairs.

        The row index must have been checked against the rows.

        Raises:
            FrameError: an expert is not held, or the chain does not fit its weights.
            WireError: the rpc-server failed; this object is of no use afterwards.
        """
        return self._run(self.steps(chain, pairs))

    def compute_token(self, chain: KeyedChain, token: TokenPairs) -> Buffer:
        """As ``compute`` for one token, whose chain has one input of one row a token."""
        return self._run(self.token_steps(chain, token))

    def _run(self, steps: Steps) -> Buffer:
        step = next(steps)
        while True:
            self._rpc.queue(*step.parts)
            answer = self._rpc.receive(step.answer_bytes)
            try:
                step = steps.send(answer)
            except StopIteration as done:
                rows: Buffer = done.value
                return rows

    def steps(self, chain: KeyedChain, pairs: Pairs) -> Steps:
        """As ``compute`` for who sends and receives on the connection himself.

        Each step is to be sent and answered before the next one is asked for, and all of one
        ``steps`` before those of another. Whoever does not want the rows any more may leave off
        after the answer of a step that does not make room.
        """
        layer, row_index, expert_ids, inputs = pairs
        most = self._need(chain).max_pairs(len(inputs[0]), self._max_scratch_bytes)
        if len(expert_ids) <= min(most, self._store.max_experts):
            return (yield (yield from self._step(chain, pairs)))
        result = np.empty((len(expert_ids), chain.output_width), np.float32)
        for part in split_by_expert(expert_ids, most, self._store.max_experts):
            rows, index = _used_rows(inputs[0], row_index[part])
            chosen = (rows, *(rest[part] for rest in inputs[1:]))
            some = Pairs(layer, index, expert_ids[part], chosen)
            answer = yield (yield from self._step(chain, some))
            result[part] = np.frombuffer(answer, np.float32).reshape(len(part), -1)
        return result.data.cast("B")

    def token_steps(self, chain: KeyedChain, token: TokenPairs) -> Steps:
        """As ``steps`` for one token, whose chain has one input of one row a token."""
        layer, expert_ids, row = token
        count = len(expert_ids)
        if count > self._max_token_pairs(chain):
            rows = np.frombuffer(row, np.float32).reshape(1, -1)
            index, ids = np.zeros(count, np.int32), np.array(expert_ids, np.int32)
            return (yield from self.steps(chain, Pairs(layer, index, ids, (rows,))))
        group, local_ids = self._store.locate_few(layer, expert_ids)
        key = (chain.key, group.key, count)
        plan = self._token_plans.get(key)
        if plan is None:
            plan = yield from self._plan(chain, group, StepShape(Layout.SHARED, 1, count))
            self._token_plans[key] = plan
        return (yield self._filled(plan, (_pack_ids(count)(*local_ids), row)))

    def _max_token_pairs(self, chain: KeyedChain) -> int:
        found = self._token_pairs.get(chain.key)
        if found is None:
            most = self._need(chain).max_pairs(1, self._max_scratch_bytes)
            found = self._token_pairs[chain.key] = min(most, self._store.max_experts)
        return found

    def _need(self, keyed: KeyedChain) -> ScratchNeed:
        found = self._needs.get(keyed.key)
        if found is None:
            if len(self._needs) >= _MAX_CHAINS:
                self._forget_chains()
            found = self._needs[keyed.key] = scratch_need(keyed.chain)
        return found

    def _forget_chains(self) -> None:
        """Forget what was found out of chains, most of them of links that are closed by now."""
        for known in (self._needs, self._token_pairs, self._checked, self._plans):
            known.clear()
        self._token_plans.clear()
        self._last = None

    def _step(self, chain: KeyedChain, pairs: Pairs) -> _Planning[Step]:
        layer, row_index, expert_ids, inputs = pairs
        group, local_ids = self._store.locate(layer, expert_ids)
        rows, count = len(inputs[0]), len(expert_ids)
        if rows == 1:
            layout = Layout.SHARED
        elif rows == count and bool((row_index == np.arange(count)).all()):
            layout = Layout.DIRECT
        else:
            layout = Layout.GATHERED
        plan = yield from self._plan(chain, group, StepShape(layout, rows, count))
        pieces: list[Numbers | Rows] = [local_ids]
        if layout is Layout.GATHERED:
            pieces.append(row_index)
        pieces += inputs
        return self._filled(plan, [np.ascontiguousarray(piece).data.cast("B") for piece in pieces])

    def _filled(self, plan: StepPlan, pieces: Sequence[Buffer]) -> Step:
        parts: list[Buffer] = [plan.set_head]
        for piece, padding in zip(pieces, plan.paddings, strict=True):
            parts += (piece, padding)
        parts.append(plan.rerun if plan is self._last else plan.run)
        self._last = plan
        return Step(parts, plan.answer_bytes)

    def _plan(self, keyed: KeyedChain, group: Group, shape: StepShape) -> _Planning[StepPlan]:
        chain_key, chain = keyed.key, keyed.chain
        key = (chain_key, group.key, shape)
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
            return plan
        if (chain_key, group.key) not in self._checked:
            try:
                check_chain(chain, group.shapes)
            except ChainError as error:
                raise FrameError(ErrorCode.BAD_CHAIN, error.message) from error
            self._checked.add((chain_key, group.key))
        yield from self._make_room(self._need(keyed).total_bytes(shape.rows, shape.pairs))
        try:
            plan = plan_step(chain, group.weights, shape, self._target())
        except LinkcppError as error:
            raise FrameError(ErrorCode.BAD_CHAIN, str(error)) from error
        self._plans[key] = plan
        if len(self._plans) > _MAX_PLANS:
            self._plans.popitem(last=False)
            self._token_plans.clear()
        return plan

    def _target(self) -> PlanTarget:
        return PlanTarget(self._scratch, self._ops, self._rpc.dialect)

    def _make_room(self, size_bytes: int) -> _Planning[None]:
        """Let the scratch buffer have at least ``size_bytes``; a new one makes all plans stale."""
        if size_bytes <= self._scratch.size_bytes:
            return
        wanted = max(size_bytes, min(2 * self._scratch.size_bytes, self._max_scratch_bytes))
        wanted = max(wanted, _FIRST_SCRATCH_BYTES)
        self._plans.clear()
        self._token_plans.clear()
        self._last = None
        old, self._scratch = self._scratch, Scratch(0, 0, 0)
        if old.buffer:
            yield from self._ask(Command.FREE_BUFFER, _pointer(old.buffer))
        request = messages.ALLOC_BUFFER.build(messages.AllocBuffer(0, wanted))
        answer = yield from self._ask(Command.ALLOC_BUFFER, request)
        buffer = messages.ALLOCATED_BUFFER.parse(answer).buffer
        if not buffer:
            text = f"The rpc-server cannot allocate {wanted} bytes to compute with."
            raise FrameError(ErrorCode.TOO_LARGE, text)
        answer = yield from self._ask(Command.BUFFER_GET_BASE, _pointer(buffer))
        self._scratch = Scratch(buffer, messages.NUMBER.parse(answer).value, wanted)

    def _ask(self, command: Command, payload: bytes) -> _Planning[Buffer]:
        parts: list[Buffer] = [encode_request(command, payload)]
        answer_bytes = self._rpc.dialect.answer_bytes.get(command)
        if answer_bytes is None:
            # It leaves with the next step.
            self._unanswered = parts
            return b""
        parts, self._unanswered = [*self._unanswered, *parts], []
        return (yield Step(parts, answer_bytes, makes_room=True))


def _pointer(buffer: int) -> bytes:
    return messages.BUFFER_POINTER.build(messages.BufferPointer(buffer))
