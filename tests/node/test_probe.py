"""Asking one address who is there: what is believed, and who gets to see the token."""

import asyncio

import httpx
import pytest

from linkcpp.cluster.candidates import Candidate, Finding, Probe
from linkcpp.cluster.records import NodeId
from linkcpp.link.handshake import cluster_psk
from linkcpp.node.probe import measure, probe_node
from tests.cluster.peers import (
    OTHER_TOKEN,
    TOKEN,
    Peer,
    babbler,
    free_socket,
    http_answer,
    node_record,
    served,
)


async def ask(url: str, *, deadline_seconds: float = 60.0) -> Probe:
    return await probe_node(
        Candidate(url=url, found_by="test"), TOKEN, deadline_seconds=deadline_seconds
    )


async def test_a_node_with_our_token_proves_itself_and_tells_what_it_has() -> None:
    peer = Peer(node_record())
    async with served(peer) as url:
        probe = await ask(url)
    assert probe.finding is Finding.NODE
    assert probe.record == peer.record
    assert probe.link is not None
    assert probe.link.rtt_ms > 0


async def test_a_node_at_an_ipv6_address_is_asked_like_any_other() -> None:
    async with served(Peer(node_record()), "::1") as url:
        assert (await ask(url)).finding is Finding.NODE


async def test_a_host_with_another_token_never_sees_ours() -> None:
    peer = Peer(node_record(), token=OTHER_TOKEN)
    async with served(peer) as url:
        probe = await ask(url)
    assert probe.finding is Finding.WRONG_TOKEN
    assert peer.tokens_seen == []


async def test_a_rogue_in_between_passes_on_ciphertext_and_learns_nothing() -> None:
    real = Peer(node_record())
    seen = bytearray()
    async with served(real):

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(65536):
                seen.extend(data)
                writer.write(data)
            writer.close()

        async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            upstream = await asyncio.open_connection("127.0.0.1", real.port)
            await asyncio.gather(
                pass_on(reader, upstream[1]), pass_on(upstream[0], writer), return_exceptions=True
            )

        rogue = await asyncio.start_server(between, "127.0.0.1", 0)
        probe = await ask(f"http://127.0.0.1:{rogue.sockets[0].getsockname()[1]}")
        rogue.close()
    assert probe.finding is Finding.NODE
    assert probe.record == real.record
    for secret in (TOKEN.encode(), cluster_psk(TOKEN), b"/v1/node", real.record.platform.encode()):
        assert secret not in seen


async def test_a_redirect_is_not_followed() -> None:
    target = Peer(node_record())
    async with (
        served(target) as url,
        babbler(http_answer(b"", "307 Temporary Redirect", f"location: {url}\r\n")) as lure,
    ):
        assert (await ask(lure)).finding is Finding.NOT_A_NODE
    assert target.tokens_seen == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"service": "other", "agent_version": "1", "node_id": "x", "name": "y"}',
        b"[" * 10_000,
        b'{"service": "linkcpp-node", "agent_version": 1e999, "node_id": {}, "name": []}',
        b"\xff\xfe\x00",
        b" " * 100_000,
    ],
)
async def test_what_answers_but_is_no_node_is_told_as_such(body: bytes) -> None:
    async with babbler(http_answer(body)) as url:
        assert (await ask(url)).finding is Finding.NOT_A_NODE


async def test_an_endless_answer_is_cut_off() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n"
    async with babbler(head, *[b"x" * 65536] * 64, then_stall=True) as url:
        probe = await ask(url)
    assert probe.finding is Finding.NOT_A_NODE
    assert probe.detail == "its answer is longer than any node's"


@pytest.mark.parametrize("pieces", [(), (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n",)])
async def test_a_peer_that_stalls_costs_its_deadline_and_no_more(pieces: tuple[bytes, ...]) -> None:
    async with babbler(*pieces, then_stall=True) as url:
        probe = await ask(url, deadline_seconds=0.3)
    assert probe.finding is Finding.NO_ANSWER
    assert probe.detail == "no answer within 0.3 s"


@pytest.mark.parametrize("noise", [b"", b"SSH-2.0-OpenSSH_9\r\n", b"\x00" * 64])
async def test_what_does_not_speak_http_is_no_crash(noise: bytes) -> None:
    async with babbler(noise) as url:
        probe = await ask(url)
    assert probe.finding is Finding.NO_ANSWER
    assert probe.detail is not None
    assert "does not speak HTTP" in probe.detail


async def test_where_nothing_listens_the_detail_says_so() -> None:
    with free_socket() as opened:
        probe = await ask(f"http://127.0.0.1:{opened.getsockname()[1]}")
    assert probe.finding is Finding.NO_ANSWER
    assert probe.detail == "nothing listens there, or a firewall is in the way"


async def test_a_name_that_is_nowhere_is_no_crash() -> None:
    assert (await ask("http://no-such-host.invalid:8716")).finding is Finding.NO_ANSWER
    assert (await ask("http://[fe80::1%nope0]:8716")).finding is Finding.NO_ANSWER


@pytest.mark.parametrize(
    "lie",
    [
        {"node_id": "somebody-else"},
        {"core_count": -1},
        {"devices": [{"name": "CPU"}]},
        {"memory_limit_bytes": 2**80},
        {"devices": [node_record().devices[0].model_dump() | {"offered_bytes": -5}]},
    ],
)
async def test_a_record_that_no_machine_can_have_is_refused(lie: dict[str, object]) -> None:
    peer = Peer(node_record())
    fields = node_record().model_dump(mode="json") | lie
    peer.node_body = httpx.Request("POST", "http://x", json=fields).content
    async with served(peer) as url:
        assert (await ask(url)).finding is Finding.NOT_A_NODE


async def test_escape_sequences_in_a_record_do_not_reach_the_terminal() -> None:
    peer = Peer(node_record(name="\x1b]0;gotcha\x07\u202eattic" + "x" * 600, platform="\x1b[2J"))
    async with served(peer) as url:
        probe = await ask(url)
    assert probe.record is not None
    assert probe.health is not None
    for text in (probe.record.name, probe.record.platform, probe.health.name):
        assert text.isprintable()
        assert len(text) <= 512


async def test_the_link_to_a_node_is_measured_both_ways() -> None:
    async with served(Peer(node_record())) as url:
        probe = await ask(url)
        # The best of some: a machine that is busy elsewhere is slow now and then.
        links = [await measure(probe, TOKEN) for _ in range(5)]
    assert all(link is not None and link.rtt_ms > 0 for link in links)
    assert max(link.bytes_per_second or 0 for link in links if link) > 10**6


async def test_a_node_that_calls_itself_another_than_it_proved_to_be_is_not_one() -> None:
    peer = Peer(node_record())
    peer.proved_id = NodeId("another")
    async with served(peer) as url:
        assert (await ask(url)).finding is Finding.NOT_A_NODE


async def test_a_node_of_a_version_without_links_is_told_by_its_version() -> None:
    health = b'{"service": "linkcpp-node", "agent_version": "0.0.9", "node_id": "x", "name": "y"}'

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        is_health = head.startswith(b"GET /v1/health")
        writer.write(http_answer(health) if is_health else http_answer(b"", "404 Not Found"))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    probe = await ask(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    server.close()
    assert probe.finding is Finding.NO_ANSWER
    assert probe.detail is not None
    assert "linkcpp 0.0.9" in probe.detail
    assert "404" in probe.detail
