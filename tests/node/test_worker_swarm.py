"""A virtual device whose workers are behind node agents: the bits of one process, always."""

import asyncio
import contextlib
from pathlib import Path
from typing import TypeVar

from linkcpp.dispatch.control import NewWorker
from linkcpp.engine.records import EngineLocation
from linkcpp.link.forward import Forward
from linkcpp.node.records import worker_target
from tests.node.agents import running_agent
from tests.node.links import break_path, end_of
from tests.node.test_workers import a_worker, send
from tests.support.models import qwen3moe
from tests.support.swarm import as_json, running_device, running_llama_server

WAYS = ("through the coordinator", "direct")
PROMPT = list(range(40, 70))

_T = TypeVar("_T")


class Threaded(contextlib.ExitStack):
    """Enters and leaves blocking contexts in threads: the links need the event loop meanwhile."""

    async def enter(self, context: contextlib.AbstractContextManager[_T]) -> _T:
        return await asyncio.to_thread(self.enter_context, context)

    async def __aenter__(self) -> "Threaded":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)


async def test_a_lost_link_changes_no_bit_and_its_worker_is_used_again(
    engine: EngineLocation, tmp_path: Path
) -> None:
    async with Threaded() as alone:
        server = await alone.enter(running_llama_server(engine, qwen3moe(), tmp_path))
        expected = as_json(await asyncio.to_thread(server.complete, PROMPT, 12))
    async with (
        running_agent(engine) as first,
        running_agent(engine) as second,
        contextlib.AsyncExitStack() as forwards,
        Threaded() as running,
    ):
        entries = []
        for name, node, experts in (("a", first, (0, 9)), ("b", second, (6, 15))):
            ranges = [(layer, *experts) for layer in range(4)]
            made = await a_worker(node, await send(node, tmp_path, *ranges))
            relay = await Forward.open(node.client.link, worker_target(made.worker.worker_id))
            await forwards.enter_async_context(relay)
            # One over the link to its node, one by itself.
            end = end_of(node.client, made, relay.port if node is first else None)
            entries.append(NewWorker(name=name, token=made.token, link=end))
        # On a busy machine a path is not replaced in the time after which another one is asked.
        device = await running.enter(
            running_device(
                engine,
                qwen3moe(),
                entries,
                tmp_path,
                deadline_floor_ms=20_000.0,
                fallback_model=str(qwen3moe()),
            )
        )
        server = await running.enter(
            running_llama_server(
                engine, qwen3moe(), tmp_path, device_port=device.port, label="swarm"
            )
        )
        assert as_json(await asyncio.to_thread(server.complete, PROMPT, 12)) == expected
        answering = asyncio.create_task(asyncio.to_thread(server.complete, PROMPT, 12))
        await asyncio.sleep(0.1)
        break_path(first.client.link)
        assert as_json(await answering) == expected
        status = await asyncio.to_thread(
            device.wait_until, "all(w['state'] == 'up' for w in s['workers'])"
        )
        before = {worker["name"]: worker["pair_count"] for worker in status["workers"]}
        ways = [worker["way"] for worker in status["workers"]]
        assert [way.startswith(kind) for way, kind in zip(ways, WAYS, strict=True)] == [True, True]
        # The session went on over another path: the device noticed nothing.
        assert status["workers"][0]["failure_count"] == 0
        assert first.client.link.status().reconnect_count == 1
        assert as_json(await asyncio.to_thread(server.complete, PROMPT, 12)) == expected
        status = await asyncio.to_thread(device.status)
        assert status["failed_pair_count"] == 0
        for worker in status["workers"]:
            assert worker["pair_count"] > before[worker["name"]]
