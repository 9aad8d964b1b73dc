"""What llama.cpp does with the experts' rows: weighting them and adding them up. Pure.

Nearly every Mixture-of-Experts graph ends alike: each row times its weight, the slots added one
after the other, and then often the residual. These are single f32 operations of IEEE 754, so
numpy has the same bits as ggml, and the sum can be told before the backing server has done its
work again. A graph that ends otherwise is not recognised and simply computed there.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from linkcpp.dispatch.graph import ExpertCall, Segment
from linkcpp.dispatch.layout import Span, byte_span, has_no_gaps, lies_row_by_row
from linkcpp.engine.ops import OpTable
from linkcpp.engine.wire_tensor import FLAG_COMPUTE, Tensors
from linkcpp.worker.step_graph import F32

Array = npt.NDArray[Any]

# So that what is multiplied is still in the cache when it is added.
_TOKENS_AT_ONCE = 32


class Ending(NamedTuple):
    """The end of a graph as one sum; every tensor is one record.

    ``weights`` are (1, slot, token), ``residual`` and ``result`` (width, token).
    """

    weights: Tensors
    residual: Tensors | None
    result: Tensors


def find_ending(segment: Segment, call: ExpertCall, ops: OpTable) -> Ending | None:
    """Recognise what follows the experts; ``None`` where it is anything else than that sum.

    Raises:
        RequestError: a tensor has an unknown type.
    """
    # The weighting, a view of each slot, what adds them up, and the residual.
    if len(segment.node_ids) > 2 * call.slot_count + 1:
        return None
    return _Reader(segment, call, ops).read()


def add_up(rows: Array, weights: Array, residual: Array | None) -> Array:
    """Weight and add rows as ggml does: (token, slot, width), (token, slot, 1), (token, width)."""
    tokens, slots, width = rows.shape
    total = np.empty((tokens, width), np.float32)
    for first in range(0, tokens, _TOKENS_AT_ONCE):
        some = slice(first, first + _TOKENS_AT_ONCE)
        terms = rows[some] * weights[some]
        sums = terms[:, 0]
        for slot in range(1, slots):
            sums += terms[:, slot]
        if residual is not None:
            sums += residual[some]
        total[some] = sums
    return total


@dataclass(frozen=True, slots=True)
class _Sum:
    """So many slots from the first one on, or, where ``is_single``, only the last of them."""

    count: int
    is_single: bool
    has_residual: bool = False


class _Reader:
    def __init__(self, segment: Segment, call: ExpertCall, ops: OpTable) -> None:
        self._call = call
        self._ops = ops
        tensors = segment.tensors
        ids: list[int] = tensors["id"].tolist()
        self._records: dict[int, Tensors] = dict(zip(ids, tensors, strict=True))
        self._nodes = segment.node_ids
        self._weighted = 0
        self._sums: dict[int, _Sum] = {}
        self._weights: Tensors | None = None
        self._residual: Tensors | None = None
        # Which tensors still are what they were made, or were before the experts.
        self._intact: dict[int, Span] = {
            number: byte_span(record)
            for number, record in self._records.items()
            if number not in self._nodes
        }
        self._write(call.output)

    def read(self) -> Ending | None:
        """Read node after node; ``None`` at the first that does not belong to a sum."""
        for number in self._nodes:
            node = self._records[number]
            sources = [int(source) for source in node["src"] if source]
            is_computed = int(node["flags"]) & FLAG_COMPUTE and int(node["type"]) == F32
            if not is_computed or not self._intact.keys() >= set(sources):
                return None
            if not self._read_node(node, sources):
                return None
        last = self._nodes[-1]
        total = self._sums.get(last)
        if total is None or self._weights is None:
            return None
        if total.count != self._call.slot_count or (total.is_single and total.count != 1):
            return None
        return Ending(self._weights, self._residual, self._records[last])

    def _read_node(self, node: Tensors, sources: list[int]) -> bool:
        """Take a node as the next step of the sum; ``False`` where it is none."""
        number = int(node["id"])
        op = self._ops.op_name(int(node["op"]))
        if op == "MUL" and self._is_weighting(node, sources):
            self._weighted = number
            self._write(node)
            return True
        found = None
        if op == "VIEW" and (found := self._slot(node, sources)):
            self._intact[number] = byte_span(node)
        elif op == "ADD" and self._is_row(node) and (found := self._add(sources)):
            self._write(node)
        if found is None:
            return False
        self._sums[number] = found
        return True

    def _write(self, node: Tensors) -> None:
        """Take note that a node has its result now, and whatever was in that place is gone."""
        place = byte_span(node)
        kept = {other: old for other, old in self._intact.items() if not old.overlaps(place)}
        self._intact = {**kept, int(node["id"]): place}

    def _is_weighting(self, node: Tensors, sources: list[int]) -> bool:
        """Whether it is the rows times (1, slot, token), for the first time."""
        call = self._call
        if self._weighted or len(sources) != 2 or sources[0] != int(call.output["id"]):
            return False
        weights = self._outer(sources[1])
        if weights is None or weights["ne"].tolist() != [1, call.slot_count, call.token_count, 1]:
            return False
        if node["ne"].tolist() != call.output["ne"].tolist() or not has_no_gaps(node):
            return False
        self._weights = weights
        return True

    def _outer(self, number: int) -> Tensors | None:
        """Return a tensor of f32 that was there before the experts and can be read row by row."""
        record = self._records.get(number)
        is_own = number in self._nodes or number == int(self._call.output["id"])
        if record is None or is_own or int(record["type"]) != F32:
            return None
        return record if lies_row_by_row(record) else None

    def _is_row(self, node: Tensors) -> bool:
        width = int(self._call.output["ne"][0])
        return node["ne"].tolist() == [width, self._call.token_count, 1, 1] and has_no_gaps(node)

    def _slot(self, node: Tensors, sources: list[int]) -> _Sum | None:
        """Read a view of one slot of all weighted rows."""
        if not self._weighted or sources != [self._weighted]:
            return None
        base = self._records[self._weighted]
        width, tokens = int(base["ne"][0]), self._call.token_count
        offset = int(node["data"]) - int(base["data"])
        is_slot = node["ne"].tolist() == [width, tokens, 1, 1] and offset % (4 * width) == 0
        steps, wanted = node["nb"].tolist()[:2], [4, int(base["nb"][2])]
        # With one token the step from one to the next means nothing.
        if not is_slot or (steps != wanted if tokens > 1 else steps[0] != 4):
            return None
        slot = offset // (4 * width)
        return _Sum(slot + 1, is_single=True) if 0 <= slot < self._call.slot_count else None

    def _add(self, sources: list[int]) -> _Sum | None:
        if len(sources) != 2:
            return None
        first, second = (self._sums.get(source) for source in sources)
        if first is not None and second is not None:
            starts = first.count == 1 or not first.is_single
            follows = second.is_single and second.count == first.count + 1
            if not starts or not follows or first.has_residual or second.has_residual:
                return None
            return _Sum(second.count, is_single=False)
        total, outer = (first, sources[1]) if first is not None else (second, sources[0])
        return self._add_residual(total, outer)

    def _add_residual(self, total: _Sum | None, outer: int) -> _Sum | None:
        residual = self._outer(outer)
        if total is None or residual is None or not self._is_row(residual):
            return None
        is_whole = total.count == self._call.slot_count and not total.has_residual
        if not is_whole or (total.is_single and total.count != 1):
            return None
        self._residual = residual
        return _Sum(total.count, total.is_single, has_residual=True)
