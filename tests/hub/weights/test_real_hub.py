"""Weights of a whole hub: real tokens, real roles, and a revoked machine's download."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from linkcpp.model.slices.segments import parse_segment
from linkcpp.model.slices.writing import choose_segments, write_slice
from linkcpp.registry.hub_model import HubAccess, HubModel
from linkcpp.registry.records import Role
from tests.hub.hubs import RunningHub, running_hub
from tests.hub.weights.small_hub import add
from tests.model.test_slices import cut
from tests.support.models import qwen3moe

REVOKED_SECONDS = 30


@pytest.fixture
async def real_hub(tmp_path: Path) -> AsyncIterator[RunningHub]:
    add(tmp_path / "hub" / "models", qwen3moe())
    async with running_hub(tmp_path / "hub", None) as running:
        yield running


async def test_a_joined_node_takes_its_slice_and_a_gateway_takes_none(
    real_hub: RunningHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "linkcpp.hub")
    node = await real_hub.machine(Role.NODE)

    def take() -> bytes:
        access = HubAccess(real_hub.url, lambda: node.token)
        with HubModel(access, "m") as model:
            chosen = choose_segments(model.files, [parse_segment("1-2:0-5")])
            path = tmp_path / "s.gguf"
            write_slice(model.files, chosen, path, lambda _: None, model.slice_supply(chosen))
            return path.read_bytes()

    here = cut(qwen3moe(), tmp_path / "here.gguf", "1-2:0-5")
    assert await asyncio.to_thread(take) == here.path.read_bytes()
    # There are hundreds of them for a large slice: no lines for every day.
    ranges = [one for one in caplog.records if getattr(one, "status", None) == 206]
    assert {one.levelname for one in ranges} == {"DEBUG"}
    gateway = await real_hub.machine(Role.GATEWAY, name="relay")
    for path in ("", "/m", "/m/manifest", "/m/slice?segments=0:0", "/m/backbone", "/m/header"):
        answer = await real_hub.http.get(f"/v1/models{path}", headers=gateway.headers)
        assert (answer.status_code, answer.json()["code"]) == (403, "other_role")
        answer = await real_hub.http.get(f"/v1/models{path}")
        assert (answer.status_code, answer.json()["code"]) == (401, "no_token")


async def test_a_revoked_machine_is_cut_off_in_the_middle_of_a_download(
    real_hub: RunningHub,
) -> None:
    node = await real_hub.machine(Role.NODE)
    admin = await real_hub.machine(Role.ADMIN, name="desk")
    host, port = real_hub.url.removeprefix("http://").split(":")
    # Small buffers, so that the hub waits for this caller.
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.write(
        b"GET /v1/models/m/slice?segments=all:all HTTP/1.1\r\nHost: x\r\n"
        b"Authorization: Bearer " + node.token.encode() + b"\r\n\r\n"
    )
    assert b"200" in await reader.readline()
    await admin.client.revoke_node(node.node_id)
    received = 0
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(REVOKED_SECONDS):
            while part := await reader.read(2**16):
                received += len(part)
    assert received < qwen3moe().stat().st_size // 2
    assert real_hub.hub.downloads.running_count == 0
    answer = await real_hub.http.get("/v1/models/m", headers=node.headers)
    assert answer.status_code == 403
    writer.close()


async def test_a_name_in_an_address_is_never_a_path(real_hub: RunningHub) -> None:
    node = await real_hub.machine(Role.NODE)
    for name in ("..", "%2e%2e", "..%2f..%2fhub.db", "%2fetc%2fpasswd", "m%00", ".adding-m"):
        for call in ("", "/manifest", "/header", "/slice?segments=0:0"):
            answer = await real_hub.http.get(f"/v1/models/{name}{call}", headers=node.headers)
            assert answer.status_code in (404, 422), (name, call)
