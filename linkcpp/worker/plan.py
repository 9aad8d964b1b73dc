"""From a chain and a shape to the bytes of one step: one SET, one GRAPH, one GET. Pure.

All input of a step lies in one contiguous region of the scratch buffer, so one SET_TENSOR brings
it. Three layouts exist, all with the same bits in the result:

- SHARED: one row for all pairs; pairs are the slots of one token, as in llama.cpp's own graph;
- DIRECT: row k belongs to pair k; every pair is a token with one slot;
- GATHERED: as DIRECT, but GET_ROWS first spreads the rows that several pairs share.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from linkcpp.engine import wire_messages as messages
from linkcpp.engine.ops import OpTable
from linkcpp.engine.wire import Command, Dialect, encode_request, request_header
from linkcpp.engine.wire_tensor import FLAG_COMPUTE
from linkcpp.worker.chain import PARAMETER_COUNT, Chain, ChainStep, SourceKind

# ggml's numbers of the types, which are the same in every build.
F32, I32 = 0, 26
# Enough for every backend's alignment of tensors in a buffer.
ALIGNMENT_BYTES = 128
_TENSOR = struct.Struct("<QIQ4I4II16ii10QQQQ64si")
_FIRST_ID = 0x1000
_NO_PARAMETERS = (0,) * PARAMETER_COUNT


class Layout(Enum):
    """How pairs lie in the tensors of a step."""

    SHARED = "shared"
    DIRECT = "direct"
    GATHERED = "gathered"


class StepShape(NamedTuple):
    """What a plan depends on besides chain and weights."""

    layout: Layout
    rows: int
    pairs: int


class Weight(NamedTuple):
    """A weight of one or more experts on an rpc-server: experts are the outermost dimension."""

    name: bytes
    type_number: int
    ne: tuple[int, int, int, int]
    nb: tuple[int, int, int, int]
    buffer: int
    data: int


class Scratch(NamedTuple):
    """A buffer for what comes and goes."""

    buffer: int
    base: int
    size_bytes: int


class PlanTarget(NamedTuple):
    """The rpc-server that a plan is for."""

    scratch: Scratch
    ops: OpTable
    dialect: Dialect


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Ready bytes. Send ``set_head``, the input region, ``run``; receive ``answer_bytes``.

    The region has ids, row index (GATHERED only) and inputs, each followed by its one of
    ``paddings``. ``rerun`` is ``run`` for when the rpc-server's last graph was this plan's.
    """

    set_head: bytes
    paddings: tuple[bytes, ...]
    run: bytes
    rerun: bytes
    answer_bytes: int


@dataclass(slots=True)
class _Tensor:
    """A tensor of the graph that is being made."""

    number: int
    type_number: int
    ne: tuple[int, int, int, int]
    nb: tuple[int, int, int, int]
    buffer: int
    data: int
    name: bytes
    op: int = 0
    params: Sequence[int] = _NO_PARAMETERS
    sources: "tuple[_Tensor, ...]" = ()
    view_source: "_Tensor | None" = None
    view_offset: int = 0
    use_count: int = 0

    def pack(self) -> bytes:
        ids = [source.number for source in self.sources]
        return _TENSOR.pack(
            self.number, self.type_number, self.buffer, *self.ne, *self.nb, self.op, *self.params,
            FLAG_COMPUTE if self.op else 0, *ids, *(0,) * (10 - len(ids)),
            self.view_source.number if self.view_source else 0, self.view_offset, self.data,
            self.name, self.use_count,
        )  # fmt: skip


@dataclass(slots=True)
class _Graph:
    """A graph being made in a scratch buffer, which it fills from the start."""

    scratch: Scratch
    used_bytes: int = 0
    tensors: list[_Tensor] = field(default_factory=list)
    nodes: list[_Tensor] = field(default_factory=list)

    def place(self, size_bytes: int) -> int:
        offset = self.used_bytes
        self.used_bytes += -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return offset

    def add(self, tensor: _Tensor) -> _Tensor:
        self.tensors.append(tensor)
        if tensor.op:
            self.nodes.append(tensor)
            for source in tensor.sources:
                source.use_count += 1
        return tensor

    def fresh(self, ne: tuple[int, int, int], name: bytes, type_number: int = F32) -> _Tensor:
        """A dense tensor of four-byte elements with memory of its own; not yet added."""
        first, second, third = ne
        size_bytes = 4 * first * second * third
        return _Tensor(
            number=self.next_number(),
            type_number=type_number,
            ne=(*ne, 1),
            nb=(4, 4 * first, 4 * first * second, size_bytes),
            buffer=self.scratch.buffer,
            data=self.scratch.base + self.place(size_bytes),
            name=name,
        )

    def next_number(self) -> int:
        return _FIRST_ID + 16 * len(self.tensors)

    def pack(self) -> bytes:
        return b"".join(
            (
                struct.pack("<II", 0, len(self.nodes)),
                struct.pack(f"<{len(self.nodes)}Q", *(node.number for node in self.nodes)),
                struct.pack("<I", len(self.tensors)),
                *(tensor.pack() for tensor in self.tensors),
            )
        )


def scratch_bytes_needed(chain: Chain, pairs: int) -> int:
    """Return a bound of the scratch memory that a step of at most ``pairs`` pairs needs."""
    rounding = ALIGNMENT_BYTES * (len(chain.steps) + len(chain.inputs) + 4)
    return chain.row_bytes * pairs + rounding


def plan_step(
    chain: Chain, weights: Mapping[str, Weight], shape: StepShape, target: PlanTarget
) -> StepPlan:
    """Plan one step of a checked chain (``chain.check_chain``); the scratch must have room.

    Raises:
        LinkcppError: the engine does not have one of the operations.
    """
    ops = target.ops
    graph = _Graph(target.scratch)
    is_shared = shape.layout is Layout.SHARED
    across = (shape.pairs, 1) if is_shared else (1, shape.pairs)
    ids = graph.add(graph.fresh((*across, 1), b"ids", I32))
    index: _Tensor | None = None
    if shape.layout is Layout.GATHERED:
        index = graph.add(graph.fresh((shape.pairs, 1, 1), b"index", I32))
    inputs = []
    for number, entry in enumerate(chain.inputs):
        if number or shape.layout is Layout.DIRECT:
            ne = (entry.width, *across)
        elif index is not None:
            ne = (entry.width, shape.rows, 1)
        else:
            ne = (entry.width, 1, 1)
        inputs.append(graph.add(graph.fresh(ne, b"input")))
    region_bytes = graph.used_bytes
    paddings = tuple(bytes(-tensor.nb[3] % ALIGNMENT_BYTES) for tensor in graph.tensors)
    if index is not None:
        inputs[0] = _gather(graph, inputs[0], index, ops)
    maker = _StepMaker(graph, ops, weights, across, (ids, inputs))
    for step in chain.steps:
        maker.add(step)
    return _finish(graph, maker.steps[-1], region_bytes, paddings, target.dialect)


def _gather(graph: _Graph, rows: _Tensor, index: _Tensor, ops: OpTable) -> _Tensor:
    width, pairs = rows.ne[0], index.ne[0]
    spread = graph.fresh((width, pairs, 1), b"rows")
    spread.op, spread.sources = ops.op_number("GET_ROWS"), (rows, index)
    graph.add(spread)
    token_per_pair = _Tensor(
        number=graph.next_number(),
        type_number=F32,
        ne=(width, 1, pairs, 1),
        nb=(4, 4 * width, 4 * width, 4 * width * pairs),
        buffer=spread.buffer,
        data=spread.data,
        name=b"rows",
        op=ops.op_number("RESHAPE"),
        sources=(spread,),
        view_source=spread,
    )
    return graph.add(token_per_pair)


class _StepMaker:
    """Adds the steps of a chain to a graph."""

    def __init__(
        self,
        graph: _Graph,
        ops: OpTable,
        weights: Mapping[str, Weight],
        across: tuple[int, int],
        given: tuple[_Tensor, list[_Tensor]],
    ) -> None:
        self._graph = graph
        self._ops = ops
        self._across = across
        self._ids, self._inputs = given
        self._weights = weights
        self._placed: dict[str, _Tensor] = {}
        self.steps: list[_Tensor] = []

    def add(self, step: ChainStep) -> None:
        sources = tuple(
            self._inputs[source.index] if source.kind == SourceKind.INPUT
            else self.steps[source.index] if source.kind == SourceKind.STEP
            else self._weight(source.weight) if source.kind == SourceKind.WEIGHT
            else self._ids
            for source in step.sources
        )  # fmt: skip
        tensor = self._view(step, sources[0]) if step.op == "VIEW" else self._row(step)
        tensor.op = self._ops.op_number(step.op)
        tensor.sources = sources
        self.steps.append(self._graph.add(tensor))

    def _row(self, step: ChainStep) -> _Tensor:
        tensor = self._graph.fresh((step.width, *self._across), step.op.encode())
        params = [*step.params, *(0,) * (PARAMETER_COUNT - len(step.params))]
        if step.op == "GLU":
            params[0] = self._ops.glu_number(step.function)
        elif step.op == "UNARY":
            params[0] = self._ops.unary_number(step.function)
        tensor.params = params
        return tensor

    def _view(self, step: ChainStep, source: _Tensor) -> _Tensor:
        offset = 4 * step.offset
        return _Tensor(
            number=self._graph.next_number(),
            type_number=F32,
            ne=(step.width, *self._across, 1),
            nb=source.nb,
            buffer=source.buffer,
            data=source.data + offset,
            name=b"view",
            params=(offset, *(0,) * (PARAMETER_COUNT - 1)),
            view_source=source.view_source or source,
            view_offset=source.view_offset + offset,
        )

    def _weight(self, name: str) -> _Tensor:
        if name not in self._placed:
            weight = self._weights[name]
            self._placed[name] = self._graph.add(
                _Tensor(
                    number=self._graph.next_number(),
                    type_number=weight.type_number,
                    ne=weight.ne,
                    nb=weight.nb,
                    buffer=weight.buffer,
                    data=weight.data,
                    name=weight.name,
                )
            )
        return self._placed[name]


def _finish(
    graph: _Graph,
    result: _Tensor,
    region_bytes: int,
    paddings: tuple[bytes, ...],
    dialect: Dialect,
) -> StepPlan:
    scratch = graph.scratch
    words = region_bytes // 4
    region = _Tensor(
        number=_FIRST_ID,
        type_number=F32,
        ne=(words, 1, 1, 1),
        nb=(4, region_bytes, region_bytes, region_bytes),
        buffer=scratch.buffer,
        data=scratch.base,
        name=b"region",
    )
    head = messages.build_set_tensor_head(dialect, messages.SetTensor(region.pack(), 0, False))
    answer_bytes = result.ne[0] * result.ne[1] * result.ne[2] * 4
    get = messages.GET_TENSOR.build(messages.GetTensor(result.pack(), 0, answer_bytes))
    get_request = encode_request(Command.GET_TENSOR, get)
    again = messages.DEVICE_INDEX.build(messages.DeviceIndex(0))
    return StepPlan(
        set_head=request_header(Command.SET_TENSOR, len(head) + region_bytes) + head,
        paddings=paddings,
        run=encode_request(Command.GRAPH_COMPUTE, graph.pack()) + get_request,
        rerun=encode_request(Command.GRAPH_RECOMPUTE, again) + get_request,
        answer_bytes=answer_bytes,
    )
