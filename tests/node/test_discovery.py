"""A whole search: sources, probes at the same time, one description."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable

import pytest
from typer.testing import CliRunner

from linkcpp.cli.discover import Where, app, render
from linkcpp.cluster.candidates import Candidate, Probe
from linkcpp.cluster.findings import describe_nodes
from linkcpp.cluster.identity import load_identity
from linkcpp.cluster.mdns import Advertisement, Advertiser
from linkcpp.cluster.records import DiscoveredNode, NodeId, NodeRecord, NodeStatus
from linkcpp.cluster.token import store_token
from linkcpp.common.config_file import config_path
from linkcpp.common.errors import LinkcppError
from linkcpp.node.discovery import (
    Discovery,
    Source,
    discover,
    find_nodes,
    known_source,
    url_source,
)
from linkcpp.node.probe import no_answer
from tests.cluster.peers import (
    COORDINATOR,
    OTHER_TOKEN,
    TOKEN,
    Peer,
    babbler,
    fingerprint,
    node_record,
    served,
)

pytestmark = pytest.mark.slow


@contextlib.asynccontextmanager
async def advertised(peer: Peer, node_id: str | None = None) -> AsyncIterator[str]:
    """Run a peer that tells of itself by mDNS, as ``node_id`` if that is given."""
    record = peer.record
    async with served(peer) as url:
        told = Advertisement(
            node_id=NodeId(node_id or record.node_id),
            name=record.name,
            port=peer.port,
            engine_digest=None,
            memory_class="4G",
        )
        async with Advertiser(told, bind_host="127.0.0.1"):
            yield url


async def search(*sources: Source, timeout_seconds: float = 5.0) -> Discovery:
    return await discover(TOKEN, COORDINATOR, sources, timeout_seconds=timeout_seconds)


def statuses(found: Discovery) -> dict[str, NodeStatus]:
    return {node.name: node.status for node in found.nodes}


async def test_named_nodes_are_shown_for_what_they_are() -> None:
    async with (
        served(Peer(node_record("id-1", "ready"))) as ready,
        served(Peer(node_record("id-2", "newer", engine=fingerprint("7.0.0")))) as newer,
        served(Peer(node_record("id-3", "stranger"), token=OTHER_TOKEN)) as stranger,
        babbler(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n") as printer,
    ):
        found = await search(url_source([ready, newer, stranger, printer], "--node"))
    assert statuses(found) == {
        "ready": NodeStatus.READY,
        "newer": NodeStatus.OTHER_ENGINE,
        "stranger": NodeStatus.WRONG_TOKEN,
        "unknown": NodeStatus.NOT_A_NODE,
    }
    links = {node.name: node.link for node in found.nodes}
    assert links["ready"] is not None
    assert links["ready"].bytes_per_second is not None
    assert found.nodes[0].name == "ready"


async def test_peers_that_stall_do_not_delay_the_others() -> None:
    answers: list[set[str]] = []
    slow = Peer(node_record("id-slow", "slow"))
    slow.stalls = True
    async with contextlib.AsyncExitStack() as stack:
        stalling = [await stack.enter_async_context(babbler(then_stall=True)) for _ in range(20)]
        urls = [
            *stalling,
            await stack.enter_async_context(served(slow)),
            await stack.enter_async_context(served(Peer(node_record("id-1", "prompt")))),
        ]
        found = await discover(
            TOKEN,
            COORDINATOR,
            [url_source(urls, "--node")],
            on_change=lambda nodes: answers.append({node.name for node in nodes}),
        )
    assert answers[0] == {"prompt"}
    assert statuses(found)["prompt"] is NodeStatus.READY
    assert [node.status for node in found.nodes].count(NodeStatus.UNREACHABLE) == 21


async def test_many_answers_are_not_each_followed_by_a_description_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[int] = []

    async def nobody(candidate: Candidate, token: str) -> Probe:
        return no_answer(candidate, "nobody there")

    def describe_slowly(
        probes: Iterable[Probe], coordinator: NodeRecord
    ) -> tuple[DiscoveredNode, ...]:
        time.sleep(0.01)
        return describe_nodes(probes, coordinator)

    monkeypatch.setattr("linkcpp.node.discovery.probe_node", nobody)
    monkeypatch.setattr("linkcpp.node.discovery.describe_nodes", describe_slowly)
    urls = [f"http://10.0.0.1:{port}" for port in range(1, 201)]
    await discover(
        TOKEN,
        COORDINATOR,
        [url_source(urls, "--node")],
        on_change=lambda nodes: told.append(len(nodes)),
    )
    assert told[-1] == 200
    assert len(told) < 100


async def test_one_url_from_two_sources_is_asked_once() -> None:
    peer = Peer(node_record())
    async with served(peer) as url:
        found = await search(url_source([url], "--node"), url_source([url], "config"))
    assert [node.found_by for node in found.nodes] == ["--node, config"]
    assert peer.asked_count == 1


async def test_a_source_that_cannot_work_is_a_note_and_the_others_go_on() -> None:
    async def broken() -> AsyncGenerator[Candidate]:
        raise LinkcppError("No such luck.")
        yield

    async with served(Peer(node_record())) as url:
        found = await search(broken, url_source([url], "--node"))
    assert found.notes == ("No such luck.",)
    assert len(found.nodes) == 1


async def test_a_defect_in_a_source_is_not_swallowed() -> None:
    async def broken() -> AsyncGenerator[Candidate]:
        raise ZeroDivisionError
        yield

    with pytest.raises(ZeroDivisionError):
        await search(broken)


async def test_a_source_may_go_on_for_ever_and_the_search_still_ends() -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncGenerator[Candidate]:
        try:
            await asyncio.sleep(3600)
            yield Candidate(url="http://127.0.0.1:1", found_by="never")
        finally:
            closed.set()

    assert (await search(endless, timeout_seconds=0.1)).nodes == ()
    assert closed.is_set()


async def test_a_flood_of_addresses_is_bounded_and_the_first_are_asked() -> None:
    async def flood() -> AsyncGenerator[Candidate]:
        for port in range(1, 30_000):
            yield Candidate(url=f"http://127.0.0.1:{port}", found_by="flood", instance="flood")

    async with served(Peer(node_record())) as url:
        found = await search(url_source([url], "--node"), flood)
    assert NodeStatus.READY in statuses(found).values()
    assert sum(len(node.urls) for node in found.nodes) <= 513


async def test_a_node_that_is_gone_since_the_last_search_is_stale() -> None:
    async with served(Peer(node_record())) as url:
        before = await search(url_source([url], "--node"))
    after = await search(known_source(before.nodes))
    assert statuses(after) == {"attic": NodeStatus.STALE}


def by_name(found: Discovery, name: str) -> list[DiscoveredNode]:
    """Other tests may advertise at the same time: look only at one's own."""
    return [node for node in found.nodes if node.name == name]


async def find_advertised(are_all_there: Callable[[Discovery], object]) -> Discovery:
    """Search until all have been heard: a datagram may be lost, and a busy machine may be late."""
    async with asyncio.timeout(120):
        while not are_all_there(found := await find_nodes(None, timeout_seconds=1.5)):
            pass
    return found


async def test_advertised_nodes_are_found_and_this_machines_own_agent_is_no_other_node() -> None:
    store_token(TOKEN)
    me = load_identity()
    mine, other = Peer(node_record(me.node_id, "own-agent")), Peer(node_record("id-o", "other-one"))
    async with advertised(mine), advertised(other) as url:
        found = await find_advertised(
            lambda found: by_name(found, "own-agent") and by_name(found, "other-one")
        )
    assert [node.is_this_machine for node in by_name(found, "own-agent")] == [True]
    assert [node.urls for node in by_name(found, "other-one")] == [(url,)]
    assert by_name(found, "other-one")[0].found_by == "mdns"
    assert "own-agent" not in [node.name for node in found.cluster.nodes]
    assert found.cluster.coordinator.node_id == me.node_id


async def test_an_address_that_answers_as_another_node_is_not_shown_as_the_advertised_one() -> None:
    store_token(TOKEN)
    peer = Peer(node_record("id-real", "real-one"))
    async with advertised(peer, node_id="id-somebody-else"):
        found = await find_advertised(lambda found: len(by_name(found, "real-one")) == 2)
    shown = by_name(found, "real-one")
    assert [node.status for node in shown] == [NodeStatus.READY, NodeStatus.STALE]
    assert shown[0].record is not None
    assert shown[0].record.node_id == "id-real"
    assert shown[1].reason is not None
    assert "the address is that of another node" in shown[1].reason


async def test_a_rogue_that_advertises_itself_never_sees_the_token() -> None:
    store_token(TOKEN)
    rogue = Peer(node_record("id-rogue", "rogue-one"), token=OTHER_TOKEN)
    async with advertised(rogue):
        found = await find_advertised(lambda found: by_name(found, "rogue-one"))
    assert [node.status for node in by_name(found, "rogue-one")] == [NodeStatus.WRONG_TOKEN]
    assert rogue.tokens_seen == []


async def test_the_settings_name_nodes_and_switch_mdns_off() -> None:
    store_token(TOKEN)
    async with served(Peer(node_record())) as url, advertised(Peer(node_record("x", "unseen"))):
        config_path().parent.mkdir(parents=True, exist_ok=True)
        config_path().write_text(f'nodes = ["{url}"]\nmdns = false\nname = "desk"\n')
        cluster = (await find_nodes(None)).cluster
    assert [node.found_by for node in cluster.nodes] == ["config"]
    assert cluster.coordinator.name == "desk"


async def test_without_a_token_the_hint_is_told() -> None:
    with pytest.raises(LinkcppError, match="token create"):
        await find_nodes(None)


def test_nothing_found_says_what_to_check() -> None:
    store_token(TOKEN)
    nothing = Discovery(coordinator=node_record(), nodes=(), notes=())
    told = "".join(str(part) for part in render(nothing))
    for word in ("linkcpp node", "token set", "5353", "--node ADDRESS"):
        assert word in told
    named = "".join(str(part) for part in render(nothing, where=Where.NAMED))
    assert "5353" not in named
    assert "8716" in named


def test_a_search_that_asks_nobody_says_so_and_not_that_firewalls_may_be_in_the_way() -> None:
    store_token(TOKEN)
    told = CliRunner().invoke(app, ["--no-mdns"])
    assert told.exit_code == 0, told.output
    assert "you gave no --node" in told.output
    assert "5353" not in told.output


async def test_the_command_prints_a_table_or_json() -> None:
    store_token(TOKEN)
    escape = "\x1b]0;gotcha\x07[bold]attic"
    peer = Peer(node_record(name=escape, engine=fingerprint("7.0.0")))
    async with served(peer) as url:
        options = ["--no-mdns", "--node", url.removeprefix("http://")]
        told = await asyncio.to_thread(CliRunner().invoke, app, options)
        as_json = await asyncio.to_thread(CliRunner().invoke, app, [*options, "--json"])
    assert told.exit_code == 0, told.output
    assert "\x1b" not in told.stdout
    assert "\x07" not in told.stdout
    assert "[bold]attic" in told.stdout
    assert "5.00 GB" in told.stdout
    found = Discovery.model_validate(json.loads(as_json.stdout))
    assert [node.urls for node in found.nodes] == [(url,)]
