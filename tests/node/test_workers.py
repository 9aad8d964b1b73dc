"""Expert workers on a node: tokens, leases, memory, streams that outlive paths, an end."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import numpy.typing as npt
import psutil
import pytest

from linkcpp.common.errors import LinkcppError
from linkcpp.common.paths import data_folder, state_folder
from linkcpp.engine.process import SupervisedProcess
from linkcpp.engine.records import EngineLocation
from linkcpp.link.forward import Lease
from linkcpp.model.slices.segments import merge_segments
from linkcpp.node.agent import AgentOptions
from linkcpp.node.client import NodeRefusedError
from linkcpp.node.connector import open_client
from linkcpp.node.managed_program import resident_bytes
from linkcpp.node.records import (
    WORKER_SCRATCH_BYTES,
    NewWorker,
    ServerState,
    SliceId,
    SliceRecord,
    WorkerId,
    WorkerRecord,
    WorkerRequest,
    lease_target,
)
from linkcpp.worker.frames import ErrorCode, FrameError
from tests.model.test_slices import cut, flip
from tests.node.agents import MEBIBYTE, RunningAgent, agent_process, running_agent
from tests.node.links import LINK_KEY, break_path, worker_port
from tests.node.slices import cut_here, segments
from tests.support.memory import peak_bytes
from tests.support.models import qwen35moe
from tests.support.swarm import Running
from tests.worker.test_worker import WIDTH, Peer

HELD = ((0, 0, 7), (1, 0, 3))
ROWS = np.random.default_rng(5).standard_normal((6, WIDTH)).astype(np.float32)


@pytest.fixture
async def node(stock_engine: EngineLocation) -> AsyncIterator[RunningAgent]:
    async with running_agent(stock_engine) as running:
        yield running


async def send(node: RunningAgent, folder: Path, *ranges: tuple[int, int, int]) -> SliceRecord:
    return await node.client.send_slice((await asyncio.to_thread(cut_here, folder, *ranges)).path)


def request(*slices: SliceRecord, **options: object) -> WorkerRequest:
    fields = {
        "deployment": "test",
        "slice_ids": [item.slice_id for item in slices],
        "device": "CPU",
        "threads": 1,
        "lease_seconds": 60.0,
        "link_key": LINK_KEY,
        **options,
    }
    return WorkerRequest.model_validate(fields)


async def a_worker(node: RunningAgent, *slices: SliceRecord, **options: object) -> NewWorker:
    made = await node.client.create_worker(request(*slices, **options))
    assert made.worker.state is ServerState.STARTING
    ready = await node.client.wait_worker(made.worker.worker_id)
    return made.model_copy(update={"worker": ready})


def peer_at(port: int, token: str) -> Peer:
    # A peer looks at the port only.
    running = Running.__new__(Running)
    running.ports = (port,)
    return Peer(running, token)


def compute(
    port: int, token: str, index: list[int], experts: list[int], layer: int = 0
) -> npt.NDArray[np.float32]:
    with peer_at(port, token) as peer:
        peer.teach()
        return peer.compute(ROWS, index, experts, layer)


async def ask(port: int, token: str, experts: list[int], layer: int = 0) -> npt.NDArray[np.float32]:
    index = [number % len(ROWS) for number in range(len(experts))]
    return await asyncio.to_thread(compute, port, token, index, experts, layer)


async def until(
    node: RunningAgent, worker_id: WorkerId, is_so: Callable[[WorkerRecord], bool]
) -> WorkerRecord:
    while True:
        now = await node.client.worker(worker_id)
        if is_so(now):
            return now
        await asyncio.sleep(0.02)


def rpc_server_of(node: RunningAgent, worker: WorkerRecord) -> psutil.Process:
    process = node.agent.workers.get(worker.worker_id).process
    assert process is not None
    for child in psutil.Process(process.pid).children(recursive=True):
        if "rpc-server" in child.name():
            return child
    raise AssertionError("the worker has no rpc-server")


async def test_rows_over_a_link_are_those_of_the_worker_to_the_bit(
    engine: EngineLocation, tmp_path: Path
) -> None:
    experts = [0, 3, 5, 7, 2, 2]
    async with running_agent(engine) as node:
        made = await a_worker(node, await send(node, tmp_path, *HELD))
        record = made.worker
        assert record.segments == segments(*HELD)
        assert record.memory_bytes == record.slab_bytes + WORKER_SCRATCH_BYTES
        direct = await ask(node.agent.workers.get(record.worker_id).port, made.token, experts)
        assert np.abs(direct).sum() > 0
        for is_relayed in (False, True):
            async with await worker_port(node.client, made, is_relayed=is_relayed) as linked:
                assert (await ask(linked.port, made.token, experts) == direct).all()
                assert (await ask(linked.port, made.token, [1, 0], layer=1)).shape == (2, WIDTH)
                assert linked.forward.sent_bytes > ROWS.nbytes
                assert linked.forward.received_bytes > direct.nbytes
                way = linked.link.status().why or ""
                assert way.startswith("through the coordinator" if is_relayed else "direct")
                both = await asyncio.gather(
                    *(ask(linked.port, made.token, experts) for _ in range(2))
                )
                assert all((rows == direct).all() for rows in both)
            await until(node, record.worker_id, lambda now: now.stream_count == 0)


async def test_two_workers_of_one_node_hold_each_their_slices(
    node: RunningAgent, tmp_path: Path
) -> None:
    low = await send(node, tmp_path, (0, 0, 3))
    high = await send(node, tmp_path, (0, 4, 7))
    alone = await a_worker(node, low)
    joined = await a_worker(node, high, low)
    workers = node.agent.workers
    ports = [workers.get(made.worker.worker_id).port for made in (alone, joined)]
    assert joined.worker.segments == merge_segments(segments((0, 0, 7)))
    assert joined.worker.slab_bytes == 2 * alone.worker.slab_bytes
    assert (
        await ask(ports[0], alone.token, [0, 1, 2]) == await ask(ports[1], joined.token, [0, 1, 2])
    ).all()
    await ask(ports[1], joined.token, [3, 4, 7])
    with pytest.raises(FrameError) as error:
        await ask(ports[0], alone.token, [4])
    assert error.value.code == ErrorCode.UNKNOWN_EXPERT
    with pytest.raises(FrameError) as error:
        await ask(ports[0], joined.token, [0])
    assert error.value.code == ErrorCode.BAD_TOKEN
    listed = {item.worker_id for item in await node.client.workers()}
    assert listed == {alone.worker.worker_id, joined.worker.worker_id}
    await node.client.delete_worker(alone.worker.worker_id)
    await node.client.delete_worker(alone.worker.worker_id)
    assert [item.worker_id for item in await node.client.workers()] == [joined.worker.worker_id]
    await ask(ports[1], joined.token, [5])


async def test_the_token_of_a_worker_is_told_once_and_seen_nowhere(
    node: RunningAgent, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = await a_worker(node, await send(node, tmp_path, *HELD))
    process = node.agent.workers.get(made.worker.worker_id).process
    assert process is not None
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in tree:
        assert made.token not in " ".join(member.cmdline())
        assert made.token not in " ".join(member.environ().values())
    assert made.token not in await node.client.worker_logs(made.worker.worker_id)
    assert "worker ready" in await node.client.worker_logs(made.worker.worker_id)
    assert "RPC server" in await node.client.worker_logs(made.worker.worker_id)
    for told in (*(await node.client.workers()), await node.client.worker(made.worker.worker_id)):
        assert made.token not in told.model_dump_json()
    # The file that told the worker is gone as soon as it was read.
    left = [path for path in state_folder().rglob("*") if path.is_file()]
    assert not any(made.token.encode() in path.read_bytes() for path in left)
    assert made.token not in caplog.text


async def test_a_worker_ends_with_its_lease_and_lives_while_it_is_used_or_renewed(
    node: RunningAgent, tmp_path: Path
) -> None:
    held = await send(node, tmp_path, (0, 0, 1))
    made = await a_worker(node, held, lease_seconds=2.0)
    worker_id = made.worker.worker_id
    async with await worker_port(node.client, made):
        await asyncio.sleep(3.0)
        assert (await node.client.renew_worker(worker_id)).state is ServerState.READY
    ended = await until(node, worker_id, lambda now: now.state is not ServerState.READY)
    assert (ended.state, ended.detail) == (ServerState.STOPPED, "its lease ended")
    refusal = await Lease.open(node.client.link, lease_target(worker_id)).wait_ended()
    assert refusal.startswith("worker_stopped: ")
    assert "its lease ended" in refusal
    with pytest.raises(LinkcppError, match="404"):
        await worker_port(node.client, made)


@pytest.mark.parametrize("victim", ["rpc-server", "worker"])
async def test_a_worker_that_dies_is_told_with_its_reason(
    node: RunningAgent, tmp_path: Path, victim: str
) -> None:
    # Other tests' database may run below this process.
    before = psutil.Process().children(recursive=True)
    made = await a_worker(node, await send(node, tmp_path, (0, 0, 1)))
    worker_id = made.worker.worker_id
    process = node.agent.workers.get(worker_id).process
    assert process is not None
    assert process.pid is not None
    async with await worker_port(node.client, made) as linked:
        is_server = victim == "rpc-server"
        os.kill(rpc_server_of(node, made.worker).pid if is_server else process.pid, signal.SIGKILL)
        gone = await linked.wait_ended()
        # Its link does not wait for it to come back.
        assert (await linked.link.wait_failed()).code == "link_lost"
    ended = await node.client.worker(worker_id)
    assert ended.state is ServerState.FAILED
    assert ended.detail
    assert "SIGKILL" in ended.detail
    assert ("rpc-server" in ended.detail) == is_server
    assert ended.detail in gone
    with pytest.raises(NodeRefusedError, match="SIGKILL"):
        await node.client.wait_worker(worker_id)
    while not set(psutil.Process().children(recursive=True)) <= set(before):  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def test_a_connection_to_a_worker_outlives_lost_paths(
    node: RunningAgent, tmp_path: Path
) -> None:
    made = await a_worker(node, await send(node, tmp_path, *HELD))
    async with await worker_port(node.client, made, is_relayed=True) as linked:
        before = await ask(linked.port, made.token, [0, 5])
        with await asyncio.to_thread(peer_at, linked.port, made.token) as peer:
            await asyncio.to_thread(peer.teach)
            for losses in (1, 2):
                break_path(node.client.link)
                rows = await asyncio.to_thread(peer.compute, ROWS, [0, 1], [0, 5])
                assert (rows == before).all()
                assert node.client.link.status().reconnect_count == losses
                break_path(linked.link)
                rows = await asyncio.to_thread(peer.compute, ROWS, [0, 1], [0, 5])
                assert (rows == before).all()
                assert linked.link.status().reconnect_count == losses
        await node.client.delete_worker(made.worker.worker_id)
        assert "it was stopped by its owner" in await linked.wait_ended()


async def test_an_agent_that_sleeps_for_a_while_loses_nothing(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    async with (
        agent_process(stock_engine, tmp_path / "node") as agent,
        await open_client(agent.url, agent.token) as client,
    ):
        held = await client.send_slice(cut_here(tmp_path, (0, 0, 1)).path)
        made = await client.create_worker(request(held))
        await client.wait_worker(made.worker.worker_id)
        async with await worker_port(client, made, is_relayed=True) as linked:
            rows = await ask(linked.port, made.token, [0, 1])
            os.kill(agent.process.pid, signal.SIGSTOP)
            break_path(client.link)
            while client.link.is_up:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            os.kill(agent.process.pid, signal.SIGCONT)
            assert (await ask(linked.port, made.token, [0, 1]) == rows).all()


async def test_killing_the_agent_leaves_nothing_of_its_workers(
    engine: EngineLocation, tmp_path: Path
) -> None:
    async with (
        agent_process(engine, tmp_path / "node") as agent,
        await open_client(agent.url, agent.token) as client,
    ):
        held = await client.send_slice(cut_here(tmp_path, (0, 0, 1)).path)
        made = [await client.create_worker(request(held)) for _ in range(2)]
        for each in made:
            await client.wait_worker(each.worker.worker_id)
        starting = await client.create_worker(request(held))
        assert starting.worker.state is ServerState.STARTING
        processes = agent.engine_processes()
        # Keeper, worker, the worker's keeper and its rpc-server.
        assert len(processes) >= 8
        agent.process.kill()
        await agent.process.wait()
        await asyncio.to_thread(psutil.wait_procs, processes, timeout=120)
        assert not any(process.is_running() for process in processes)
    async with (
        agent_process(engine, tmp_path / "node") as agent,
        await open_client(agent.url, agent.token) as client,
    ):
        assert await client.workers() == ()
        assert (await client.slice(held.slice_id)).slab_bytes == held.slab_bytes
        again = await client.create_worker(request(held))
        os.kill(agent.process.pid, signal.SIGTERM)
        assert await agent.process.wait() == 0
        assert again.token not in await asyncio.to_thread(agent.output.read_text)


async def test_a_worker_keeps_to_its_promise_whatever_it_is_asked(
    engine: EngineLocation, tmp_path: Path
) -> None:
    async with running_agent(engine) as node:
        made = await a_worker(node, await send(node, tmp_path, *HELD))
        worker = node.agent.workers.get(made.worker.worker_id)
        pairs = 4096
        index = [number % len(ROWS) for number in range(pairs)]
        experts = [number % 8 for number in range(pairs)]
        await asyncio.to_thread(compute, worker.port, made.token, index, experts)
        assert worker.process is not None
        program = psutil.Process(worker.process.pid)
        members = [program, *program.children(recursive=True)]
        peak = sum(peak_bytes(member.pid) for member in members)
        assert peak <= worker.memory_bytes + worker.overhead_bytes
        held = await node.client.node()
        assert held.devices[0].offered_bytes > 0


async def test_memory_that_is_not_there_is_refused_with_numbers(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    options = AgentOptions(host="127.0.0.1", mdns=False, memory_limit_bytes=700 * MEBIBYTE)
    async with running_agent(stock_engine, options=options) as node:
        held = await send(node, tmp_path, (0, 0, 1))
        with pytest.raises(NodeRefusedError, match="needs at least") as error:
            await node.client.create_worker(request(held, memory_bytes=32 * MEBIBYTE))
        assert error.value.code == "too_little_memory"
        with pytest.raises(NodeRefusedError, match="and this needs") as error:
            await node.client.create_worker(request(held, memory_bytes=700 * MEBIBYTE))
        assert error.value.code == "insufficient_memory"
        before = (await node.client.node()).devices[0].offered_bytes
        made = await node.client.create_worker(request(held))
        worker = node.agent.workers.get(made.worker.worker_id)
        after = (await node.client.node()).devices[0].offered_bytes
        assert before - after == worker.memory_bytes + worker.overhead_bytes
        await node.client.delete_worker(made.worker.worker_id)
        assert (await node.client.node()).devices[0].offered_bytes == before
        assert await node.client.workers() == ()


async def test_what_a_worker_cannot_be_made_of_is_refused(
    node: RunningAgent, tmp_path: Path
) -> None:
    mine = await send(node, tmp_path, (0, 0, 1))
    other = await node.client.send_slice(cut(qwen35moe(), tmp_path / "other.gguf", "1:0-1").path)
    unknown = mine.model_copy(update={"slice_id": SliceId("0" * 32)})
    for slices, code in (((unknown,), "unknown_slice"), ((mine, other), "several_models")):
        with pytest.raises(NodeRefusedError) as error:
            await node.client.create_worker(request(*slices))
        assert error.value.code == code
    with pytest.raises(NodeRefusedError) as error:
        await node.client.create_worker(request(mine, device="CUDA7"))
    assert error.value.code == "unknown_device"
    assert await node.client.workers() == ()


async def test_a_slice_in_use_is_not_deleted(node: RunningAgent, tmp_path: Path) -> None:
    held = await send(node, tmp_path, (0, 0, 1))
    made = await a_worker(node, held)
    with pytest.raises(NodeRefusedError) as error:
        await node.client.delete_slice(held.slice_id)
    assert error.value.code == "slice_in_use"
    await node.client.delete_worker(made.worker.worker_id)
    await node.client.delete_slice(held.slice_id)
    assert (await node.client.slices()).slices == ()


async def test_a_slice_that_was_damaged_or_removed_is_not_used_and_can_be_sent_again(
    node: RunningAgent, tmp_path: Path
) -> None:
    held = await send(node, tmp_path, (0, 0, 1))
    path = node.agent.slices.get(held.slice_id).path
    before = path.stat()
    flip(path, before.st_size - 40)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(NodeRefusedError, match="is checking") as error:
        await node.client.create_worker(request(held))
    assert error.value.code == "slice_not_ready"
    with pytest.raises(NodeRefusedError, match=r"is damaged: expert 1 of blk\.0") as error:
        await node.client.wait_slice(held.slice_id)
    assert error.value.code == "slice_failed"
    await send(node, tmp_path, (0, 0, 1))
    made = await a_worker(node, held)
    shutil.rmtree(data_folder())
    await node.client.delete_worker(made.worker.worker_id)
    with pytest.raises(NodeRefusedError, match="its file is gone"):
        await node.client.slice_manifest(held.slice_id)
    await send(node, tmp_path, (0, 0, 1))
    await a_worker(node, held)


async def test_a_worker_takes_only_so_many_streams(node: RunningAgent, tmp_path: Path) -> None:
    made = await a_worker(node, await send(node, tmp_path, (0, 0, 1)))
    target = lease_target(made.worker.worker_id)
    leases = [Lease.open(node.client.link, target) for _ in range(9)]
    assert (await leases[-1].wait_ended()).startswith("in_use: ")
    for lease in leases:
        lease.close()
    await until(node, made.worker.worker_id, lambda now: now.stream_count == 0)


@pytest.mark.skipif(sys.platform != "linux", reason="the boot time is read off /proc/stat")
def test_memory_is_measured_also_where_the_boot_time_is_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def denied() -> float:
        raise PermissionError(13, "Permission denied", "/proc/stat")

    monkeypatch.setattr("psutil._pslinux.boot_time", denied)
    mine = cast("SupervisedProcess", SimpleNamespace(pid=os.getpid()))
    assert resident_bytes(mine) > psutil.Process().memory_info().rss
