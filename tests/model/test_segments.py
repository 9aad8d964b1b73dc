"""Which experts: what people write is read, merged, and held to the model by name."""

import itertools
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from linkcpp.common.errors import LinkcppError
from linkcpp.model.slices.segments import (
    Segment,
    SegmentRequest,
    describe,
    merge_ranges,
    parse_ranges,
    parse_segment,
    resolve,
)

COUNTS = {1: 8, 2: 8, 3: 4}


def segments(*texts: str) -> list[tuple[int, int, int]]:
    found = resolve([parse_segment(text) for text in texts], COUNTS, 4)
    return [(segment.layer, segment.first, segment.last) for segment in found]


def test_layers_times_experts_is_what_a_segment_means() -> None:
    assert segments("1-2:0-3") == [(1, 0, 3), (2, 0, 3)]
    assert segments("3:0,2-3") == [(3, 0, 0), (3, 2, 3)]


def test_all_means_what_there_is() -> None:
    assert segments("all:all") == [(1, 0, 7), (2, 0, 7), (3, 0, 3)]


def test_overlapping_and_touching_segments_are_joined() -> None:
    assert segments("1:0-2", "1:3-4", "1:4-6", "2:7") == [(1, 0, 6), (2, 7, 7)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0:1", "Layer 0 is dense"),
        ("4:0", "layers 0 to 3, not 4"),
        ("0-999999:0", "layers 0 to 3, not 0-999999"),
        ("3:2-4", "Layer 3 has experts 0 to 3, not 2-4"),
        ("1", "is not a segment"),
        ("1:", "does not name experts"),
        ("x:0", "does not name layers"),
        ("1:3-2", "runs backwards"),
        ("1:1-", "does not name experts"),
        ("1:-1", "does not name experts"),
        ("1:1234567", "does not name experts"),
        ("1:\u0663-", "does not name experts"),
    ],
)
def test_what_is_not_there_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(LinkcppError, match=words) as caught:
        segments(text)
    assert caught.value.hint


def test_an_empty_slice_is_refused() -> None:
    with pytest.raises(LinkcppError, match="would be empty"):
        resolve([], COUNTS, 4)
    with pytest.raises(LinkcppError, match="would be empty"):
        resolve([SegmentRequest(None, None)], {}, 4)


def test_what_is_named_over_and_over_costs_no_more_than_once() -> None:
    counts = dict.fromkeys(range(64), 128)
    text = ",".join(["0-63"] * 600) + ":" + ",".join(["0"] * 1490)
    tracemalloc.start()
    try:
        found = resolve([parse_segment(text)], counts, 64)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == tuple(Segment(layer=layer, first=0, last=0) for layer in range(64))
    assert peak_bytes < 2**21


def test_more_pieces_than_any_model_needs_are_refused() -> None:
    counts = dict.fromkeys(range(64), 8192)
    every_other = tuple((expert, expert) for expert in range(0, 4096, 2))
    with pytest.raises(LinkcppError, match="more than 131072 pieces") as caught:
        resolve([SegmentRequest(None, every_other)] * 2, counts, 64)
    assert caught.value.hint
    assert len(resolve([SegmentRequest(None, every_other[:1000])] * 2, counts, 64)) == 64_000


_RANGES = st.none() | st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 7)).map(lambda pair: (min(pair), max(pair))),
    min_size=1,
    max_size=6,
).map(tuple)


@given(st.lists(st.builds(SegmentRequest, _RANGES, _RANGES), min_size=1, max_size=4))
def test_requests_mean_every_expert_that_they_name_and_no_other(
    requests: list[SegmentRequest],
) -> None:
    named = {
        (layer, expert)
        for request in requests
        for first_layer, last_layer in request.layers or ((0, 7),)
        for layer in range(first_layer, last_layer + 1)
        for first, last in request.experts or ((0, 7),)
        for expert in range(first, last + 1)
    }
    found = resolve(requests, dict.fromkeys(range(8), 8), 8)
    assert {(s.layer, e) for s in found for e in range(s.first, s.last + 1)} == named
    assert list(found) == sorted(found, key=lambda s: (s.layer, s.first))


@pytest.mark.parametrize(
    ("layer", "first", "last"), [(-1, 0, 0), (2**20, 0, 0), (0, -1, 0), (0, 0, 2**20), (0, 2, 1)]
)
def test_a_segment_that_no_model_has_is_no_segment(layer: int, first: int, last: int) -> None:
    with pytest.raises(ValidationError):
        Segment(layer=layer, first=first, last=last)


@given(
    st.dictionaries(
        st.integers(0, 30), st.sets(st.integers(0, 63), min_size=1), min_size=1, max_size=8
    )
)
def test_what_is_described_is_read_back(chosen: dict[int, set[int]]) -> None:
    wanted = tuple(
        Segment(layer=layer, first=first, last=last)
        for layer, experts in sorted(chosen.items())
        for first, last in merge_ranges((expert, expert) for expert in experts)
    )
    requests = [parse_segment(text) for text in describe(wanted)]
    assert resolve(requests, dict.fromkeys(chosen, 64), 31) == wanted


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10))))
def test_merged_ranges_have_the_same_experts_and_do_not_touch(
    drawn: list[tuple[int, int]],
) -> None:
    ranges = [(first, first + more) for first, more in drawn]
    merged = merge_ranges(ranges)
    assert {e for a, b in merged for e in range(a, b + 1)} == {
        e for a, b in ranges for e in range(a, b + 1)
    }
    assert all(later[0] > earlier[1] + 1 for earlier, later in itertools.pairwise(merged))


def test_all_is_a_word_and_not_a_number() -> None:
    assert parse_ranges("all", "layers") is None
    assert parse_ranges(" 1 - 2 ".replace(" ", ""), "layers") == ((1, 2),)
