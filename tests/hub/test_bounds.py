"""What a stranger or a broken client may cost: sizes, slowness, odd requests."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from linkcpp.common import http_server
from linkcpp.hub import access
from linkcpp.registry.edges import CloseEvent
from linkcpp.registry.records import Heartbeat, Role
from tests.hub.hubs import RunningHub, node_state, running_hub
from tests.support.dripping import dripping


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[RunningHub]:
    async with running_hub(tmp_path / "hub", None) as running:
        yield running


async def talk(hub: RunningHub, sent: bytes) -> bytes:
    """Send bytes, and return all that comes until the hub closes the connection."""
    host, port = hub.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(sent)
            await writer.drain()
        answer = b""
        async with asyncio.timeout(120):
            with contextlib.suppress(ConnectionError):
                while piece := await reader.read(65536):
                    answer += piece
        return answer
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("path", "max_bytes"),
    [("/v1/join", 16 * 1024), ("/v1/tokens", 4 * 1024)],
)
async def test_a_body_that_is_too_long_is_refused_before_anything_reads_it(
    hub: RunningHub, path: str, max_bytes: int
) -> None:
    refused = await hub.http.post(path, content=b" " * (max_bytes + 1))
    assert (refused.status_code, refused.json()["code"]) == (413, "too_large")
    announced = await talk(
        hub, f"POST {path} HTTP/1.1\r\nHost: hub\r\nContent-Length: 99999999999\r\n\r\n".encode()
    )
    assert announced.startswith(b"HTTP/1.1 413")


async def test_bodies_with_a_token_are_bounded_too(hub: RunningHub) -> None:
    for role, method, path, max_bytes in (
        (Role.NODE, "POST", "/v1/heartbeat", 2**20),
        (Role.GATEWAY, "POST", "/v1/gateways/heartbeat", 256 * 1024),
        (Role.BACKBONE, "POST", "/v1/edges", 64 * 1024),
    ):
        machine = await hub.machine(role)
        content = b" " * (max_bytes + 1)
        refused = await hub.http.request(method, path, content=content, headers=machine.headers)
        assert refused.status_code == 413, path


@pytest.mark.parametrize("length", [17_000, 300_000])
async def test_a_head_that_is_too_long_is_refused(hub: RunningHub, length: int) -> None:
    for head in (
        b"GET /v1/health HTTP/1.1\r\nHost: hub\r\nX-Long: %s\r\n\r\n",
        b"GET /v1/%s HTTP/1.1\r\n\r\n",
    ):
        answer = await talk(hub, head % (b"x" * length))
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize("length", [17, 15_000])
async def test_a_method_that_is_too_long_is_refused(hub: RunningHub, length: int) -> None:
    method = b"M" * length
    answer = await talk(hub, method + b" /v1/health HTTP/1.1\r\nHost: hub\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 405")
    assert b"unknown_method" in answer and method not in answer


async def test_a_caller_that_is_revoked_while_its_body_comes_is_not_answered(
    hub: RunningHub,
) -> None:
    admin = await hub.machine(Role.ADMIN)
    host, port = hub.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"role": "admin", "lifetime_seconds": 60}'
    writer.write(
        f"POST /v1/join-tokens HTTP/1.1\r\nHost: hub\r\nAuthorization: Bearer {admin.token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Expect: 100-continue\r\n\r\n".encode()
    )
    async with asyncio.timeout(120):
        # The hub asks for the body when it begins to read it, with the token taken.
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        await hub.hub.revoke(admin.node_id)
        writer.write(body)
        assert (await reader.read()).startswith(b"HTTP/1.1 403")
    writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /v1/health HTTP/1.1\r\nHost: hub\r\nX-Slow: ",
        b"POST /v1/join HTTP/1.1\r\nHost: hub\r\nContent-Length: 100\r\n\r\n{",
    ],
)
async def test_a_client_that_stalls_in_its_head_or_body_is_dropped(
    hub: RunningHub, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(http_server, "HEAD_DEADLINE_SECONDS", 0.3)
    monkeypatch.setattr(access, "BODY_DEADLINE_SECONDS", 0.3)
    answer = await talk(hub, sent)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 408")


async def test_many_slow_clients_do_not_keep_others_out(hub: RunningHub) -> None:
    host, port = hub.url.removeprefix("http://").split(":")
    slow = [await asyncio.open_connection(host, int(port)) for _ in range(300)]
    for _, writer in slow:
        writer.write(b"GET /v1/health HTTP/1.1\r\nX-Slow: ")
    assert (await hub.http.get("/v1/health")).status_code == 200
    for _, writer in slow:
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /v1/health\r\n\r\n",
        b"GET /%ff%00 HTTP/1.1\r\nHost: hub\r\n\r\n",
        b"POST /v1/join HTTP/1.1\r\nHost: hub\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"GET /v1/nodes HTTP/1.1\r\nHost: hub\r\nAuthorization: Bearer a\r\n"
        b"Authorization: Bearer b\r\nConnection: close\r\n\r\n",
    ],
)
async def test_an_odd_request_gets_a_refusal_and_no_defect(hub: RunningHub, sent: bytes) -> None:
    answer = await talk(hub, sent.replace(b"Host: hub\r\n", b"Host: hub\r\nConnection: close\r\n"))
    assert answer.startswith(b"HTTP/1.1 4")
    assert (await hub.http.get("/v1/health")).status_code == 200


@pytest.mark.parametrize("request_id", [b"", b"X-Request-ID: mine-1\r\n"])
@pytest.mark.parametrize("path", [b"/v1/join", b"/v1/nodes"])
async def test_a_body_that_breaks_off_in_nonsense_is_one_line_in_the_log_and_no_defect(
    hub: RunningHub, caplog: pytest.LogCaptureFixture, path: bytes, request_id: bytes
) -> None:
    caplog.set_level("INFO")
    head = b"POST " + path + b" HTTP/1.1\r\nHost: hub\r\nTransfer-Encoding: chunked\r\n"
    answer = await talk(hub, head + request_id + b"\r\nzz\r\n")
    assert answer.startswith(b"HTTP/1.1 400")
    assert (await hub.http.get("/v1/nodes", headers={"X-Request-ID": "later"})).status_code == 401
    logged = [vars(one) for one in caplog.records if "request_id" in vars(one)]
    assert [(one["request_id"], one["status"]) for one in logged] == [
        (id_of(answer), 400),
        ("later", 401),
    ]
    assert not request_id or id_of(answer) == "mine-1"
    assert [one for one in caplog.records if one.exc_info] == []


async def test_what_is_no_http_is_answered_with_an_id_as_well(hub: RunningHub) -> None:
    answers = [await talk(hub, b"GET /v1/health\r\n\r\n") for _ in range(2)]
    assert len({id_of(answer) for answer in answers}) == 2


@pytest.mark.parametrize("path", ["/v1/health", "/v1/nodes", "/nowhere"])
async def test_a_websocket_where_there_is_none_is_refused_and_no_defect(
    hub: RunningHub, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    caplog.set_level("INFO", "linkcpp")
    node = await hub.machine(Role.NODE)
    answer = await talk(
        hub,
        f"GET {path} HTTP/1.1\r\nHost: hub\r\nAuthorization: Bearer {node.token}\r\n"
        "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode(),
    )
    assert answer.startswith(b"HTTP/1.1 403")
    assert b'"code":"not_accepted"' in answer
    (logged,) = [vars(one) for one in caplog.records if getattr(one, "path", None) == path]
    assert (logged["request_id"], logged["status"]) == (id_of(answer), 403)
    assert 'status="500"' not in hub.hub.render_metrics().decode()


def id_of(answer: bytes) -> str:
    """Read an answer's request id."""
    (found,) = re.findall(rb"(?im)^X-Request-ID: (\S+)\r$", answer)
    return bytes(found).decode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[" * 10_000,
        b'{"sequence": 1e400}',
        b'{"sequence": -1}',
        b'{"sequence": 1, "state": {"record": {}}}',
        b'{"sequence": 1, "edges": ["../../etc/passwd"]}',
        '{"sequence": 1, "state": {"record": {"name": "\ud800"}}}'.encode("utf-8", "surrogatepass"),
        b"\xff\xfe",
    ],
)
async def test_a_heartbeat_that_is_none_is_refused_in_words(hub: RunningHub, body: bytes) -> None:
    node = await hub.machine(Role.NODE)
    refused = await hub.http.post("/v1/heartbeat", content=body, headers=node.headers)
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request")


async def test_a_client_that_reads_no_events_is_cut_off(hub: RunningHub) -> None:
    node = await hub.machine(Role.NODE)
    host, port = hub.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(
        f"GET /v1/events HTTP/1.1\r\nHost: hub\r\nAuthorization: Bearer {node.token}\r\n"
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n".encode()
    )
    event = CloseEvent(edge_id="0" * 32)
    async with asyncio.timeout(60):
        while hub.hub.events.count == 0:  # noqa: ASYNC110 - the hub tells nobody
            await asyncio.sleep(0.01)
        while hub.hub.events.count:
            for _ in range(1000):
                hub.hub.events.push(node.node_id, event)
            await asyncio.sleep(0)
    assert hub.hub.events.count == 0
    writer.close()


@pytest.mark.slow
async def test_a_machine_is_served_while_strangers_hold_all_that_a_small_hub_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linkcpp.hub.server._max_connections", lambda: 64)
    async with running_hub(tmp_path / "hub", None) as hub:
        machine = await hub.machine(Role.NODE)
        async with dripping(httpx.URL(hub.url).port or 0, 160):
            for _ in range(20):
                # A connection of its own each time, and in one of them the token.
                answer = await talk(
                    hub,
                    b"GET /v1/gateways HTTP/1.1\r\nHost: hub\r\nConnection: close\r\n"
                    b"Authorization: Bearer " + machine.token.encode() + b"\r\n\r\n",
                )
                assert answer.startswith(b"HTTP/1.1 ")
                await machine.client.heartbeat(Heartbeat(sequence=0, state=node_state(machine)))
