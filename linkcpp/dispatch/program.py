"""A graph of llama-server as ready bytes for the backing server, and calls of experts between."""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from linkcpp.dispatch.combine import add_up, find_ending
from linkcpp.dispatch.graph import VIEW_OPS, ExpertCall, Part, Segment, split_graph
from linkcpp.dispatch.layout import Span, byte_span, has_no_gaps, lies_row_by_row
from linkcpp.dispatch.memory import RequestError, VirtualMemory
from linkcpp.engine import wire_messages as messages
from linkcpp.engine.ops import OpTable
from linkcpp.engine.rpc_socket import RpcSocket
from linkcpp.engine.wire import Command, Dialect, WireError, encode_request, request_header
from linkcpp.engine.wire_tensor import Graph, Tensors, build_graph, parse_graph
from linkcpp.worker.chain import Chain, KeyedChain
from linkcpp.worker.slabs import expert_tensor_name
from linkcpp.worker.step_graph import I32

Array = npt.NDArray[Any]


def expert_owner(name: bytes) -> tuple[int, str] | None:
    """Tell layer and part of an expert weight by its name, ``None`` for any other tensor."""
    return expert_tensor_name(name.decode("latin-1"))


@dataclass(frozen=True, slots=True)
class Fetch:
    """A tensor of f32 or i32 to be read: three dimensions, the first dense.

    ``key`` is where llama-server itself put it, 0 where the graph has written before it is read,
    maybe over something that llama-server put there. ``request`` asks the backing server for the
    ``span_bytes`` from its first to its last element.
    """

    key: int
    request: bytes
    span_bytes: int
    is_i32: bool
    is_dense: bool
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]

    def view(self, data: bytes | bytearray | memoryview) -> Array:
        """Return the elements as (third, second, first dimension)."""
        flat = np.frombuffer(data, np.int32 if self.is_i32 else np.float32)
        first, second, third = self.shape
        if self.is_dense:
            return flat.reshape(third, second, first)
        step1, step2, step3 = self.strides
        strided = np.lib.stride_tricks.as_strided(
            flat, (third, second, first), (step3, step2, step1), writeable=False
        )
        return np.ascontiguousarray(strided)


@dataclass(frozen=True, slots=True)
class BoundSum:
    """The sum that ends a graph: what it needs besides the rows, and its result.

    ``address`` is where llama-server believes the result to be.
    """

    weights: Fetch
    residual: Fetch | None
    result: Fetch
    address: int

    @property
    def fetches(self) -> tuple[Fetch, ...]:
        """What has to be read before ``compute``, in its order."""
        return (self.weights,) if self.residual is None else (self.weights, self.residual)

    def compute(self, rows: Array, read: Sequence[Array]) -> Array:
        """Return the result, (token, width), from rows of (pair, width) and what was read."""
        tokens, slots, _ = read[0].shape
        width = rows.shape[-1]
        residual = read[1].reshape(tokens, width) if len(read) > 1 else None
        return add_up(rows.reshape(tokens, slots, width), read[0], residual)


@dataclass(frozen=True, slots=True)
class BoundCall:
    """The experts of a layer between two graphs.

    ``ids`` and ``inputs`` are read before ``between`` runs, those numbered in ``late`` after it
    (0: ids, k + 1: input k). ``store_head`` with the rows behind it puts the result in its place.
    ``sum`` is what the graph after it is, where that was recognised.
    """

    layer: int
    chain: KeyedChain
    slot_count: int
    token_count: int
    ids: Fetch
    inputs: tuple[Fetch, ...]
    between: bytes | None
    late: frozenset[int]
    store_head: bytes
    sum: BoundSum | None = None


Step = bytes | BoundCall

_ANYWHERE = Span(0, 1 << 65)


@dataclass(slots=True, weakref_slot=True)
class Program:
    """What one graph becomes: requests for the backing server, and experts between them.

    ``follower`` is the program that came after it last time: most likely the next one again, so
    comparing with its ``payload`` spares looking it up by a hash over all bytes. It is not kept by
    that: programs that follow each other in a circle would be there for ever. ``run_count`` counts
    how often it was executed.
    """

    payload: bytes
    steps: tuple[Step, ...]
    run_count: int = 0
    follower: "weakref.ref[Program] | None" = None


class Binder(NamedTuple):
    """What a program is bound to; ``learn`` keeps a layer's chain and gives it a key."""

    memory: VirtualMemory
    ops: OpTable
    dialect: Dialect
    learn: Callable[[int, Chain], KeyedChain]


class _Bound(NamedTuple):
    """A binder, and where the parts of the graph that are bound so far write."""

    binder: Binder
    written: list[Span]

    def note(self, part: Part) -> None:
        """Take note of where a part writes."""
        if isinstance(part, ExpertCall):
            # What the next experts read is computed after these: no need to look for it.
            self.written[:] = [_ANYWHERE]
        elif self.written != [_ANYWHERE]:
            nodes = part.tensors[: len(part.node_ids)]
            names = map(self.binder.ops.op_name, nodes["op"].tolist())
            written = (node for node, op in zip(nodes, names, strict=True) if op not in VIEW_OPS)
            self.written.extend(map(byte_span, written))

    def fetch(self, tensor: Tensors) -> Fetch:
        """Prepare to read a tensor after what is bound so far."""
        place = byte_span(tensor)
        is_written = any(span.overlaps(place) for span in self.written)
        return _fetch(tensor, 0 if is_written else place.start, self.binder.memory)


def compile_program(payload: bytes, binder: Binder) -> Program:
    """Split a GRAPH_COMPUTE payload by owners and bind it to the backing server's memory.

    Raises:
        AllocationError: the backing server has too little memory.
        GraphError: its experts cannot be computed elsewhere.
        RequestError: the payload is not a graph, or a tensor lies outside of its buffer.
    """
    try:
        graph = parse_graph(payload)
    except WireError as error:
        raise RequestError(error.message) from error
    if graph.device:
        raise RequestError(f"There is no device {graph.device}.")
    bound = _Bound(binder, [])
    steps: list[Step] = []
    parts = split_graph(graph, binder.ops, expert_owner)
    for number, part in enumerate(parts):
        if isinstance(part, ExpertCall):
            # A part of a prompt of which no output is wanted has no rows in the last layer.
            if part.token_count:
                steps.append(_bind_call(part, _bind_sum(part, parts[number + 1 :], bound), bound))
            elif part.between:
                steps.append(_bind_segment(part.between, binder.memory))
        else:
            steps.append(_bind_segment(part, binder.memory))
        bound.note(part)
    return Program(payload, tuple(steps))


def _bind_segment(segment: Segment, memory: VirtualMemory) -> bytes:
    ids = np.array(segment.node_ids, np.uint64)
    graph = Graph(0, ids, memory.translate(segment.tensors))
    return encode_request(Command.GRAPH_COMPUTE, build_graph(graph))


def _bind_sum(call: ExpertCall, rest: list[Part], bound: _Bound) -> BoundSum | None:
    """Recognise the rest of a graph as a sum of the experts' rows."""
    if len(rest) != 1 or not isinstance(rest[0], Segment) or call.between is not None:
        return None
    ending = find_ending(rest[0], call, bound.binder.ops)
    if ending is None:
        return None
    return BoundSum(
        weights=bound.fetch(ending.weights),
        residual=None if ending.residual is None else bound.fetch(ending.residual),
        result=bound.fetch(ending.result),
        address=int(ending.result["data"]),
    )


def _bind_call(call: ExpertCall, total: BoundSum | None, bound: _Bound) -> BoundCall:
    binder = bound.binder
    memory = binder.memory
    output = memory.translate(_only(call.output))
    size_bytes = 4 * int(np.prod(call.output["ne"].astype(np.int64)))
    if not has_no_gaps(call.output):
        raise RequestError("The experts' result is not dense.")
    head = messages.build_set_tensor_head(
        binder.dialect, messages.SetTensor(output.tobytes(), 0, False)
    )
    return BoundCall(
        layer=call.layer,
        chain=binder.learn(call.layer, call.chain),
        slot_count=call.slot_count,
        token_count=call.token_count,
        ids=bound.fetch(call.ids),
        inputs=tuple(bound.fetch(tensor) for tensor in call.inputs),
        between=_bind_segment(call.between, memory) if call.between else None,
        late=call.late,
        store_head=request_header(Command.SET_TENSOR, len(head) + size_bytes) + head,
        sum=total,
    )


def _only(tensor: Tensors) -> Tensors:
    """Make the record plain memory: how it is computed is no longer of interest."""
    plain = np.array([tensor], tensor.dtype)
    for name in ("op", "op_params", "src", "view_src", "view_offs", "flags"):
        plain[name] = 0
    return plain


def _fetch(tensor: Tensors, key: int, memory: VirtualMemory) -> Fetch:
    real = memory.translate(_only(tensor))
    if not lies_row_by_row(tensor):
        raise RequestError("What the experts read does not lie row by row.")
    ne, nb = tensor["ne"].tolist(), tensor["nb"].tolist()
    start, end = byte_span(tensor)
    span = end - start
    # The span of a view may be more than its own elements: ask for it as a flat tensor.
    flat = real.copy()
    flat["ne"] = [span // 4, 1, 1, 1]
    flat["nb"] = [4, span, span, span]
    request = messages.GET_TENSOR.build(messages.GetTensor(flat.tobytes(), 0, span))
    return Fetch(
        key=key,
        request=encode_request(Command.GET_TENSOR, request),
        span_bytes=span,
        is_i32=int(tensor["type"]) == I32,
        is_dense=has_no_gaps(tensor),
        shape=(ne[0], ne[1], ne[2]),
        strides=(nb[0], nb[1], nb[2]),
    )


class CallInputs(NamedTuple):
    """What a call needs: ids (token, slot), inputs (row, width), and what its sum reads."""

    ids: Array
    inputs: tuple[Array, ...]
    summed: tuple[Array, ...]


def read_inputs(
    call: BoundCall, summed: Sequence[Fetch], backing: RpcSocket, known: Mapping[int, bytes]
) -> CallInputs:
    """Get what a call and its sum need, with one round trip at most.

    ``known`` has bytes that llama-server itself put at an address just before, so they need not be
    asked for.
    """
    fetches = [call.ids, *call.inputs]
    early = [number for number in range(len(fetches)) if number not in call.late]
    waiting = {number: ask(fetches[number], backing, known) for number in early}
    if call.between is not None:
        backing.queue(call.between)
    waiting |= {number: ask(fetches[number], backing, {}) for number in sorted(call.late)}
    rest = [ask(fetch, backing, known) for fetch in summed]
    found = {number: answer() for number, answer in waiting.items()}
    # ids are (slot, token), a two-dimensional tensor: the view has a leading 1.
    ids = found[0].reshape(call.token_count, call.slot_count)
    inputs = tuple(
        found[number + 1].reshape(-1, fetch.shape[0]) for number, fetch in enumerate(call.inputs)
    )
    return CallInputs(ids, inputs, tuple(answer() for answer in rest))


def ask(fetch: Fetch, backing: RpcSocket, known: Mapping[int, bytes]) -> Callable[[], Array]:
    """Ask for a tensor unless it is known; the functions returned wait, in the order of asking."""
    data = known.get(fetch.key)
    if data is not None and len(data) == fetch.span_bytes:
        return functools.partial(fetch.view, data)
    backing.queue(fetch.request)
    return lambda: fetch.view(backing.receive(fetch.span_bytes))
