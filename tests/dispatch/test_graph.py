"""Graphs are split by experts, and what is not row-wise is refused by name."""

from typing import Any

import numpy as np
import pytest

from linkcpp.dispatch.graph import ExpertCall, GraphError, Part, Segment, split_graph
from linkcpp.dispatch.program import expert_owner
from linkcpp.engine.ops import op_table_of_version
from linkcpp.engine.records import RpcVersion
from linkcpp.engine.wire_tensor import FLAG_COMPUTE, Graph, empty_tensors

OPS = op_table_of_version(RpcVersion(major=7, minor=0, patch=0))
F32, I32 = 0, 26
HIDDEN, WIDTH, EXPERTS, SLOTS, TOKENS = 64, 32, 8, 2, 3


class Builder:
    """A graph as llama.cpp would send it, each tensor with memory of its own."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.nodes: list[int] = []
        self.address = 0x10000

    def add(self, name: str, ne: tuple[int, ...], *, kind: int = F32, op: str = "NONE",
            src: tuple[Any, ...] = (), params: tuple[int, ...] = (), view: Any = None,
            offset: int = 0) -> Any:  # fmt: skip
        record = empty_tensors(1)[0]
        shape = (*ne, *(1,) * (4 - len(ne)))
        record["id"] = 0x500 + 16 * len(self.records)
        record["name"] = name.encode()
        record["type"], record["ne"] = kind, shape
        record["op"] = OPS.op_number(op)
        record["buffer"] = 1
        for number, source in enumerate(src):
            record["src"][number] = source["id"]
        record["op_params"][: len(params)] = params
        if view is not None:
            record["nb"], record["data"] = view["nb"], int(view["data"]) + offset
            record["view_src"], record["view_offs"] = view["id"], offset
        else:
            record["nb"] = [4, *(4 * int(np.prod(shape[:k])) for k in (1, 2, 3))]
            record["data"] = self.address
            self.address += 4 * int(np.prod(shape)) + 64
        if op != "NONE":
            record["flags"] = FLAG_COMPUTE
            self.nodes.append(int(record["id"]))
        self.records.append(record)
        return record

    def weight(self, part: str, *ne: int, layer: int = 0) -> Any:
        return self.add(f"blk.{layer}.ffn_{part}_exps.weight", ne)

    def node(self, name: str, width: int, op: str, *src: Any, **more: Any) -> Any:
        return self.add(name, (width, SLOTS, TOKENS), op=op, src=src, **more)

    def split(self) -> list[Part]:
        graph = Graph(0, np.array(self.nodes, np.uint64), np.array(self.records))
        return split_graph(graph, OPS, expert_owner)


def opening(builder: Builder) -> tuple[Any, Any]:
    logits = builder.add("logits", (EXPERTS, TOKENS))
    rows = builder.add("rows", (HIDDEN, 1, TOKENS))
    sort = builder.add("sort", (EXPERTS, TOKENS), kind=I32, op="ARGSORT", src=(logits,))
    ids = builder.add("ids", (SLOTS, TOKENS), kind=I32, op="VIEW", src=(sort,), view=sort)
    return rows, ids


def fused(builder: Builder) -> tuple[Any, Any]:
    rows, ids = opening(builder)
    both = builder.node(
        "both", 2 * WIDTH, "MUL_MAT_ID",
        builder.weight("gate_up", HIDDEN, 2 * WIDTH, EXPERTS), rows, ids,
    )  # fmt: skip
    gate = builder.node("gate", WIDTH, "VIEW", both, view=both)
    up = builder.node("up", WIDTH, "VIEW", both, view=both, offset=4 * WIDTH)
    return builder.node("glu", WIDTH, "GLU", gate, up, params=(2,)), ids


def finish(builder: Builder, hidden: Any, ids: Any) -> Any:
    down = builder.node(
        "down", HIDDEN, "MUL_MAT_ID", builder.weight("down", WIDTH, HIDDEN, EXPERTS), hidden, ids
    )
    builder.node("weighted", HIDDEN, "SCALE", down)
    return down


def the_call(parts: list[Part]) -> ExpertCall:
    calls = [part for part in parts if isinstance(part, ExpertCall)]
    assert len(calls) == 1
    return calls[0]


def test_a_fused_gate_and_up_is_learned_with_its_views() -> None:
    builder = Builder()
    finish(builder, *fused(builder))
    before, call, after = builder.split()
    assert isinstance(before, Segment)
    assert isinstance(after, Segment)
    assert isinstance(call, ExpertCall)
    assert [step.op for step in call.chain.steps] == [
        "MUL_MAT_ID", "VIEW", "VIEW", "GLU", "MUL_MAT_ID",
    ]  # fmt: skip
    assert [step.offset for step in call.chain.steps] == [0, 0, WIDTH, 0, 0]
    assert call.chain.steps[3].function == "SWIGLU"
    assert (call.slot_count, call.token_count) == (SLOTS, TOKENS)
    # What the experts left behind is plain memory for the rest.
    left = after.tensors[after.tensors["name"] == b"down"][0]
    assert (left["op"], int(left["src"].sum()), left["flags"]) == (0, 0, 0)


def test_rows_that_were_weighted_for_each_slot_are_taken_per_pair() -> None:
    builder = Builder()
    rows, ids = opening(builder)
    spread = builder.add("spread", (HIDDEN, SLOTS, TOKENS), op="REPEAT", src=(rows,))
    weights = builder.weight("up", HIDDEN, WIDTH, EXPERTS)
    up = builder.node("up", WIDTH, "MUL_MAT_ID", weights, spread, ids)
    finish(builder, builder.node("act", WIDTH, "UNARY", up, params=(10,)), ids)
    call = the_call(builder.split())
    assert call.chain.inputs[0].per_pair
    assert call.chain.steps[1].function == "SILU"


def test_a_scale_computed_between_the_experts_is_fetched_after_it() -> None:
    builder = Builder()
    rows, ids = opening(builder)
    up = builder.node("up", WIDTH, "MUL_MAT_ID", builder.weight("up", HIDDEN, WIDTH, EXPERTS),
                      rows, ids)  # fmt: skip
    table = builder.add("blk.0.ffn_up_exps.scale", (1, EXPERTS, TOKENS))
    scale = builder.add("scale", (1, SLOTS, TOKENS), op="GET_ROWS", src=(table, ids))
    finish(builder, builder.node("scaled", WIDTH, "MUL", up, scale), ids)
    call = the_call(builder.split())
    assert call.late == {2}
    assert call.between is not None
    assert [entry.per_pair for entry in call.chain.inputs] == [False, True]


def test_an_operation_over_all_rows_is_refused_by_name() -> None:
    builder = Builder()
    glu, ids = fused(builder)
    finish(builder, builder.node("mixed", WIDTH, "CUMSUM", glu), ids)
    with pytest.raises(GraphError, match=r"mixed of layer 0 \(CUMSUM\)"):
        builder.split()


def test_a_value_that_leaves_the_experts_before_their_end_is_refused_by_name() -> None:
    builder = Builder()
    glu, ids = fused(builder)
    finish(builder, glu, ids)
    builder.node("thief", WIDTH, "SCALE", glu)
    with pytest.raises(GraphError, match="thief needs glu"):
        builder.split()


def test_a_view_across_rows_is_refused_by_name() -> None:
    builder = Builder()
    rows, ids = opening(builder)
    weight = builder.weight("gate_up", HIDDEN, 2 * WIDTH, EXPERTS)
    both = builder.node("both", 2 * WIDTH, "MUL_MAT_ID", weight, rows, ids)
    bad = builder.node("bad", WIDTH, "VIEW", both, view=both, offset=4 * (2 * WIDTH - 1))
    finish(builder, bad, ids)
    with pytest.raises(GraphError, match=r"bad of layer 0 .*across rows"):
        builder.split()


def test_a_graph_without_experts_is_one_segment_and_an_unsound_one_is_refused() -> None:
    builder = Builder()
    opening(builder)
    assert [type(part) for part in builder.split()] == [Segment]
    builder.nodes.append(0xDEAD)
    with pytest.raises(GraphError, match="does not describe"):
        builder.split()
