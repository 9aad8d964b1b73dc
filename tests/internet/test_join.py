"""Laptops behind NAT serve a model through a relay on 443, bit for bit as one process does."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from linkcpp.launch.experts.records import WorkerState
from tests.internet.asking import Answer
from tests.internet.world import NAME, World, world
from tests.launch.swarm import one_process, tokens, wait_until
from tests.support import models
from tests.support.engines import prebuilt_engine

pytestmark = pytest.mark.slow

COUNT = 200
# Enough for a line that is cut again and again.
FEW = 60
MODEL = "mixture"
# Just enough for the backbone: every expert must go to a node.
BARE = ("--memory", "526MB", "--reserve", "0")
# Header, hashes and records that come with a slice.
MAX_EXTRA_BYTES = 256 * 1024
# What a home offers when nothing runs there, nearly.
HOME_OFFER_BYTES = 250 * 10**6


@pytest.fixture(scope="module")
def model() -> Path:
    return models.qwen3moe()


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answer:
    log = tmp_path_factory.mktemp("one") / "log"
    with one_process(prebuilt_engine(), model, log) as url:
        return Answer(json.loads(json.dumps(tokens(url, count=COUNT))), failed_call_count=0)


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("wan"), prebuilt_engine(), model, MODEL) as made:
        yield made


def worker(wan: World, name: str) -> WorkerState:
    return next(entry for entry in wan.experts().workers if entry.node_name == name)


def all_are_used(wan: World, url: str) -> bool:
    return all(wan.is_used(url, name) for name in wan.homes)


def all_go_through(wan: World, gateway_id: str) -> bool:
    ways = [worker(wan, name).way or "" for name in wan.homes]
    return all("relay" in way and gateway_id in way for way in ways)


@pytest.fixture(scope="module")
def url_of_hubs_model(wan: World) -> str:
    """The model is at the hub only, and every expert at one node only."""
    plan = wan.plan(MODEL, *BARE)
    return wan.launch(plan)


def test_a_model_that_only_the_hub_has_is_served_exactly_by_two_homes(
    wan: World, url_of_hubs_model: str, reference: Answer, model: Path
) -> None:
    assert wan.answer(url_of_hubs_model, COUNT) == reference
    for name in wan.homes:
        entry = worker(wan, name)
        assert entry.total.pair_count > 0
        # Only its slice came, and it came from the hub.
        assert entry.slice_bytes is not None
        assert entry.transferred_bytes < entry.slice_bytes + MAX_EXTRA_BYTES
        assert entry.slice_bytes < model.stat().st_size
    assert all_go_through(wan, wan.gateway_id("north"))
    # So do the workers' own links, each over an edge of its own.
    wait_until(
        lambda: all(
            (worker(wan, name).link_way or "").startswith("relay through north")
            for name in wan.homes
        )
    )


def test_verify_finds_it_exact(wan: World, url_of_hubs_model: str, model: Path) -> None:
    assert url_of_hubs_model
    words = ("verify", NAME, "--model", str(model), "--tokens", "8", "--json")
    assert json.loads(wan.coordinator.run(*words))["verdict"] == "exact"


def test_a_machine_that_nobody_let_in_stays_out(wan: World) -> None:
    stranger = wan.stranger()
    told = stranger.run("join", wan.url, "--token", "lcj_" + "x" * 43, code=2)
    assert "join token" in told
    assert "hint" in told


def test_the_edges_of_a_gateway_that_is_killed_go_on_over_another_one(
    wan: World, url_of_hubs_model: str, reference: Answer
) -> None:
    wan.start_gateway("south")
    assert all_go_through(wan, wan.gateway_id("north"))
    # Nobody else has the experts: what was under way must go on over the other gateway.
    answer = wan.while_asking(url_of_hubs_model, COUNT, lambda: wan.kill_gateway("north"))
    assert answer == reference
    wait_until(lambda: all_go_through(wan, wan.gateway_id("south")))
    assert "relay through south:" in wan.status()
    assert [worker(wan, name).start_count for name in wan.homes] == [1, 1]


def test_the_edges_of_a_gateway_that_is_killed_and_comes_back_go_on(
    wan: World, url_of_hubs_model: str, reference: Answer
) -> None:
    def break_it() -> None:
        wan.kill_gateway("south")
        wan.start_gateway("south")

    assert wan.while_asking(url_of_hubs_model, COUNT, break_it) == reference
    wait_until(lambda: all_are_used(wan, url_of_hubs_model))


def test_the_answer_is_the_same_over_a_line_that_loses_pieces_and_is_cut_again_and_again(
    wan: World, url_of_hubs_model: str, reference: Answer
) -> None:
    with wan.bad_line():
        for _ in range(20):
            assert wan.answer(url_of_hubs_model, FEW) == reference.first(FEW)
            if wan.cut_count() > 1:
                break
    assert wan.cut_count() > 1


@pytest.fixture(scope="module")
def url(wan: World, model: Path, url_of_hubs_model: str) -> str:
    """Both homes hold what they can, the coordinator can compute it all, and the hub relays."""
    assert url_of_hubs_model
    wan.stop()
    wan.kill_gateway("south")
    wan.kill_hub()
    wan.start_hub("--gateway")
    wait_until(lambda: all(wan.offers(name) > HOME_OFFER_BYTES for name in wan.homes))
    plan = wan.plan(str(model), "--replicas", "2", *BARE)
    return wan.launch(plan, "--fallback-memory", "64MB")


def test_the_answer_is_the_same_when_hub_and_gateway_are_killed_and_come_back(
    wan: World, url: str, reference: Answer
) -> None:
    def break_it() -> None:
        wan.kill_hub()
        wan.start_hub("--gateway")

    assert all_go_through(wan, wan.hub_id())
    assert wan.while_asking(url, COUNT, break_it) == reference
    wait_until(lambda: all_are_used(wan, url))


def test_the_answer_is_the_same_when_a_home_gets_another_address(
    wan: World, url: str, reference: Answer
) -> None:
    def move() -> None:
        wan.network.readdress(wan.homes["attic"])

    assert wan.while_asking(url, COUNT, move) == reference
    wait_until(lambda: wan.is_used(url, "attic"))


def test_the_answer_is_the_same_when_a_link_is_cut_for_half_a_minute(
    wan: World, url: str, reference: Answer
) -> None:
    with wan.cut("cellar", seconds=30):
        assert wan.answer(url, COUNT) == reference
        # Whoever else comes meanwhile is served as ever.
        wan.join("office")
        assert wan.answer(url, COUNT) == reference
    wait_until(lambda: wan.is_used(url, "cellar"))
    assert wan.answer(url, COUNT) == reference


def test_a_home_that_is_revoked_is_out_and_the_other_one_goes_on(
    wan: World, url: str, reference: Answer
) -> None:
    def revoke() -> None:
        wan.hub.run("hub", "revoke", "cellar")

    assert wan.while_asking(url, COUNT, revoke) == reference
    wait_until(lambda: "revoked" in wan.log("cellar"))
    wait_until(lambda: not wan.is_used(url, "cellar"))
    assert wan.answer(url, COUNT) == reference


def test_a_machine_with_a_public_address_is_reached_directly_and_one_behind_nat_by_the_relay(
    wan: World,
) -> None:
    wan.join("office")
    # A direct way that a busy machine is late to answer on is taken at the next try.
    wait_until(lambda: wan.way_to("office").startswith("direct"))
    assert wan.way_to("attic").startswith("relay")
