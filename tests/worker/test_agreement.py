"""Rows against their reference: equal bits, small differences, lies."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from linkcpp.worker.agreement import (
    MAX_RELATIVE_ERROR,
    MIN_COSINE,
    Agreement,
    Verdict,
    compare_rows,
    merge,
    worst,
)
from linkcpp.worker.frames import Rows

ANY_FLOAT = st.floats(width=32, allow_nan=True, allow_infinity=True)
SHAPES = array_shapes(min_dims=2, max_dims=2, max_side=8)


def rows(seed: int = 0, count: int = 3, width: int = 64) -> Rows:
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


@given(arrays(np.float32, SHAPES, elements=ANY_FLOAT))
def test_equal_bits_are_exact_whatever_they_mean(values: Rows) -> None:
    found = compare_rows(values, values.copy())
    assert found.verdict == Verdict.EXACT
    assert (found.least_cosine, found.largest_difference, found.relative_error) == (1.0, 0.0, 0.0)


@given(
    st.data(),
    arrays(np.float32, SHAPES, elements=ANY_FLOAT),
)
def test_any_two_arrays_can_be_compared_and_one_bit_is_seen(data: st.DataObject, a: Rows) -> None:
    b = data.draw(arrays(np.float32, a.shape, elements=ANY_FLOAT))
    found = compare_rows(a, b)
    assert (found.verdict == Verdict.EXACT) == (a.tobytes() == b.tobytes())
    assert -1.0 <= found.least_cosine <= 1.0
    assert found.largest_difference is None or found.largest_difference >= 0


def test_the_last_bit_of_one_value_is_not_exact_but_equivalent() -> None:
    reference = rows()
    found = reference.copy()
    found[1, 5] = np.nextafter(found[1, 5], np.float32(9))
    agreement = compare_rows(found, reference)
    assert agreement.verdict == Verdict.EQUIVALENT
    assert agreement.largest_difference == abs(float(found[1, 5]) - float(reference[1, 5]))


@pytest.mark.parametrize("factor", [2.0, 0.5, -1.0, 0.0])
def test_a_row_of_another_length_differs_though_its_cosine_may_be_one(factor: float) -> None:
    reference = rows()
    assert compare_rows((reference * np.float32(factor)), reference).verdict == Verdict.DIFFERS


def test_one_wrong_row_among_many_is_found() -> None:
    reference = rows(count=50)
    found = reference.copy()
    found[31] = rows(seed=1, count=1)
    assert compare_rows(found, reference).verdict == Verdict.DIFFERS


@given(st.floats(min_value=0, max_value=0.1))
def test_the_bound_is_the_targets_cosine(angle: float) -> None:
    reference = np.array([[1.0, 0.0]], np.float32)
    turned = np.array([[np.cos(angle), np.sin(angle)]], np.float32)
    agreement = compare_rows(turned, reference)
    # Where both sides of the bound are apart by more than the rounding of f32.
    if abs(np.cos(angle) - MIN_COSINE) > 1e-6:
        is_close = np.cos(angle) > MIN_COSINE
        assert (agreement.verdict != Verdict.DIFFERS) == is_close
    assert pytest.approx(0.01414, abs=1e-5) == MAX_RELATIVE_ERROR


def test_values_of_any_size_are_compared() -> None:
    huge = rows() * np.float32(1e37)
    tiny = rows() * np.float32(1e-38)
    for reference in (huge, tiny):
        found = (reference * np.float32(1.0001)).astype(np.float32)
        assert compare_rows(found, reference).verdict == Verdict.EQUIVALENT


def test_rows_that_are_not_finite_differ() -> None:
    reference = rows()
    found = reference.copy()
    found[0, 0] = np.nan
    agreement = compare_rows(found, reference)
    assert agreement.verdict == Verdict.DIFFERS
    assert agreement.largest_difference is None


def test_rows_of_zeros_agree_only_with_zeros() -> None:
    zeros = np.zeros((1, 4), np.float32)
    assert compare_rows(zeros, zeros).verdict == Verdict.EXACT
    assert compare_rows(-zeros, zeros).verdict == Verdict.EQUIVALENT
    assert compare_rows(zeros + 1, zeros).verdict == Verdict.DIFFERS


def test_rows_of_another_shape_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="shape"):
        compare_rows(rows(count=2), rows(count=3))


def test_several_comparisons_are_as_good_as_the_worst() -> None:
    reference = rows()
    exact = compare_rows(reference, reference)
    close = compare_rows(reference * np.float32(1.0001), reference)
    wrong = compare_rows(-reference, reference)
    assert merge([exact, close]).verdict == Verdict.EQUIVALENT
    total = merge([wrong, exact, close])
    assert total.verdict == Verdict.DIFFERS
    assert total.row_count == 9
    assert total.least_cosine == wrong.least_cosine
    assert total.largest_difference == wrong.largest_difference
    assert merge([]).verdict == worst([]) == Verdict.EXACT
    broken = Agreement(
        verdict=Verdict.DIFFERS,
        row_count=1,
        least_cosine=-1,
        largest_difference=None,
        relative_error=None,
    )
    assert merge([exact, broken]).largest_difference is None
