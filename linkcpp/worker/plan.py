"""From a chain and a shape to the bytes of one step: one SET, one GRAPH, one GET. Pure.

All input of a step lies in one contiguous region of the scratch buffer, so one SET_TENSOR brings
it; behind it are the slots that its values share (``slots``). Three layouts exist, all with the
same bits in the result:

- SHARED: one row for all pairs; pairs are the slots of one token, as in llama.cpp's own graph;
- DIRECT: row k belongs to pair k; every pair is a token with one slot;
- GATHERED: as DIRECT, but GET_ROWS first spreads the rows that several pairs share.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from linkcpp.engine import wire_messages as messages
from linkcpp.engine.ops import OpTable
from linkcpp.engine.wire import Command, Dialect, encode_request, request_header
from linkcpp.worker.chain import PARAMETER_COUNT, Chain, ChainStep, SourceKind
from linkcpp.worker.slots import ALIGNMENT_BYTES, assign_slots
from linkcpp.worker.step_graph import F32, FIRST_ID, I32, Scratch, StepGraph, StepTensor


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


def plan_step(
    chain: Chain, weights: Mapping[str, Weight], shape: StepShape, target: PlanTarget
) -> StepPlan:
    """Plan one step of a checked chain (``chain.check_chain``); the scratch must have room.

    Raises:
        LinkcppError: the engine does not have one of the operations.
    """
    ops = target.ops
    graph = StepGraph(target.scratch)
    is_shared = shape.layout is Layout.SHARED
    across = (shape.pairs, 1) if is_shared else (1, shape.pairs)
    ids = graph.add(graph.fresh((*across, 1), b"ids", type_number=I32))
    index: StepTensor | None = None
    if shape.layout is Layout.GATHERED:
        index = graph.add(graph.fresh((shape.pairs, 1, 1), b"index", type_number=I32))
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
    slots = assign_slots(chain, gathers_rows=index is not None)
    offsets = [graph.place(4 * width * shape.pairs) for width in slots.widths]
    if index is not None:
        inputs[0] = _gather(graph, inputs[0], index, ops, offsets[0])
    places = [offsets[slot] for slot in slots.of_step]
    maker = _StepMaker(graph, ops, weights, across, (ids, inputs, places))
    for step in chain.steps:
        maker.add(step)
    return _finish(graph, maker.steps[-1], region_bytes, paddings, target.dialect)


def _gather(
    graph: StepGraph, rows: StepTensor, index: StepTensor, ops: OpTable, offset: int
) -> StepTensor:
    width, pairs = rows.ne[0], index.ne[0]
    spread = graph.fresh((width, pairs, 1), b"rows", offset=offset)
    spread.op, spread.sources = ops.op_number("GET_ROWS"), (rows, index)
    graph.add(spread)
    token_per_pair = StepTensor(
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
        graph: StepGraph,
        ops: OpTable,
        weights: Mapping[str, Weight],
        across: tuple[int, int],
        given: tuple[StepTensor, list[StepTensor], list[int]],
    ) -> None:
        self._graph = graph
        self._ops = ops
        self._across = across
        self._ids, self._inputs, self._places = given
        self._weights = weights
        self._placed: dict[str, StepTensor] = {}
        self.steps: list[StepTensor] = []

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

    def _row(self, step: ChainStep) -> StepTensor:
        place = self._places[len(self.steps)]
        tensor = self._graph.fresh((step.width, *self._across), step.op.encode(), offset=place)
        params = [*step.params, *(0,) * (PARAMETER_COUNT - len(step.params))]
        if step.op == "GLU":
            params[0] = self._ops.glu_number(step.function)
        elif step.op == "UNARY":
            params[0] = self._ops.unary_number(step.function)
        tensor.params = params
        return tensor

    def _view(self, step: ChainStep, source: StepTensor) -> StepTensor:
        offset = 4 * step.offset
        return StepTensor(
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

    def _weight(self, name: str) -> StepTensor:
        if name not in self._placed:
            weight = self._weights[name]
            self._placed[name] = self._graph.add(
                StepTensor(
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
    graph: StepGraph,
    result: StepTensor,
    region_bytes: int,
    paddings: tuple[bytes, ...],
    dialect: Dialect,
) -> StepPlan:
    scratch = graph.scratch
    words = region_bytes // 4
    region = StepTensor(
        number=FIRST_ID,
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
