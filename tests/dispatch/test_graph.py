"""Graphs are split by experts, and what is not row-wise is refused by name."""

import pytest

from linkcpp.dispatch.graph import ExpertCall, GraphError, Segment
from tests.dispatch.graphs import (
    EXPERTS,
    HIDDEN,
    SLOTS,
    TOKENS,
    WIDTH,
    Builder,
    finish,
    fused,
    opening,
    the_call,
)


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


def scaled_and_overwritten(builder: Builder, *, is_before: bool) -> None:
    rows, ids = opening(builder)
    weight = builder.weight("up", HIDDEN, WIDTH, EXPERTS)
    up = builder.node("up", WIDTH, "MUL_MAT_ID", weight, rows, ids)
    scale = builder.add("scale", (1, SLOTS, TOKENS))
    other = builder.add("other", (1, SLOTS, TOKENS))
    builder.add("copy", (1, SLOTS, TOKENS), op="CPY", src=(other, scale), view=scale)
    copy = builder.nodes.pop()
    scaled = builder.node("scaled", WIDTH, "MUL", up, scale)
    builder.nodes.insert(len(builder.nodes) - is_before, copy)
    finish(builder, scaled, ids)


def test_an_input_that_is_overwritten_before_an_expert_reads_it_is_refused_by_name() -> None:
    builder = Builder()
    scaled_and_overwritten(builder, is_before=True)
    with pytest.raises(GraphError, match="copy overwrites scale between the experts"):
        builder.split()


def test_an_input_that_is_overwritten_after_it_was_read_is_taken_before() -> None:
    builder = Builder()
    scaled_and_overwritten(builder, is_before=False)
    call = the_call(builder.split())
    assert call.late == set()
    assert call.between is not None


def test_a_name_for_the_terminal_is_refused_in_one_line() -> None:
    builder = Builder()
    glu, ids = fused(builder)
    finish(builder, builder.node("x\nforged \x1b[31m", WIDTH, "CUMSUM", glu), ids)
    with pytest.raises(GraphError, match="forged") as refusal:
        builder.split()
    assert refusal.value.message.isprintable()


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
