"""The sum that ends a graph is recognised, has ggml's bits, and is never told if they differ."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from linkcpp.dispatch.combine import Ending, add_up, find_ending
from linkcpp.dispatch.experts import EarlyResult, ExpertRunner
from linkcpp.dispatch.graph import ExpertCall, Segment
from linkcpp.dispatch.program import BoundSum, Fetch
from linkcpp.dispatch.shared_device import DeviceCounters
from tests.dispatch.graphs import (
    HIDDEN,
    OPS,
    SLOTS,
    TOKENS,
    Builder,
    add,
    experts,
    slot,
    weighted,
)


def ending(builder: Builder) -> Ending | None:
    _, call, rest = builder.split()
    assert isinstance(call, ExpertCall)
    assert isinstance(rest, Segment)
    return find_ending(rest, call, OPS)


def name_of(tensor: Any) -> bytes:
    return bytes(tensor["name"])


@pytest.mark.parametrize("is_first", [True, False])
def test_weighting_adding_in_slot_order_and_a_residual_are_recognised(is_first: bool) -> None:
    builder = Builder()
    residual = builder.add("residual", (HIDDEN, TOKENS))
    rows = weighted(builder)
    total = add(builder, "sum", slot(builder, rows, 0), slot(builder, rows, 1))
    add(builder, "out", *((residual, total) if is_first else (total, residual)))
    found = ending(builder)
    assert found is not None
    assert found.residual is not None
    names = [name_of(tensor) for tensor in (found.weights, found.residual, found.result)]
    assert names == [b"weights", b"residual", b"out"]


def test_a_sum_without_a_residual_is_recognised() -> None:
    builder = Builder()
    rows = weighted(builder)
    add(builder, "sum", slot(builder, rows, 0), slot(builder, rows, 1))
    found = ending(builder)
    assert found is not None
    assert found.residual is None


def test_results_in_the_place_of_what_is_no_longer_needed_are_recognised() -> None:
    builder = Builder()
    residual = builder.add("residual", (HIDDEN, TOKENS))
    down, _ = experts(builder)
    rows = builder.node("weighted", HIDDEN, "MUL", down, builder.add("w", (1, SLOTS, TOKENS)))
    rows["data"] = down["data"]
    total = add(builder, "sum", slot(builder, rows, 0), slot(builder, rows, 1))
    add(builder, "out", total, residual)["data"] = residual["data"]
    assert ending(builder) is not None


def wrong_order(builder: Builder) -> None:
    rows = weighted(builder)
    add(builder, "sum", slot(builder, rows, 1), slot(builder, rows, 0))


def one_slot_twice(builder: Builder) -> None:
    rows = weighted(builder)
    add(builder, "sum", slot(builder, rows, 0), slot(builder, rows, 0))


def one_slot_only(builder: Builder) -> None:
    rows = weighted(builder)
    add(builder, "sum", slot(builder, rows, 0), builder.add("residual", (HIDDEN, TOKENS)))


def another_operation(builder: Builder) -> None:
    rows = weighted(builder)
    total = add(builder, "sum", slot(builder, rows, 0), slot(builder, rows, 1))
    builder.add("norm", (HIDDEN, TOKENS), op="RMS_NORM", src=(total,))


def two_residuals(builder: Builder) -> None:
    residual = builder.add("residual", (HIDDEN, TOKENS))
    rows = weighted(builder)
    total = add(builder, "sum", slot(builder, rows, 0), slot(builder, rows, 1))
    add(builder, "out", add(builder, "more", total, residual), residual)


def weights_of_rows(builder: Builder) -> None:
    down, _ = experts(builder)
    rows = builder.node("weighted", HIDDEN, "MUL", down, builder.add("w", (HIDDEN, SLOTS, TOKENS)))
    add(builder, "sum", slot(builder, rows, 0), slot(builder, rows, 1))


def weights_with_gaps(builder: Builder) -> None:
    down, _ = experts(builder)
    base = builder.add("base", (SLOTS, 1, TOKENS))
    weights = builder.add(
        "weights", (1, SLOTS, TOKENS), op="TRANSPOSE", src=(base,), view=base,
        nb=(4 * SLOTS, 4, 4 * SLOTS, 4 * SLOTS * TOKENS),
    )  # fmt: skip
    builder.nodes.insert(0, builder.nodes.pop())
    rows = builder.node("weighted", HIDDEN, "MUL", down, weights)
    add(builder, "sum", slot(builder, rows, 0), slot(builder, rows, 1))


def slot_with_gaps(builder: Builder) -> None:
    rows = weighted(builder)
    add(builder, "sum", slot(builder, rows, 0), slot(builder, rows, 1, step=8))


def not_to_be_computed(builder: Builder) -> None:
    rows = weighted(builder)
    add(builder, "sum", slot(builder, rows, 0), slot(builder, rows, 1))["flags"] = 0


def slot_overwritten(builder: Builder) -> None:
    rows = weighted(builder)
    slots = slot(builder, rows, 0), slot(builder, rows, 1)
    add(builder, "first", *slots)["data"] = rows["data"]
    add(builder, "sum", *slots)


def residual_overwritten(builder: Builder) -> None:
    rows = weighted(builder)
    residual = builder.add("residual", (HIDDEN, TOKENS))
    residual["data"] = rows["data"]
    total = add(builder, "sum", slot(builder, rows, 0), slot(builder, rows, 1))
    add(builder, "out", total, residual)


@pytest.mark.parametrize(
    "build",
    [
        wrong_order, one_slot_twice, one_slot_only, another_operation, two_residuals,
        weights_of_rows, weights_with_gaps, slot_with_gaps, not_to_be_computed, slot_overwritten,
        residual_overwritten,
    ],
)  # fmt: skip
def test_any_other_ending_is_left_to_the_backing_server(build: Any) -> None:
    builder = Builder()
    build(builder)
    assert ending(builder) is None


def test_rows_are_added_one_after_the_other_in_single_precision() -> None:
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((70, 5, 7)).astype(np.float32)
    weights = rng.standard_normal((70, 5, 1)).astype(np.float32)
    residual = rng.standard_normal((70, 7)).astype(np.float32)
    kept = rows.copy()
    found = add_up(rows, weights, residual)
    assert (rows == kept).all()
    for token in (0, 1, 31, 32, 69):
        for column in range(7):
            total = rows[token, 0, column] * weights[token, 0, 0]
            for number in range(1, 5):
                total = np.float32(total + rows[token, number, column] * weights[token, number, 0])
            assert found[token, column] == np.float32(total + residual[token, column])


class BackingServer:
    """Stands for a backing server that adds up in another way, which no CPU build does."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.asked: list[bytes] = []

    def queue(self, request: bytes) -> None:
        self.asked.append(request)

    def receive(self, size_bytes: int) -> memoryview:
        assert size_bytes == len(self.data)
        return memoryview(self.data)


def test_where_the_backing_server_differs_nothing_is_told_early_any_more() -> None:
    place = Fetch(0, b"get", 8, is_i32=False, is_dense=True, shape=(2, 1, 1), strides=(4, 8, 8))
    early = EarlyResult(BoundSum(place, None, place, address=1), memoryview(b"12345678"))
    for data, is_right in ((b"12345678", True), (b"12345679", False)):
        backing = BackingServer(data)
        device: Any = SimpleNamespace(backing=backing, counters=DeviceCounters())
        runner = ExpertRunner(device)
        assert runner.is_right(early, run_count=0) is is_right
        assert runner.is_right(early, run_count=1)
        assert backing.asked == [b"get"]
        call: Any = SimpleNamespace(sum=early.sum)
        assert bool(runner._summed(call)) is is_right
