"""Slices on a node: fetched by itself with counted bytes, or sent and checked by their hashes."""

import asyncio
import contextlib
import hashlib
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest

from linkcpp.common.paths import data_folder
from linkcpp.engine.records import EngineLocation
from linkcpp.model.cursor import FIRST_CHUNK_BYTES
from linkcpp.model.slices.manifest import manifest_path, read_manifest
from linkcpp.model.slices.verifying import verify_file
from linkcpp.node import slice_quota, slice_routes
from linkcpp.node.agent import AgentOptions
from linkcpp.node.client import NodeClient, NodeRefusedError
from linkcpp.node.connector import open_client
from linkcpp.node.records import SliceId, SliceRecord, SliceState
from linkcpp.node.slice_files import file_pieces, manifest_segments, slice_id
from tests.model.web_server import Handler, Server, asked_range, send_range
from tests.node.agents import RunningAgent, agent_process, running_agent
from tests.node.slices import URL_PATH, cut_here, publish, request_for, segments

CHOSEN = ((0, 0, 3), (2, 4, 9))


@pytest.fixture
async def node(stock_engine: EngineLocation) -> AsyncIterator[RunningAgent]:
    async with running_agent(stock_engine) as running:
        yield running


def file_of(name: SliceId, home: Path | None = None) -> Path:
    folder = home / "data" if home else data_folder()
    return folder / "slices" / name / "slice.gguf"


def stall_after(web: Server, count: int) -> threading.Event:
    """Answer so many requests for what follows the header, and the rest once the event is set."""
    go_on = threading.Event()
    served = 0

    def answer(handler: Handler, data: bytes) -> None:
        nonlocal served
        first, _ = asked_range(handler)
        if first >= FIRST_CHUNK_BYTES:
            with web.counting:
                served += 1
                must_wait = served > count
            if must_wait:
                go_on.wait(300)
        with contextlib.suppress(ConnectionError):
            send_range(handler, data)

    web.answers[URL_PATH] = answer
    return go_on


async def until_received(client: NodeClient, name: SliceId, min_bytes: int) -> SliceRecord:
    while True:
        record = await client.slice(name)
        assert record.state is not SliceState.FAILED, record.detail
        if record.received_bytes >= min_bytes:
            return record
        await asyncio.sleep(0.02)


async def test_a_node_fetches_only_the_header_and_the_wanted_slabs(
    node: RunningAgent, web: Server, tmp_path: Path
) -> None:
    here = cut_here(tmp_path, *CHOSEN)
    asked = await node.client.fetch_slice(request_for(publish(web), *CHOSEN))
    assert asked.segments == segments(*CHOSEN)
    seen: list[SliceRecord] = []
    record = await node.client.wait_slice(asked.slice_id, seen.append)
    assert record.state is SliceState.READY
    assert record.transferred_bytes == web.sent_bytes
    # One byte asks for the size, and the header of the model is read in chunks.
    assert web.sent_bytes <= here.copied_bytes + FIRST_CHUNK_BYTES + 64
    assert record.file_bytes == record.received_bytes == here.file_bytes
    assert record.slab_bytes == here.copied_bytes
    assert file_of(record.slice_id).read_bytes() == here.path.read_bytes()
    assert await node.client.slice_manifest(record.slice_id) == read_manifest(here.path).model_copy(
        update={"file_name": "slice.gguf"}
    )
    # Asked for again, in whatever pieces: it is there.
    again = request_for(web.url + URL_PATH, (2, 7, 9), (0, 0, 3), (2, 4, 7))
    sent_before = web.sent_bytes
    assert (await node.client.fetch_slice(again)) == record
    assert web.sent_bytes == sent_before


async def test_a_fetch_goes_on_after_the_agent_was_killed(
    stock_engine: EngineLocation, web: Server, tmp_path: Path
) -> None:
    chosen = [(layer, 0, 11) for layer in range(4)]
    here = cut_here(tmp_path, *chosen)
    home = tmp_path / "node"
    request = request_for(publish(web) + "?signature=s3cret", *chosen)
    go_on = stall_after(web, 6)
    async with agent_process(stock_engine, home) as agent:
        async with await open_client(agent.url, agent.token) as client:
            asked = await client.fetch_slice(request)
            await until_received(client, asked.slice_id, here.file_bytes // 4)
            children = agent.engine_processes()
            assert children
            agent.process.kill()
            await agent.process.wait()
        await asyncio.to_thread(psutil.wait_procs, children, timeout=120)
        assert not any(child.is_running() for child in children)
    assert not file_of(asked.slice_id, home).exists()
    go_on.set()
    async with (
        agent_process(stock_engine, home) as agent,
        await open_client(agent.url, agent.token) as client,
    ):
        record = await client.wait_slice(asked.slice_id)
    # What the first agent had finished was not fetched again.
    assert record.transferred_bytes < here.copied_bytes + FIRST_CHUNK_BYTES - here.file_bytes // 8
    assert file_of(asked.slice_id, home).read_bytes() == here.path.read_bytes()
    logs = [path.read_text() for path in (home / "state" / "slices").glob("*")]
    assert not any("s3cret" in text for text in [*logs, agent.output.read_text()])


async def test_a_slice_is_sent_and_checked_piece_by_piece(
    node: RunningAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linkcpp.node.client._PART_BYTES", 100_000)
    here = cut_here(tmp_path, *CHOSEN)
    seen: list[SliceRecord] = []
    record = await node.client.send_slice(here.path, seen.append)
    assert record.state is SliceState.READY
    assert record.transferred_bytes == here.file_bytes
    assert [entry.received_bytes for entry in seen[:3]] == [0, 100_000, 200_000]
    assert file_of(record.slice_id).read_bytes() == here.path.read_bytes()
    assert verify_file(file_of(record.slice_id), lambda _: None).is_sound
    assert (await node.client.send_slice(here.path)) == record


async def test_an_upload_goes_on_after_the_agent_was_killed(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    here = cut_here(tmp_path, *CHOSEN)
    content = here.path.read_bytes()
    manifest = read_manifest(here.path)
    name = slice_id(manifest.model.digest, manifest_segments(manifest))
    home = tmp_path / "node"
    half = len(content) // 2
    async with (
        agent_process(stock_engine, home) as agent,
        await open_client(agent.url, agent.token) as client,
    ):
        await put_manifest(client, name, manifest.model_dump_json().encode())
        record = await put(client, name, 0, content[:half])
        assert record.received_bytes == half
        agent.process.kill()
        await agent.process.wait()
    partial = file_of(name, home).with_name(".slice.gguf.partial")
    assert partial.exists()
    async with (
        agent_process(stock_engine, home) as agent,
        await open_client(agent.url, agent.token) as client,
    ):
        resumed = await client.slice(name)
        largest = max(tensor.slab_bytes for tensor in manifest.tensors)
        assert half - largest <= resumed.received_bytes <= half
        record = await client.send_slice(here.path)
    assert record.state is SliceState.READY
    assert record.transferred_bytes == len(content) - resumed.received_bytes
    assert not partial.exists()
    assert file_of(name, home).read_bytes() == content


async def test_damage_on_the_disk_is_found_when_an_upload_goes_on(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    here = cut_here(tmp_path, *CHOSEN)
    content = here.path.read_bytes()
    manifest = read_manifest(here.path)
    name = slice_id(manifest.model.digest, manifest_segments(manifest))
    async with running_agent(stock_engine) as node:
        await put_manifest(node.client, name, manifest.model_dump_json().encode())
        await put(node.client, name, 0, content[:-1])
    partial = file_of(name).with_name(".slice.gguf.partial")
    damaged = bytearray(partial.read_bytes())
    at = manifest.tensors[1].offset_bytes
    damaged[at] ^= 1
    partial.write_bytes(damaged)
    async with running_agent(stock_engine) as node:
        assert at - 32 < (await node.client.slice(name)).received_bytes <= at
        await node.client.send_slice(here.path)
    assert file_of(name).read_bytes() == content


async def test_a_slab_with_another_hash_is_refused_by_name_and_dropped(
    node: RunningAgent, tmp_path: Path
) -> None:
    here = cut_here(tmp_path, *CHOSEN)
    content = bytearray(here.path.read_bytes())
    manifest = read_manifest(here.path)
    tensor = manifest.tensors[0]
    name = slice_id(manifest.model.digest, manifest_segments(manifest))
    await put_manifest(node.client, name, manifest.model_dump_json().encode())
    second = tensor.offset_bytes + tensor.slab_bytes
    content[second + 7] ^= 0x40
    with pytest.raises(NodeRefusedError) as error:
        await put(node.client, name, 0, bytes(content))
    assert error.value.code == "wrong_hash"
    assert "expert 1 of" in error.value.message
    assert tensor.name in error.value.message
    record = await node.client.slice(name)
    assert (record.state, record.received_bytes) == (SliceState.RECEIVING, second)
    content[second + 7] ^= 0x40
    record = await put(node.client, name, second, bytes(content[second:]))
    assert record.state is SliceState.READY
    assert file_of(name).read_bytes() == content


@pytest.mark.parametrize("offset", [1, 5_000_000])
async def test_bytes_that_do_not_follow_are_refused_with_where_to_go_on(
    node: RunningAgent, tmp_path: Path, offset: int
) -> None:
    here = cut_here(tmp_path, (1, 0, 1))
    manifest = read_manifest(here.path)
    name = slice_id(manifest.model.digest, manifest_segments(manifest))
    with pytest.raises(NodeRefusedError) as error:
        await put(node.client, name, 0, b"x")
    assert error.value.code == "unknown_slice"
    await put_manifest(node.client, name, manifest.model_dump_json().encode())
    with pytest.raises(NodeRefusedError, match="Byte 0 of the slice is next") as error:
        await put(node.client, name, offset, b"x")
    assert error.value.code == "wrong_offset"
    with pytest.raises(NodeRefusedError) as error:
        await put(node.client, name, 0, bytes(here.file_bytes + 1))
    assert error.value.code in ("wrong_hash", "too_large")


async def test_a_manifest_of_another_slice_or_with_holes_is_refused(
    node: RunningAgent, tmp_path: Path
) -> None:
    here = cut_here(tmp_path, *CHOSEN)
    manifest = read_manifest(here.path)
    name = slice_id(manifest.model.digest, manifest_segments(manifest))
    with pytest.raises(NodeRefusedError) as error:
        await put_manifest(node.client, SliceId("0" * 32), manifest.model_dump_json().encode())
    assert error.value.code == "another_slice"
    fewer = manifest.model_copy(update={"tensors": manifest.tensors[1:]})
    with pytest.raises(NodeRefusedError, match="does not follow"):
        await put_manifest(node.client, name, fewer.model_dump_json().encode())
    longer = manifest.model_copy(update={"file_bytes": manifest.file_bytes + 4096})
    with pytest.raises(NodeRefusedError, match="describes"):
        await put_manifest(node.client, name, longer.model_dump_json().encode())
    beyond = tuple(
        tensor.model_copy(
            update={"experts": tuple((a + 2**20, b + 2**20) for a, b in tensor.experts)}
        )
        for tensor in manifest.tensors
    )
    far = manifest.model_copy(update={"tensors": beyond})
    with pytest.raises(NodeRefusedError, match="none of experts"):
        await put_manifest(node.client, name, far.model_dump_json().encode())
    assert (await node.client.slices()).slices == ()


async def test_a_file_that_is_right_by_its_hashes_but_another_slice_is_not_taken(
    node: RunningAgent, tmp_path: Path
) -> None:
    mine, other = cut_here(tmp_path, (1, 0, 1)), cut_here(tmp_path, (1, 2, 3))
    manifest = read_manifest(other.path)
    tensors = tuple(tensor.model_copy(update={"experts": ((0, 1),)}) for tensor in manifest.tensors)
    forged = manifest.model_copy(update={"tensors": tensors})
    name = slice_id(forged.model.digest, manifest_segments(forged))
    await put_manifest(node.client, name, forged.model_dump_json().encode())
    with pytest.raises(NodeRefusedError) as error:
        await put(node.client, name, 0, other.path.read_bytes())
    assert error.value.code == "not_that_slice"
    assert (await node.client.slice(name)).state is SliceState.FAILED
    assert (await node.client.send_slice(mine.path)).state is SliceState.READY


async def test_slices_stay_within_the_owners_limit(
    stock_engine: EngineLocation, web: Server, tmp_path: Path
) -> None:
    first, second = cut_here(tmp_path, (0, 0, 3)), cut_here(tmp_path, (1, 0, 3))
    limit = first.file_bytes + second.file_bytes - 1
    options = AgentOptions(host="127.0.0.1", mdns=False, slices_limit_bytes=limit)
    async with running_agent(stock_engine, options=options) as node:
        assert (await node.client.slices()).offered_bytes == limit
        sent = await node.client.send_slice(first.path)
        assert (await node.client.slices()).offered_bytes == second.file_bytes - 1
        # A plan may count on what nobody uses: the slice gives way, or serves the same model again.
        assert (await node.client.node()).slice_bytes == limit
        node.agent.slices.get(sent.slice_id).user_count = 1
        assert (await node.client.node()).slice_bytes == second.file_bytes - 1
        with pytest.raises(NodeRefusedError) as error:
            await node.client.send_slice(second.path)
        assert "linkcpp node --slices" in (error.value.hint or "")
        node.agent.slices.get(sent.slice_id).user_count = 0
        with pytest.raises(NodeRefusedError, match="left for slices") as error:
            await node.client.send_slice(second.path)
        assert error.value.code == "insufficient_storage"
        asked = await node.client.fetch_slice(request_for(publish(web), (1, 0, 3)))
        with pytest.raises(NodeRefusedError, match="left for slices"):
            await node.client.wait_slice(asked.slice_id)
        assert web.sent_bytes <= FIRST_CHUNK_BYTES + 64
        await node.client.delete_slice(sent.slice_id)
        await node.client.delete_slice(sent.slice_id)
        await node.client.fetch_slice(request_for(publish(web), (1, 0, 3)))
        assert (await node.client.wait_slice(asked.slice_id)).state is SliceState.READY
        assert not file_of(sent.slice_id).parent.exists()


async def test_slices_that_nobody_used_for_long_give_way_to_new_ones(
    stock_engine: EngineLocation, web: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = [cut_here(tmp_path, (layer, 0, 3)) for layer in range(4)]
    limit = sum(piece.file_bytes for piece in pieces[:3])
    options = AgentOptions(host="127.0.0.1", mdns=False, slices_limit_bytes=limit)
    async with running_agent(stock_engine, options=options) as node:
        old, older, used = [(await node.client.send_slice(p.path)).slice_id for p in pieces[:3]]
        # Each was used just now, so none gives way.
        with pytest.raises(NodeRefusedError, match="left for slices"):
            await node.client.send_slice(pieces[3].path)
        monkeypatch.setattr(slice_quota, "KEPT_SECONDS", -1e9)
        for name, seconds in ((old, 2e9), (older, 1e9), (used, 5e8)):
            os.utime(file_of(name).parent, (seconds, seconds))
        node.agent.slices.get(used).user_count = 1
        assert (await node.client.slices()).offered_bytes == 2 * pieces[0].file_bytes
        sent = await node.client.send_slice(pieces[3].path)
        assert {r.slice_id for r in (await node.client.slices()).slices} == {
            old,
            used,
            sent.slice_id,
        }
        assert not file_of(older).parent.exists()
        # A fetched one tells its size only while it is fetched.
        node.agent.slices.get(sent.slice_id).user_count = 1
        asked = await node.client.fetch_slice(request_for(publish(web), (1, 0, 3)))
        assert (await node.client.wait_slice(asked.slice_id)).state is SliceState.READY
        assert not file_of(old).parent.exists()
        assert file_of(used).exists()
        node.agent.slices.get(asked.slice_id).user_count = 1
        with pytest.raises(NodeRefusedError) as error:
            await node.client.send_slice(pieces[0].path)
        assert error.value.code == "insufficient_storage"


async def test_a_disk_with_little_room_takes_no_slice(
    node: RunningAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_quota, "RESERVE_BYTES", 2**62)
    with pytest.raises(NodeRefusedError) as error:
        await node.client.send_slice(cut_here(tmp_path, (0, 0, 0)).path)
    assert error.value.code == "insufficient_storage"


async def test_another_model_at_the_address_is_refused(node: RunningAgent, web: Server) -> None:
    request = request_for(publish(web), (0, 0, 3))
    other = request.model_copy(update={"model_digest": hashlib.sha256(b"x").hexdigest()})
    asked = await node.client.fetch_slice(other)
    with pytest.raises(NodeRefusedError, match="another model"):
        await node.client.wait_slice(asked.slice_id)
    missing = await node.client.fetch_slice(
        request.model_copy(update={"url": f"{web.url}/nothing.gguf"})
    )
    with pytest.raises(NodeRefusedError, match="no file at"):
        await node.client.wait_slice(missing.slice_id)
    # Asked for again with the right address, it works.
    await node.client.fetch_slice(request)
    assert (await node.client.wait_slice(missing.slice_id)).state is SliceState.READY


async def test_the_owners_token_does_not_go_to_an_address_that_somebody_else_chose(
    node: RunningAgent, web: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINKCPP_MODEL_TOKEN", "owners-secret")
    asked = await node.client.fetch_slice(request_for(publish(web), (0, 0, 3)))
    await node.client.wait_slice(asked.slice_id)
    assert web.seen
    assert not any("owners-secret" in str(headers) for _, headers in web.seen)


async def test_a_crash_just_before_a_fetch_was_noted_as_done_fetches_nothing_again(
    stock_engine: EngineLocation, web: Server
) -> None:
    request = request_for(publish(web), (0, 0, 3))
    async with running_agent(stock_engine) as node:
        asked = await node.client.fetch_slice(request)
        done = await node.client.wait_slice(asked.slice_id)
    left = file_of(asked.slice_id).with_name("request.json")
    left.write_text(request.model_dump_json())
    sent = web.sent_bytes
    async with running_agent(stock_engine) as node:
        again = await node.client.slice(asked.slice_id)
        assert again == done.model_copy(update={"transferred_bytes": 0})
    assert web.sent_bytes == sent
    assert not left.exists()


async def test_a_path_of_the_nodes_own_disk_is_no_address(node: RunningAgent) -> None:
    headers = {"Authorization": f"Bearer {node.token}"}
    async with httpx.AsyncClient() as http:
        for url in ("/etc/passwd", "file:///etc/passwd", "http://a b", "ftp://host/x"):
            body = {"url": url, "model_digest": "0" * 64, "segments": [{"layer": 0}]}
            answer = await http.post(f"{node.url}/v1/slices", json=body, headers=headers)
            assert answer.status_code == 422


async def test_a_slice_is_deleted_while_it_is_fetched(node: RunningAgent, web: Server) -> None:
    go_on = stall_after(web, 2)
    asked = await node.client.fetch_slice(request_for(publish(web), (0, 0, 9), (1, 0, 9)))
    await until_received(node.client, asked.slice_id, 1000)
    await node.client.delete_slice(asked.slice_id)
    assert (await node.client.slices()).slices == ()
    assert not file_of(asked.slice_id).parent.exists()
    go_on.set()


async def test_two_cannot_send_one_slice_at_a_time_and_who_stalls_is_left(
    node: RunningAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_routes, "STALL_SECONDS", 2.0)
    here = cut_here(tmp_path, *CHOSEN)
    manifest = read_manifest(here.path)
    name = slice_id(manifest.model.digest, manifest_segments(manifest))
    await put_manifest(node.client, name, manifest.model_dump_json().encode())
    host, port = node.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        f"PUT /v1/slices/{name}?offset=0 HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"
        f"Authorization: Bearer {node.token}\r\n\r\nGG".encode()
    )
    await writer.drain()
    with pytest.raises(NodeRefusedError) as error:
        while True:
            await put(node.client, name, 0, b"")
    assert error.value.code == "slice_busy"
    assert b"408" in await reader.readline()
    writer.close()
    assert (await node.client.send_slice(here.path)).state is SliceState.READY


def test_pieces_of_a_slice_leave_out_no_byte(tmp_path: Path) -> None:
    here = cut_here(tmp_path, *CHOSEN)
    content = here.path.read_bytes()
    at = 0
    for piece in file_pieces(read_manifest(here.path)):
        part = content[at : at + piece.size_bytes]
        assert hashlib.sha256(part).hexdigest() == piece.sha256, piece.label
        at += piece.size_bytes
    assert at == len(content)
    assert manifest_path(here.path).exists()


async def put_manifest(client: NodeClient, name: SliceId, body: bytes) -> None:
    await client._call("PUT", f"/v1/slices/{name}/manifest", body)


async def put(client: NodeClient, name: SliceId, offset: int, data: bytes) -> SliceRecord:
    answer = await client._call("PUT", f"/v1/slices/{name}?offset={offset}", data)
    return SliceRecord.model_validate_json(answer)
