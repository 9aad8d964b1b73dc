"""Counts of what experts were chosen, and the file that keeps them."""

import asyncio
from collections import Counter
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from linkcpp.dispatch.tally import RoutingTally, kept_tally
from linkcpp.planning.routing_counts import RoutingCounts, parse_counts

EXPERTS = {1: 8, 3: 5}
Steps = list[tuple[int, list[int]]]


def ids(*experts: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.int32]]":
    return np.array([experts], np.int32)


def steps() -> st.SearchStrategy[Steps]:
    def of(layer: int) -> st.SearchStrategy[tuple[int, list[int]]]:
        chosen = st.lists(st.integers(0, EXPERTS[layer] - 1), max_size=60)
        return st.tuples(st.just(layer), chosen)

    return st.lists(st.sampled_from(sorted(EXPERTS)).flatmap(of), max_size=20)


@given(steps())
@settings(deadline=None)
def test_every_pair_counts_once_however_many_come_together(taken: Steps) -> None:
    tally = RoutingTally(EXPERTS, "d")
    wanted: dict[int, Counter[int]] = {layer: Counter() for layer in EXPERTS}
    for layer, experts in taken:
        tally.add(layer, ids(*experts))
        wanted[layer].update(experts)
    assert tally.counts().layers == {layer: dict(counts) for layer, counts in wanted.items()}


def test_counts_are_in_the_form_that_plan_reads() -> None:
    tally = RoutingTally(EXPERTS, "d")
    tally.add(3, ids(4, 0, 4))
    text = tally.counts().model_dump_json()
    assert parse_counts(text, source="x") == tally.counts()
    assert parse_counts(text, source="x").layers == {1: {}, 3: {0: 1, 4: 2}}


def run(path: Path, digest: str | None, *chosen: int) -> RoutingCounts:
    """One life of a process that computes in layer 3."""

    async def live() -> RoutingCounts:
        tally = RoutingTally(EXPERTS, digest)
        async with kept_tally(tally, path):
            if chosen:
                tally.add(3, ids(*chosen))
        return tally.counts()

    return asyncio.run(live())


def test_the_next_process_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    run(path, "d", 1, 2)
    assert run(path, "d", 2).layers[3] == {1: 1, 2: 2}
    assert parse_counts(path.read_bytes(), source="x").layers[3] == {1: 1, 2: 2}


def test_counts_of_another_model_are_not_gone_on_from_and_stay_until_there_are_new_ones(
    tmp_path: Path,
) -> None:
    path = tmp_path / "counts.json"
    run(path, "d", 1)
    assert run(path, "e").layers[3] == {}
    assert parse_counts(path.read_bytes(), source="x").model_digest == "d"
    run(path, "e", 2)
    saved = parse_counts(path.read_bytes(), source="x")
    assert (saved.model_digest, saved.layers[3]) == ("e", {2: 1})


def test_a_damaged_file_is_counted_anew_from(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    path.write_bytes(b"\x00{")
    assert run(path, "d", 0).layers[3] == {0: 1}
    beyond = RoutingCounts(model_digest="d", layers={3: {1: 2, 5: 7}, 9: {0: 1}})
    path.write_text(beyond.model_dump_json())
    assert run(path, "d").layers == {1: {}, 3: {1: 2}}


def test_a_file_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert run(blocked / "counts.json", "d", 0).layers[3] == {0: 1}
