"""Graphs as llama.cpp sends them, for tests."""

from typing import Any

import numpy as np

from linkcpp.dispatch.graph import ExpertCall, Part, split_graph
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
            offset: int = 0, nb: tuple[int, ...] = ()) -> Any:  # fmt: skip
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
            record["nb"], record["data"] = nb or view["nb"], int(view["data"]) + offset
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

    def graph(self) -> Graph:
        return Graph(0, np.array(self.nodes, np.uint64), np.array(self.records))

    def split(self) -> list[Part]:
        return split_graph(self.graph(), OPS, expert_owner)


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


def experts(builder: Builder) -> tuple[Any, Any]:
    """The experts' rows and the ids by which they were chosen."""
    glu, ids = fused(builder)
    down = builder.node(
        "down", HIDDEN, "MUL_MAT_ID", builder.weight("down", WIDTH, HIDDEN, EXPERTS), glu, ids
    )
    return down, ids


def weighted(builder: Builder) -> Any:
    down, _ = experts(builder)
    weights = builder.add("weights", (1, SLOTS, TOKENS))
    return builder.node("weighted", HIDDEN, "MUL", down, weights)


def slot(builder: Builder, rows: Any, number: int, *, step: int = 4) -> Any:
    row = 4 * HIDDEN * SLOTS
    return builder.add(
        f"slot {number}", (HIDDEN, TOKENS), op="VIEW", src=(rows,), view=rows,
        offset=4 * HIDDEN * number, nb=(step, row, row * TOKENS, row * TOKENS),
    )  # fmt: skip


def add(builder: Builder, name: str, *sources: Any) -> Any:
    return builder.add(name, (HIDDEN, TOKENS), op="ADD", src=sources)


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
