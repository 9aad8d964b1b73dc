"""A program reads what is there when it runs, and nothing that was there before."""

from types import SimpleNamespace
from typing import Any

from linkcpp.dispatch.program import Binder, BoundCall, compile_program
from linkcpp.engine.wire import DIALECT_7
from linkcpp.engine.wire_tensor import build_graph
from linkcpp.worker.chain import KeyedChain
from tests.dispatch.graphs import (
    EXPERTS,
    HIDDEN,
    OPS,
    SLOTS,
    TOKENS,
    WIDTH,
    Builder,
    finish,
    opening,
)


def the_call(builder: Builder) -> BoundCall:
    memory: Any = SimpleNamespace(translate=lambda tensors: tensors)
    binder = Binder(memory, OPS, DIALECT_7, KeyedChain.of)
    program = compile_program(build_graph(builder.graph()), binder)
    return next(step for step in program.steps if isinstance(step, BoundCall))


def test_rows_that_the_graph_computes_in_the_place_of_what_was_sent_are_read_again() -> None:
    builder = Builder()
    sent, ids = opening(builder)
    rows = builder.add("scaled", (HIDDEN, 1, TOKENS), op="SCALE", src=(sent,))
    rows["data"] = sent["data"]
    up = builder.node(
        "up", WIDTH, "MUL_MAT_ID", builder.weight("up", HIDDEN, WIDTH, EXPERTS), rows, ids
    )
    finish(builder, up, ids)
    call = the_call(builder)
    assert call.inputs[0].key == 0
    assert call.ids.key == 0


def test_rows_that_were_sent_are_known() -> None:
    builder = Builder()
    sent, ids = opening(builder)
    up = builder.node(
        "up", WIDTH, "MUL_MAT_ID", builder.weight("up", HIDDEN, WIDTH, EXPERTS), sent, ids
    )
    finish(builder, up, ids)
    call = the_call(builder)
    assert call.inputs[0].key == int(sent["data"])
    assert (call.slot_count, call.token_count) == (SLOTS, TOKENS)
