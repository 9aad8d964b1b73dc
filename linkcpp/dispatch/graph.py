"""From the graph that llama-server sends to parts: segments for the backing server, expert calls.

Pure. For each layer, the nodes from the first to the last that reads an expert's weights are
learned as a chain (``worker.chain``); everything else stays a graph. A node that is neither
row-wise nor free of the experts is refused by name.

A segment has only what its nodes need: llama-server describes the whole model's graph each time,
including tensors of other devices, which makes the payload several times larger.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from linkcpp.common.errors import LinkcppError
from linkcpp.common.text import printable
from linkcpp.dispatch.layout import byte_span
from linkcpp.engine.ops import OpTable
from linkcpp.engine.wire_tensor import Graph, Tensors, tensor_names
from linkcpp.worker.chain import (
    BINARY_OPS,
    UNARY_OPS,
    Chain,
    ChainInput,
    ChainSource,
    ChainStep,
    SourceKind,
)
from linkcpp.worker.step_graph import F32, I32

# These only give existing memory another shape.
VIEW_OPS = frozenset({"NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"})
_CHAIN_OPS = UNARY_OPS | BINARY_OPS | {"MUL_MAT_ID", "ADD_ID", "GLU", "VIEW", "RESHAPE"}

Owner = Callable[[bytes], tuple[int, str] | None]
"""Tells layer and part (``ffn_up_exps.weight``) of an expert weight by its name."""


class GraphError(LinkcppError):
    """A graph that cannot be split by experts, named."""


class Segment(NamedTuple):
    """Nodes for the backing server, in order, and the records of all that they read."""

    node_ids: list[int]
    tensors: Tensors


@dataclass(frozen=True, slots=True)
class ExpertCall:
    """The experts of one layer for all tokens of the graph.

    ``token_count`` tokens choose ``slot_count`` experts each. ``ids`` is an i32 tensor of
    (slot, token); ``inputs`` fit ``chain.inputs``, (width, 1 or slot, token); ``output`` takes
    (width, slot, token). Every tensor is one record. Those in ``late`` (0: ids, k + 1: input k)
    are there only after ``between``, nodes that stand between the experts but do not need them;
    all others have to be read before.
    """

    layer: int
    chain: Chain
    slot_count: int
    token_count: int
    ids: Tensors
    inputs: tuple[Tensors, ...]
    output: Tensors
    between: Segment | None
    late: frozenset[int]


Part = Segment | ExpertCall


def split_graph(graph: Graph, ops: OpTable, owner: Owner) -> list[Part]:
    """Split a graph into parts, to be executed one after the other.

    Raises:
        GraphError: a node uses experts in a way that is not row-wise, or the graph is unsound.
        RequestError: a tensor has an unknown type.
    """
    return _Splitter(graph, ops, owner).split()


class _Splitter:
    def __init__(self, graph: Graph, ops: OpTable, owner: Owner) -> None:
        self._ops = ops
        self._tensors = graph.tensors
        ids: list[int] = graph.tensors["id"].tolist()
        self._row_of = {number: row for row, number in enumerate(ids)}
        self._ids = ids
        names = tensor_names(graph.tensors)
        self._names = names
        self._owned = [owner(name) for name in names]
        self._op_names = [ops.op_name(number) for number in graph.tensors["op"].tolist()]
        self._sources: list[list[int]] = [
            [self._row(source) for source in sources if source]
            for sources in graph.tensors["src"].tolist()
        ]
        self._view_sources: list[int] = [
            self._row_of.get(source, -1) if source else -1
            for source in graph.tensors["view_src"].tolist()
        ]
        self._nodes = [self._row(number) for number in graph.node_ids.tolist()]

    def _row(self, number: int) -> int:
        row = self._row_of.get(number)
        if row is None:
            raise GraphError(f"The graph names a tensor {number:#x} that it does not describe.")
        return row

    def _name(self, row: int) -> str:
        return printable(self._names[row].decode("utf-8", "replace")) or f"node {row}"

    def split(self) -> list[Part]:
        readers: dict[int, list[int]] = {}
        for position, row in enumerate(self._nodes):
            layers = {found[0] for s in self._sources[row] if (found := self._owned[s])}
            if len(layers) > 1:
                raise GraphError(f"{self._name(row)} reads experts of several layers.")
            for layer in layers:
                readers.setdefault(layer, []).append(position)
        parts: list[Part] = []
        at = 0
        for layer, positions in sorted(readers.items(), key=lambda entry: entry[1][0]):
            first, last = positions[0], positions[-1]
            if first < at:
                raise GraphError(f"The experts of layer {layer} are mixed with another layer's.")
            if segment := self._segment(self._nodes[at:first]):
                parts.append(segment)
            parts.append(self._call(layer, self._nodes[first : last + 1], self._nodes[last + 1 :]))
            at = last + 1
        if segment := self._segment(self._nodes[at:]):
            parts.append(segment)
        return parts

    def _segment(self, rows: list[int]) -> Segment | None:
        """Gather nodes and what they read; what is not computed here is sent as plain memory."""
        buffers = self._tensors["buffer"]
        rows = [row for row in rows if not (self._op_names[row] in VIEW_OPS and not buffers[row])]
        if not rows:
            return None
        computed = set(rows)
        needed = dict.fromkeys(rows)
        for row in rows:
            needed.update(dict.fromkeys(self._sources[row]))
            if self._view_sources[row] >= 0:
                needed[self._view_sources[row]] = None
        tensors = self._tensors[list(needed)].copy()
        plain = np.array([row not in computed for row in needed])
        for name in ("op", "op_params", "src", "view_src", "view_offs", "flags"):
            tensors[name][plain] = 0
        return Segment([self._ids[row] for row in rows], tensors)

    def _call(self, layer: int, span: list[int], after: list[int]) -> ExpertCall:
        members: dict[int, None] = {}
        between: list[int] = []
        for row in span:
            sources = self._sources[row]
            if any(self._owned[s] or s in members for s in sources) or (
                self._view_sources[row] in members
            ):
                members[row] = None
            else:
                between.append(row)
        result = span[-1]
        for row in after + between:
            touched = {*self._sources[row], self._view_sources[row]} - {result}
            if inner := touched & members.keys():
                raise GraphError(
                    f"{self._name(row)} needs {self._name(inner.pop())} of layer {layer}'s "
                    "experts, which does not leave them."
                )
        learner = _ChainLearner(self, layer, members)
        learner.learn()
        return self._finish_call(layer, learner, span, between)

    def _finish_call(
        self, layer: int, learner: "_ChainLearner", span: list[int], between: list[int]
    ) -> ExpertCall:
        assert learner.ids_row is not None  # noqa: S101 - every MUL_MAT_ID and ADD_ID has ids
        outer = [learner.ids_row, *learner.input_rows]
        computed = set(between)
        late = frozenset(
            number
            for number, row in enumerate(outer)
            if row in computed or self._view_sources[row] in computed
        )
        for number, row in enumerate(outer):
            if number in late:
                self._check_survives(row, between)
            else:
                self._check_untouched(row, span, computed)
        return ExpertCall(
            layer=layer,
            chain=learner.chain(),
            slot_count=learner.slots,
            token_count=learner.tokens,
            ids=self._tensors[learner.ids_row],
            inputs=tuple(self._tensors[row] for row in learner.input_rows),
            output=self._tensors[learner.result],
            between=self._segment(between),
            late=late,
        )

    def _check_untouched(self, row: int, span: list[int], between: set[int]) -> None:
        """Make sure that an early input is not overwritten before the last expert that reads it."""
        readers = [other not in between and row in self._sources[other] for other in span]
        last = len(span) - 1 - readers[::-1].index(True)
        self._check_apart(row, [other for other in span[:last] if other in between])

    def _check_survives(self, row: int, between: list[int]) -> None:
        """Make sure that a late input is not overwritten by a later node between the experts."""
        makers = (row, self._view_sources[row])
        made = next(at for at, other in enumerate(between) if other in makers)
        self._check_apart(row, [other for other in between[made:] if other not in makers])

    def _check_apart(self, row: int, others: list[int]) -> None:
        place = byte_span(self._tensors[row])
        for other in others:
            is_view = self._op_names[other] in VIEW_OPS
            if not is_view and byte_span(self._tensors[other]).overlaps(place):
                raise GraphError(
                    f"{self._name(other)} overwrites {self._name(row)} between the experts."
                )


class _ChainLearner:
    """Writes down the nodes of one layer's experts as a chain."""

    def __init__(self, splitter: _Splitter, layer: int, members: dict[int, None]) -> None:
        self._splitter = splitter
        self._layer = layer
        self._members = members
        self._steps: list[ChainStep] = []
        self._step_of: dict[int, ChainSource] = {}
        self._inputs: list[ChainInput] = []
        self.input_rows: list[int] = []
        self.ids_row: int | None = None
        self.slots = 0
        self.tokens = 0
        self.result = next(reversed(members))

    def chain(self) -> Chain:
        return Chain(inputs=tuple(self._inputs), steps=tuple(self._steps))

    def learn(self) -> None:
        split = self._splitter
        first = split._tensors[self.result]
        _, self.slots, self.tokens, rest = first["ne"].tolist()
        if rest != 1:
            self._refuse(self.result, "has four dimensions")
        # Per-token rows come first in a chain, whatever the graph's order.
        for row in self._members:
            for source in split._sources[row]:
                if self._is_outer_row(row, source) and self._ne(source)[1:] == [1, self.tokens, 1]:
                    self._add_input(source)
        for row in self._members:
            self._learn_node(row)
        if not self._inputs:
            self._refuse(self.result, "reads no rows")

    def _ne(self, row: int) -> list[int]:
        ne: list[int] = self._splitter._tensors["ne"][row].tolist()
        return ne

    def _is_outer_row(self, row: int, source: int) -> bool:
        split = self._splitter
        if source in self._members or split._owned[source]:
            return False
        return not (
            split._op_names[row] in ("MUL_MAT_ID", "ADD_ID") and source == split._sources[row][-1]
        )

    def _learn_node(self, row: int) -> None:
        split = self._splitter
        op = split._op_names[row]
        tensor = split._tensors[row]
        if op not in _CHAIN_OPS:
            self._refuse(row, f"({op}) stands between the experts and is not row-wise or not known")
        if tensor["type"] != F32:
            self._refuse(row, f"({op}) is not of type f32")
        if self._ne(row)[1:] != [self.slots, self.tokens, 1]:
            self._refuse(row, f"({op}) has another shape than (width, slot, token)")
        sources = tuple(
            self._source(row, op, number, source)
            for number, source in enumerate(split._sources[row])
        )
        if op == "RESHAPE":
            # The shape was checked, so it changes nothing.
            self._step_of[row] = sources[0]
            return
        params = tensor["op_params"].tolist()
        function, offset = "", 0
        if op == "GLU":
            function, params[0] = split._ops.glu_name(params[0]), 0
        elif op == "UNARY":
            function, params[0] = split._ops.unary_name(params[0]), 0
        elif op == "VIEW":
            offset, params = self._view_offset(row), []
        while params and params[-1] == 0:
            params.pop()
        step = ChainStep(
            op=op,
            width=self._ne(row)[0],
            sources=sources,
            params=tuple(params),
            function=function,
            offset=offset,
        )
        self._step_of[row] = ChainSource(kind=SourceKind.STEP, index=len(self._steps))
        self._steps.append(step)

    def _view_offset(self, row: int) -> int:
        """Return where in a row a view begins; it must keep to the rows of what it looks at."""
        split = self._splitter
        view = split._tensors[row]
        base = split._tensors[split._sources[row][0]]
        offset = int(view["data"]) - int(base["data"])
        same_rows = view["nb"].tolist()[:3] == base["nb"].tolist()[:3]
        end = offset + 4 * self._ne(row)[0]
        if not same_rows or offset < 0 or offset % 4 or end > int(base["nb"].flat[1]):
            self._refuse(row, "(VIEW) cuts across rows")
        return offset // 4

    def _source(self, row: int, op: str, number: int, source: int) -> ChainSource:
        split = self._splitter
        if source in self._members:
            if source not in self._step_of:
                self._refuse(row, f"({op}) reads a later node")
            return self._step_of[source]
        if owned := split._owned[source]:
            is_weight_place = (op, number) in (("MUL_MAT_ID", 0), ("ADD_ID", 1))
            if not is_weight_place:
                self._refuse(row, f"({op}) reads {split._name(source)} in a way that is not known")
            return ChainSource(kind=SourceKind.WEIGHT, weight=owned[1])
        if not self._is_outer_row(row, source):
            self._set_ids(row, source)
            return ChainSource(kind=SourceKind.IDS)
        return ChainSource(kind=SourceKind.INPUT, index=self._add_input(source))

    def _set_ids(self, row: int, source: int) -> None:
        if self.ids_row is None:
            ids = self._splitter._tensors[source]
            if ids["type"] != I32 or self._ne(source) != [self.slots, self.tokens, 1, 1]:
                self._refuse(row, "chooses experts by a tensor of another shape than (slot, token)")
            self.ids_row = source
        elif self.ids_row != source:
            self._refuse(row, "chooses experts by other ids than the rest of its layer")

    def _add_input(self, source: int) -> int:
        if source in self.input_rows:
            return self.input_rows.index(source)
        split = self._splitter
        width, slots, tokens, rest = self._ne(source)
        per_pair = slots == self.slots and slots != 1
        is_rows = split._tensors["type"][source] == F32 and rest == 1 and tokens == self.tokens
        if not is_rows or slots not in (1, self.slots) or (self._inputs and slots != self.slots):
            self._refuse(source, "is read by the experts, but is not a row for each token or slot")
        # With one slot a token, per token and per pair are the same.
        self._inputs.append(ChainInput(width=width, per_pair=per_pair or bool(self._inputs)))
        self.input_rows.append(source)
        return len(self.input_rows) - 1

    def _refuse(self, row: int, why: str) -> None:
        raise GraphError(
            f"{self._splitter._name(row)} of layer {self._layer} {why}.",
            hint="This model's experts cannot be computed elsewhere; serve it by layers instead.",
        )
