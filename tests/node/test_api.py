"""The agent's HTTP API against a real engine: contract, token, bounds."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from linkcpp.cluster.records import NodeRecord
from linkcpp.common import http_server
from linkcpp.common.access import RateLimit
from linkcpp.common.logs import REQUEST_LOGGER
from linkcpp.common.records import ErrorBody
from linkcpp.engine.records import EngineLocation, EngineProblem
from linkcpp.link.handshake import cluster_psk
from linkcpp.node import access
from linkcpp.node.agent import AgentOptions
from linkcpp.node.client import (
    NodeRefusedError,
    NodeUnreachableError,
    WrongTokenError,
)
from linkcpp.node.connector import open_client
from linkcpp.node.records import ServerRequest, ServerState
from tests.node.agents import MEBIBYTE, RunningAgent, running_agent

ID = "0" * 32
CALLS = [
    ("GET", "/v1/node"),
    ("POST", "/v1/servers"),
    ("GET", "/v1/servers"),
    ("GET", f"/v1/servers/{ID}"),
    ("POST", f"/v1/servers/{ID}/renew"),
    ("DELETE", f"/v1/servers/{ID}"),
    ("GET", f"/v1/servers/{ID}/logs"),
    ("POST", "/v1/echo"),
    ("GET", "/v1/openapi.json"),
    ("GET", "/v1/no-such-route"),
    ("POST", "/v1/slices"),
    ("GET", "/v1/slices"),
    ("GET", f"/v1/slices/{ID}"),
    ("PUT", f"/v1/slices/{ID}?offset=0"),
    ("DELETE", f"/v1/slices/{ID}"),
    ("PUT", f"/v1/slices/{ID}/manifest"),
    ("GET", f"/v1/slices/{ID}/manifest"),
    ("POST", "/v1/workers"),
    ("GET", "/v1/workers"),
    ("GET", f"/v1/workers/{ID}"),
    ("POST", f"/v1/workers/{ID}/renew"),
    ("DELETE", f"/v1/workers/{ID}"),
    ("GET", f"/v1/workers/{ID}/logs"),
]


@pytest.fixture
async def node(stock_engine: EngineLocation) -> AsyncIterator[RunningAgent]:
    async with running_agent(stock_engine) as running:
        yield running


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def call(node: RunningAgent, method: str, path: str, **options: object) -> httpx.Response:
    async with httpx.AsyncClient() as http:
        return await http.request(method, node.url + path, **options)  # type: ignore[arg-type]


async def test_a_server_is_started_listed_renewed_logged_and_deleted(
    engine: EngineLocation,
) -> None:
    async with running_agent(engine) as node:
        request = ServerRequest(deployment="d", device="CPU", memory_bytes=64 * MEBIBYTE)
        server = await node.client.create_server(request)
        assert server.state is ServerState.READY
        assert not server.is_used
        assert [item.server_id for item in await node.client.servers()] == [server.server_id]
        assert (await node.client.renew(server.server_id)).state is ServerState.READY
        assert (await node.client.server(server.server_id)).memory_bytes == 64 * MEBIBYTE
        assert "RPC server" in await node.client.logs(server.server_id)
        await node.client.delete(server.server_id)
        await node.client.delete(server.server_id)
        assert await node.client.servers() == ()
        with pytest.raises(NodeRefusedError) as error:
            await node.client.server(server.server_id)
        assert error.value.code == "unknown_server"


@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_every_call_needs_the_token(node: RunningAgent, method: str, path: str) -> None:
    for headers in ({}, bearer("x" * 43), {"Authorization": f"Basic {node.token}"}):
        answer = await call(node, method, path, headers=headers)
        assert answer.status_code == 401
        assert ErrorBody.model_validate_json(answer.content).code == "wrong_token"
        assert node.token not in answer.text
    answer = await call(node, method, path, headers=bearer(node.token))
    assert answer.status_code not in (401, 403, 500)


async def test_a_token_from_another_machine_is_not_taken(stock_engine: EngineLocation) -> None:
    # As through a proxy on this machine: then anybody on the way may have seen it.
    async with running_agent(stock_engine) as node:
        headers = bearer(node.token) | {"X-Forwarded-For": "203.0.113.9"}
        answer = await call(node, "GET", "/v1/node", headers=headers)
    assert answer.status_code == 401
    assert ErrorBody.model_validate_json(answer.content).code == "wrong_token"


async def test_nothing_of_the_token_is_on_the_wire(node: RunningAgent) -> None:
    seen = bytearray()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            seen.extend(data)
            writer.write(data)
        writer.close()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = int(node.url.rpartition(":")[2])
        upstream = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(
            pass_on(reader, upstream[1]), pass_on(upstream[0], writer), return_exceptions=True
        )

    server = await asyncio.start_server(between, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with await open_client(f"http://127.0.0.1:{port}", node.token) as client:
        assert (await client.node()).node_id == node.agent.identity.node_id
        assert await client.echo(bytes(2**20)) == 2**20
    server.close()
    assert len(seen) > 2**20
    for secret in (node.token.encode(), cluster_psk(node.token), b"authorization"):
        assert secret.lower() not in bytes(seen).lower()


async def test_a_client_with_another_token_says_so(node: RunningAgent) -> None:
    with pytest.raises(WrongTokenError) as error:
        await open_client(node.url, "y" * 43)
    assert "linkcpp token" in (error.value.hint or "")


async def test_a_node_that_is_not_there_is_named(stock_engine: EngineLocation) -> None:
    with pytest.raises(NodeUnreachableError, match=r"127\.0\.0\.1:9 does not answer"):
        await open_client("http://127.0.0.1:9", "z" * 43)


async def test_the_description_has_every_route_and_its_errors(node: RunningAgent) -> None:
    schema = (await call(node, "GET", "/v1/openapi.json", headers=bearer(node.token))).json()
    described = {
        (method.upper(), path) for path, item in schema["paths"].items() for method in item
    }
    assert described == {
        ("GET", "/v1/health"),
        ("GET", "/v1/node"),
        ("POST", "/v1/servers"),
        ("GET", "/v1/servers"),
        ("GET", "/v1/servers/{server_id}"),
        ("POST", "/v1/servers/{server_id}/renew"),
        ("DELETE", "/v1/servers/{server_id}"),
        ("GET", "/v1/servers/{server_id}/logs"),
        ("POST", "/v1/echo"),
        ("GET", "/v1/openapi.json"),
        ("GET", "/metrics"),
        ("POST", "/v1/slices"),
        ("GET", "/v1/slices"),
        ("GET", "/v1/slices/{slice_id}"),
        ("PUT", "/v1/slices/{slice_id}"),
        ("DELETE", "/v1/slices/{slice_id}"),
        ("PUT", "/v1/slices/{slice_id}/manifest"),
        ("GET", "/v1/slices/{slice_id}/manifest"),
        ("POST", "/v1/workers"),
        ("GET", "/v1/workers"),
        ("GET", "/v1/workers/{worker_id}"),
        ("POST", "/v1/workers/{worker_id}/edge"),
        ("POST", "/v1/workers/{worker_id}/renew"),
        ("DELETE", "/v1/workers/{worker_id}"),
        ("GET", "/v1/workers/{worker_id}/logs"),
    }
    for path, item in schema["paths"].items():
        for operation in item.values():
            assert operation["summary"], path
            reference = operation["responses"]["4XX"]["content"]["application/json"]["schema"]
            assert reference["$ref"].endswith("/ErrorBody")
    assert schema["security"] == [{"clusterToken": []}]


@pytest.mark.parametrize(
    ("method", "path", "body", "refusal"),
    [
        ("GET", "/nothing", None, (404, "unknown_route")),
        ("PUT", "/v1/servers", None, (405, "unknown_method")),
        ("GET", f"/v1/servers/{ID}", None, (404, "unknown_server")),
        ("POST", f"/v1/servers/{ID}/renew", None, (404, "unknown_server")),
        ("GET", f"/v1/servers/{ID}/logs", None, (404, "unknown_server")),
        ("GET", "/v1/servers/..%2f..%2fetc/logs", None, (404, "unknown_route")),
        ("GET", "/v1/servers/NO-ID", None, (422, "invalid_request")),
        ("GET", f"/v1/servers/{ID}/logs?tail=0", None, (422, "invalid_request")),
        ("POST", "/v1/servers", b"not json", (422, "invalid_request")),
        ("POST", "/v1/servers", b"[]", (422, "invalid_request")),
        ("POST", "/v1/servers", b"[" * 60000, (400, "invalid_request")),
        ("POST", "/v1/servers", b"x" * 70000, (413, "too_large")),
        ("POST", "/v1/echo", b"x" * (64 * MEBIBYTE + 1), (413, "too_large")),
        ("GET", f"/v1/slices/{ID}", None, (404, "unknown_slice")),
        ("GET", f"/v1/slices/{ID}/manifest", None, (404, "unknown_slice")),
        ("GET", "/v1/slices/../../token", None, (404, "unknown_route")),
        ("PUT", f"/v1/slices/{ID}?offset=0", b"x", (404, "unknown_slice")),
        ("PUT", f"/v1/slices/{ID}", b"x", (422, "invalid_request")),
        ("PUT", f"/v1/slices/{ID}?offset=-1", b"x", (422, "invalid_request")),
        ("PUT", f"/v1/slices/{ID}/manifest", b"{}", (422, "invalid_request")),
        ("PUT", f"/v1/slices/{ID}/manifest", b"x" * (16 * MEBIBYTE + 1), (413, "too_large")),
        ("POST", "/v1/slices", b"{}", (422, "invalid_request")),
        ("GET", f"/v1/workers/{ID}", None, (404, "unknown_worker")),
        ("POST", f"/v1/workers/{ID}/renew", None, (404, "unknown_worker")),
        ("GET", f"/v1/workers/{ID}/logs", None, (404, "unknown_worker")),
        ("POST", "/v1/workers", b"{}", (422, "invalid_request")),
    ],
)
async def test_a_bad_call_gets_a_plain_reason(
    node: RunningAgent, method: str, path: str, body: bytes | None, refusal: tuple[int, str]
) -> None:
    headers = {**bearer(node.token), "Content-Type": "application/json"}
    answer = await call(node, method, path, content=body, headers=headers)
    told = ErrorBody.model_validate_json(answer.content)
    assert (answer.status_code, told.code) == refusal
    assert told.message


@pytest.mark.parametrize(
    "change",
    [
        {"memory_bytes": -1},
        {"memory_bytes": 0},
        {"memory_bytes": 2**70},
        {"lease_seconds": -5},
        {"lease_seconds": 1e9},
        {"threads": 0},
        {"deployment": ""},
        {"deployment": "x" * 1000},
        {"unknown": 1},
    ],
)
async def test_a_server_request_with_an_impossible_value_is_refused(
    node: RunningAgent, change: dict[str, object]
) -> None:
    body = {"deployment": "d", "device": "CPU", "memory_bytes": MEBIBYTE, **change}
    answer = await call(node, "POST", "/v1/servers", json=body, headers=bearer(node.token))
    assert answer.status_code == 422
    assert next(iter(change)) in ErrorBody.model_validate_json(answer.content).message
    assert await node.client.servers() == ()


async def test_an_unknown_device_is_refused_with_those_that_there_are(node: RunningAgent) -> None:
    request = ServerRequest(deployment="d", device="CUDA7", memory_bytes=MEBIBYTE)
    with pytest.raises(NodeRefusedError) as error:
        await node.client.create_server(request)
    assert error.value.code == "unknown_device"
    assert "CPU" in (error.value.hint or "")


async def test_a_node_with_an_engine_problem_says_so_and_takes_no_work(
    stock_engine: EngineLocation,
) -> None:
    problem = EngineProblem(code="died", message="It died of SIGILL.", hint="Build it here.")
    async with running_agent(stock_engine, problem=problem) as node:
        record: NodeRecord = await node.client.node()
        assert record.engine_problem == problem
        request = ServerRequest(deployment="d", device="CPU", memory_bytes=MEBIBYTE)
        with pytest.raises(NodeRefusedError, match="SIGILL") as error:
            await node.client.create_server(request)
    assert error.value.hint == "Build it here."


async def test_only_the_devices_that_the_owner_names_are_offered(
    stock_engine: EngineLocation,
) -> None:
    options = AgentOptions(host="127.0.0.1", devices=("Vulkan0",), mdns=False)
    async with running_agent(stock_engine, options=options) as node:
        assert (await node.client.node()).devices == ()


async def test_an_echo_counts_what_it_took(node: RunningAgent) -> None:
    assert await node.client.echo(bytes(3 * MEBIBYTE)) == 3 * MEBIBYTE
    link = await node.client.measure_link()
    assert link.rtt_ms > 0


async def test_many_failures_from_one_address_are_turned_away_faster(node: RunningAgent) -> None:
    statuses = [
        (await call(node, "GET", "/v1/node", headers=bearer("n" * 43))).status_code
        for _ in range(15)
    ]
    assert statuses[0] == 401
    assert statuses[-1] == 429
    # Who has the token is not locked out by a neighbour's failures.
    assert (await call(node, "GET", "/v1/node", headers=bearer(node.token))).status_code == 200


def test_the_failures_of_many_addresses_take_bounded_memory() -> None:
    limit = RateLimit(tries=1, max_addresses=8, clock=lambda: 0.0)
    for number in range(1000):
        limit.take(f"10.0.{number // 256}.{number % 256}")
    assert len(limit._buckets) == 8


def test_one_ipv6_network_is_one_address() -> None:
    limit = RateLimit(tries=1, clock=lambda: 0.0)
    assert limit.take("2001:db8::1") is None
    assert limit.take("2001:db8::2") is not None
    assert limit.take("2001:db8:0:1::1") is None


async def test_a_client_that_stalls_in_its_head_or_body_is_dropped(
    node: RunningAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_DEADLINE_SECONDS", 0.3)
    monkeypatch.setattr(access, "BODY_DEADLINE_SECONDS", 0.3)
    port = int(node.url.rpartition(":")[2])

    async def drip(start: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(start)
        dripping = asyncio.create_task(_drip(writer))
        answer = b""
        # What comes before the reset that a byte too many may bring counts.
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65536):
                answer += piece
        dripping.cancel()
        return answer

    assert await drip(b"") == b""
    assert await drip(b"GET /v1/health HTTP/1.1\r\nX: ") == b""
    start = f"POST /v1/servers HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {node.token}\r\n"
    answer = await drip(start.encode() + b"Content-Length: 1000\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 408")
    assert (await call(node, "GET", "/v1/health")).status_code == 200


async def _drip(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            await asyncio.sleep(0.02)
            writer.write(b"x")
            await writer.drain()


async def test_an_oversize_head_is_refused(node: RunningAgent) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(node.url.rpartition(":")[2]))
    with contextlib.suppress(ConnectionError):
        writer.write(b"GET /v1/health HTTP/1.1\r\nX: " + b"x" * 2_000_000)
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
    writer.close()


async def test_what_is_no_http_gets_a_plain_answer(node: RunningAgent) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(node.url.rpartition(":")[2]))
    writer.write(b"\x16\x03\x01\x02\x00 hello\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 400")
    writer.close()


async def test_the_token_is_in_no_log(node: RunningAgent, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    await call(node, "GET", "/v1/node", headers=bearer("n" * 43))
    await node.client.node()
    ours = [record.getMessage() for record in caplog.records if "linkcpp" in record.name]
    assert ours
    assert not any(node.token in line or "n" * 43 in line for line in ours)


async def test_an_agent_on_ipv6_proves_itself_and_serves(stock_engine: EngineLocation) -> None:
    async with running_agent(stock_engine, host="::1") as node:
        assert (await node.client.node()).name == "attic"


async def test_metrics_are_for_programs_on_this_machine(
    node: RunningAgent,
) -> None:
    async with httpx.AsyncClient() as http:
        answer = await http.get(f"{node.url}/metrics")
        assert 'linkcpp_node_offered_bytes{device="CPU"}' in answer.text
        # As through a proxy on this machine: then anybody may be asking.
        proxied = {"X-Forwarded-For": "203.0.113.9"}
        assert (await http.get(f"{node.url}/metrics", headers=proxied)).status_code == 401
        known = proxied | {"Authorization": f"Bearer {node.token}"}
        assert (await http.get(f"{node.url}/metrics", headers=known)).status_code == 401


async def test_every_answer_has_an_id_but_strangers_do_not_fill_the_log(
    node: RunningAgent, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "linkcpp")
    answers = [
        await call(node, "GET", "/v1/health"),
        await call(node, "DELETE", f"/v1/servers/{ID}"),
        await call(node, "DELETE", f"/v1/servers/{ID}", headers=bearer(node.token)),
    ]
    assert [answer.status_code for answer in answers] == [200, 401, 204]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == len(ids)
    logged = [vars(record) for record in caplog.records if record.name == REQUEST_LOGGER]
    assert [line["request_id"] for line in logged] == ids[-1:]
