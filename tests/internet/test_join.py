"""Laptops behind NAT serve a model through a relay on 443, bit for bit as one process does."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.internet.world import NAME, World, world
from tests.launch.swarm import one_process, tokens, wait_until
from tests.support import models
from tests.support.engines import prebuilt_engine

COUNT = 200
MODEL = "mixture"
# Just enough for the backbone: every expert must go to a node.
BARE = ("--memory", "291MB", "--reserve", "0")
# Header, hashes and records that come with a slice.
MOST_EXTRA_BYTES = 256 * 1024
# What a home offers when nothing runs there, nearly.
MOST_OF_A_HOME = 250 * 10**6


@pytest.fixture(scope="module")
def model() -> Path:
    return models.qwen3moe()


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    log = tmp_path_factory.mktemp("one") / "log"
    with one_process(prebuilt_engine(), model, log) as url:
        answer: list[Any] = json.loads(json.dumps(tokens(url, count=COUNT)))
        return answer


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("wan"), prebuilt_engine()) as made:
        made.hub.run("hub", "models", "add", str(model), "--name", MODEL)
        for name in made.homes:
            made.join(name)
        yield made


def worker(wan: World, name: str) -> dict[str, Any]:
    workers = wan.state()["experts"]["workers"]
    found: dict[str, Any] = next(entry for entry in workers if entry["node_name"] == name)
    return found


def is_back(wan: World, name: str) -> bool:
    entry = worker(wan, name)
    return entry["phase"] == "up" and bool(entry["is_linked"])


@pytest.fixture(scope="module")
def url_of_hubs_model(wan: World) -> str:
    """The model is at the hub only, and every expert at a node only."""
    plan = wan.plan(MODEL, *BARE)
    return wan.launch(plan)


def test_a_model_that_only_the_hub_has_is_served_exactly_by_two_homes(
    wan: World, url_of_hubs_model: str, reference: list[Any], model: Path
) -> None:
    assert wan.tokens(url_of_hubs_model, COUNT) == reference
    for name in wan.homes:
        entry = worker(wan, name)
        assert entry["total"]["pair_count"] > 0
        assert "relay" in entry["way"]
        # Only its slice came, and it came from the hub.
        assert entry["transferred_bytes"] < entry["slice_bytes"] + MOST_EXTRA_BYTES
        assert entry["slice_bytes"] < model.stat().st_size
    assert wan.state()["experts"]["dispatch"]["failed_call_count"] == 0


def test_verify_finds_it_exact(wan: World, url_of_hubs_model: str, model: Path) -> None:
    assert url_of_hubs_model
    words = ("verify", NAME, "--model", str(model), "--tokens", "8", "--json")
    assert json.loads(wan.coordinator.run(*words))["verdict"] == "exact"


def test_a_machine_that_nobody_let_in_stays_out(wan: World) -> None:
    stranger = wan.stranger()
    told = stranger.run("join", wan.url, "--token", "lcj_" + "x" * 43, code=2)
    assert "join token" in told
    assert "way out" in told


@pytest.fixture(scope="module")
def url(wan: World, model: Path, url_of_hubs_model: str) -> str:
    """Both homes hold what they can, and the coordinator can compute it all."""
    assert url_of_hubs_model
    wan.stop()
    wait_until(lambda: all(wan.offers(name) > MOST_OF_A_HOME for name in wan.homes))
    plan = wan.plan(str(model), "--replicas", "2", *BARE)
    return wan.launch(plan, "--fallback-memory", "64MB")


def test_the_answer_is_the_same_when_hub_and_gateway_are_killed_and_come_back(
    wan: World, url: str, reference: list[Any]
) -> None:
    def break_it() -> None:
        wan.kill_hub()
        wan.start_hub()

    assert wan.while_asking(url, COUNT, break_it) == reference
    wait_until(lambda: all(is_back(wan, name) for name in wan.homes))
    assert wan.state()["experts"]["dispatch"]["failed_call_count"] == 0


def test_the_answer_is_the_same_when_a_home_gets_another_address(
    wan: World, url: str, reference: list[Any]
) -> None:
    def move() -> None:
        wan.network.readdress(wan.homes["attic"])

    assert wan.while_asking(url, COUNT, move) == reference
    wait_until(lambda: is_back(wan, "attic"))
    assert wan.state()["experts"]["dispatch"]["failed_call_count"] == 0


def test_the_answer_is_the_same_when_a_link_is_cut_for_half_a_minute(
    wan: World, url: str, reference: list[Any]
) -> None:
    with wan.network.cut(wan.homes["cellar"]):
        assert wan.tokens(url, COUNT) == reference
        wan.let_pass(30)
        assert wan.tokens(url, COUNT) == reference
    wait_until(lambda: is_back(wan, "cellar"))
    assert wan.tokens(url, COUNT) == reference
    assert wan.state()["experts"]["dispatch"]["failed_call_count"] == 0


def test_a_home_that_is_revoked_is_out_and_the_other_one_goes_on(
    wan: World, url: str, reference: list[Any]
) -> None:
    def revoke() -> None:
        wan.hub.run("hub", "revoke", "cellar")

    assert wan.while_asking(url, COUNT, revoke) == reference
    wait_until(lambda: "revoked" in wan.log("cellar"))
    assert not is_back(wan, "cellar")
    assert wan.tokens(url, COUNT) == reference
    assert wan.state()["experts"]["dispatch"]["failed_call_count"] == 0


def test_a_machine_with_a_public_address_is_reached_directly_and_one_behind_nat_by_the_relay(
    wan: World,
) -> None:
    wan.join(wan.office.name)
    assert wan.way_to(wan.office.name).startswith("direct")
    assert wan.way_to("attic").startswith("relay")
