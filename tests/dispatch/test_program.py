"""A program reads what is there when it runs, and nothing that was there before."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from linkcpp.dispatch.memory import RequestError, TensorFields, VirtualMemory
from linkcpp.dispatch.program import Binder, BoundCall, Fetch, compile_program
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
    add,
    experts,
    finish,
    opening,
    slot,
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


@pytest.mark.parametrize("is_copied", [True, False])
def test_rows_over_which_the_graph_copies_others_are_read_again(is_copied: bool) -> None:
    builder = Builder()
    sent, ids = opening(builder)
    if is_copied:
        other = builder.add("other", (HIDDEN, 1, TOKENS))
        builder.add("copy", (HIDDEN, 1, TOKENS), op="CPY", src=(other, sent), view=sent)
    weight = builder.weight("up", HIDDEN, WIDTH, EXPERTS)
    finish(builder, builder.node("up", WIDTH, "MUL_MAT_ID", weight, sent, ids), ids)
    assert (the_call(builder).inputs[0].key == 0) is is_copied


@pytest.mark.parametrize("is_copied", [True, False])
def test_a_residual_is_known_where_only_the_sum_itself_takes_its_place(is_copied: bool) -> None:
    builder = Builder()
    residual = builder.add("residual", (HIDDEN, TOKENS))
    if is_copied:
        other = builder.add("other", (HIDDEN, TOKENS))
        builder.add("copy", (HIDDEN, TOKENS), op="CPY", src=(other, residual), view=residual)
    down, _ = experts(builder)
    rows = builder.node("weighted", HIDDEN, "MUL", down, builder.add("w", (1, SLOTS, TOKENS)))
    total = add(builder, "sum", slot(builder, rows, 0), slot(builder, rows, 1))
    add(builder, "out", total, residual)["data"] = residual["data"]
    found = the_call(builder).sum
    assert found is not None
    assert found.residual is not None
    assert found.residual.key == (0 if is_copied else int(residual["data"]))


def permuted(builder: Builder, width: int) -> Any:
    """A view as (width, slot, token) of what lies as (width, token, slot)."""
    base = builder.add("base", (width, TOKENS, SLOTS))
    row = 4 * width
    view = builder.add(
        "permuted", (width, SLOTS, TOKENS), op="PERMUTE", src=(base,), view=base,
        nb=(4, row * TOKENS, row, row * TOKENS * SLOTS),
    )  # fmt: skip
    builder.nodes.insert(0, builder.nodes.pop())
    return view


def is_read_in_order(fetch: Fetch) -> bool:
    width = fetch.shape[0]
    data = np.arange(width * SLOTS * TOKENS, dtype=np.float32)
    wanted = data.reshape(SLOTS, TOKENS, width).transpose(1, 0, 2)
    return np.array_equal(fetch.view(data.tobytes()), wanted)


def test_rows_that_lie_in_another_order_are_read_in_that_of_their_slots() -> None:
    builder = Builder()
    _, ids = opening(builder)
    rows = permuted(builder, HIDDEN)
    weight = builder.weight("up", HIDDEN, WIDTH, EXPERTS)
    finish(builder, builder.node("up", WIDTH, "MUL_MAT_ID", weight, rows, ids), ids)
    assert is_read_in_order(the_call(builder).inputs[0])


def test_weights_that_lie_in_another_order_are_read_in_that_of_their_slots() -> None:
    builder = Builder()
    down, _ = experts(builder)
    rows = builder.node("weighted", HIDDEN, "MUL", down, permuted(builder, 1))
    add(builder, "sum", slot(builder, rows, 0), slot(builder, rows, 1))
    found = the_call(builder).sum
    assert found is not None
    assert is_read_in_order(found.weights)


@pytest.mark.parametrize("step", [4 * HIDDEN + 1, 0, 4 * HIDDEN - 4])
def test_rows_at_odd_steps_or_over_one_another_are_refused_at_once(step: int) -> None:
    builder = Builder()
    rows, ids = opening(builder)
    rows["nb"] = [4, step, step, step * TOKENS]
    weight = builder.weight("up", HIDDEN, WIDTH, EXPERTS)
    finish(builder, builder.node("up", WIDTH, "MUL_MAT_ID", weight, rows, ids), ids)
    with pytest.raises(RequestError, match="row by row"):
        the_call(builder)


def test_a_tensor_whose_name_is_for_the_terminal_is_refused_in_one_line() -> None:
    backing: Any = None
    memory = VirtualMemory(backing)
    buffer = memory.allocate(16)
    fields = TensorFields(buffer, buffer, 32, b"x\nforged \x1b[31m")
    with pytest.raises(RequestError, match="forged") as refusal:
        memory.locate(fields)
    assert refusal.value.message.isprintable()


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
