"""What the port answers besides the relay."""

import asyncio

import httpx
import pytest

from linkcpp.common.callers import caller, is_this_machine
from linkcpp.registry.relay import RELAY_PATH
from tests.gateway.gateways import GATEWAY_ID, METRICS_TOKEN, Gateway, new_edge

KEY = "dGhlIHNhbXBsZSBub25jZQ=="
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": KEY,
}


def http(gateway: Gateway) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}", trust_env=False)


async def test_health_tells_which_gateway_it_is(gateway: Gateway) -> None:
    async with http(gateway) as client:
        answer = await client.get("/v1/health")
    assert answer.json()["service"] == "linkcpp-gateway"
    assert answer.json()["gateway_id"] == GATEWAY_ID


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/relay/x", "/docs", "/v1/health/..%2f"])
async def test_everything_else_is_not_found(gateway: Gateway, path: str) -> None:
    async with http(gateway) as client:
        answer = await client.get(path)
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
        assert (await client.get(path, headers=UPGRADE)).status_code in (403, 404)


async def test_metrics_are_for_this_machine_and_for_holders_of_the_token(gateway: Gateway) -> None:
    proxied = {"X-Forwarded-For": "127.0.0.1"}
    async with http(gateway) as client, gateway.pair() as (backbone, node):
        await backbone.send(bytes(100_000))
        await node.recv()
        text = (await client.get("/metrics")).text
        assert "linkcpp_gateway_edges 1.0" in text
        received = next(
            float(line.split()[1])
            for line in text.splitlines()
            if line.startswith("linkcpp_gateway_received_bytes_total")
        )
        assert received > 100_000
        assert (await client.get("/metrics", headers=proxied)).status_code == 401
        wrong = {**proxied, "Authorization": "Bearer wrong"}
        assert (await client.get("/metrics", headers=wrong)).status_code == 401
        right = {**proxied, "Authorization": f"Bearer {METRICS_TOKEN}"}
        assert (await client.get("/metrics", headers=right)).status_code == 200


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"Upgrade": "h2c"}, 426),
        ({"Sec-WebSocket-Version": "8"}, 426),
        ({"Sec-WebSocket-Key": "short"}, 400),
        ({"Sec-WebSocket-Key": "§"}, 400),
    ],
)
async def test_requests_that_ask_for_no_websocket_are_refused(
    gateway: Gateway, change: dict[str, str], status: int
) -> None:
    headers = {**UPGRADE, **change}
    async with http(gateway) as client:
        encoded = {key.encode(): value.encode("latin-1") for key, value in headers.items()}
        answer = await client.get(RELAY_PATH, headers=encoded)
    assert answer.status_code == status
    assert answer.json()["code"]


async def test_no_secret_of_a_relay_is_in_its_metrics(gateway: Gateway) -> None:
    edge = new_edge()
    async with gateway.pair(edge), http(gateway) as client:
        text = (await client.get("/metrics")).text
    assert edge not in text


async def test_a_request_head_that_does_not_end_is_dropped(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linkcpp.common.http_server.HEAD_DEADLINE_SECONDS", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"GET /v1/relay HTTP/1.1\r\nHost: x\r\n")
    assert await reader.read() == b""
    writer.close()


def test_limits_count_the_address_that_the_proxy_saw() -> None:
    forwarded = [(b"x-forwarded-for", b"6.6.6.6, 9.9.9.9")]
    assert caller("127.0.0.1", forwarded) == "9.9.9.9"
    assert caller("8.8.8.8", forwarded) == "8.8.8.8"
    assert caller("127.0.0.1", [(b"x-forwarded-for", b"nonsense")]) == "127.0.0.1"
    assert caller("2001:db8:1:2:3::4", []) == caller("2001:db8:1:2:ffff::", [])
    assert caller("::ffff:8.8.8.8", []) == "8.8.8.8"


def test_a_proxy_on_this_machine_is_not_this_machine() -> None:
    assert is_this_machine("::1", [])
    assert not is_this_machine("127.0.0.1", [(b"cf-connecting-ip", b"127.0.0.1")])
    assert not is_this_machine("10.0.0.1", [])
