"""A worker process: an rpc-server of its own, slabs loaded into it, compute frames answered."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from linkcpp.common.child_main import Announce, run_child
from linkcpp.common.errors import LinkcppError
from linkcpp.common.records import Record
from linkcpp.common.sockets import listen
from linkcpp.engine.ops import read_op_table
from linkcpp.engine.process_spec import ProcessState
from linkcpp.engine.records import EngineLocation
from linkcpp.engine.rpc_server import LOOPBACK, RunningRpcServer, start_rpc_server
from linkcpp.engine.rpc_socket import RpcSocket
from linkcpp.link.program import AcceptedEnd, ProgramDoor
from linkcpp.model.slices.segments import Segment
from linkcpp.worker.compute import DEFAULT_SCRATCH_BYTES, ExpertCompute
from linkcpp.worker.frames import Limits, Welcome
from linkcpp.worker.service import WorkerService
from linkcpp.worker.several import JoinedSlabs
from linkcpp.worker.slabs import GgufSlabs, SlabProvider
from linkcpp.worker.store import LoadedSlabs, Progress

_END_SECONDS = 2.0

READY_PATTERN = r"^worker ready on 127\.0\.0\.1:(\d+)"


class WorkerConfig(Record):
    """What a worker process is told.

    ``slabs`` is the path or URL of a GGUF file that has the experts; without ``segments`` it holds
    all that the file has. ``more_slabs`` are further files of the same model, taken whole.
    ``port`` 0 takes a free one. ``link`` is the end of a link of its own to whoever asks it.
    """

    name: str
    engine: EngineLocation
    slabs: str
    more_slabs: tuple[str, ...] = ()
    segments: tuple[Segment, ...] | None = None
    token: str
    log_path: Path
    port: int = 0
    device: str = "CPU"
    threads: int | None = None
    scratch_bytes: int = DEFAULT_SCRATCH_BYTES
    limits: Limits = Limits()
    link: AcceptedEnd | None = None


def open_slabs(config: WorkerConfig) -> SlabProvider:
    """Open where the worker's experts come from.

    Raises:
        LinkcppError: it cannot be read, or lacks experts of the segments.
    """
    with contextlib.ExitStack() as opened:
        parts: list[SlabProvider] = []
        for location in (config.slabs, *config.more_slabs):
            part = GgufSlabs(location, None if parts else config.segments)
            opened.callback(part.close)
            parts.append(part)
        joined = JoinedSlabs(parts) if len(parts) > 1 else parts[0]
        opened.pop_all()
        return joined


async def run_worker(
    config: WorkerConfig, announce: Announce, on_progress: Progress | None = None
) -> None:
    """Run a worker until SIGTERM or SIGINT; ``announce`` gets a line once it serves.

    Raises:
        LinkcppError: it cannot start, or its rpc-server failed.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    server = await start_rpc_server(
        config.engine,
        device=config.device,
        log_path=config.log_path,
        threads=config.threads,
        on_change=lambda status: stopping.set() if status.state == ProcessState.FAILED else None,
    )
    try:
        loading = asyncio.create_task(asyncio.to_thread(_prepare, config, server.port, on_progress))
        stop = asyncio.create_task(stopping.wait())
        await asyncio.wait({loading, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            await server.process.stop()
            with contextlib.suppress(LinkcppError):
                await loading
            return
        try:
            await _serve(config, loading.result(), announce, stop)
        except LinkcppError:
            # What broke is mostly the connection to an rpc-server that ended, which tells more.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await server.process.wait()
            _check(server)
            raise
        _check(server)
    finally:
        await server.process.stop()


def _prepare(config: WorkerConfig, port: int, on_progress: Progress | None) -> WorkerService:
    rpc = RpcSocket(LOOPBACK, port)
    with _opened(config) as provider:
        store = LoadedSlabs(rpc, provider, on_progress)
        welcome = Welcome(
            model_digest=provider.model_digest,
            hidden_size=provider.hidden_size,
            segments=provider.segments,
            engine=f"RPC {rpc.version}",
            limits=config.limits,
            name=config.name,
        )
    ops = read_op_table(config.engine, rpc.version)
    compute = ExpertCompute(rpc, ops, store, scratch_bytes=config.scratch_bytes)
    return WorkerService(compute, welcome, config.token)


@contextlib.contextmanager
def _opened(config: WorkerConfig) -> Iterator[SlabProvider]:
    provider = open_slabs(config)
    try:
        yield provider
    finally:
        provider.close()


async def _serve(
    config: WorkerConfig, service: WorkerService, announce: Announce, stop: "asyncio.Task[bool]"
) -> None:
    (listener,) = listen(LOOPBACK, config.port)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def serve() -> None:
        service.serve(listener)
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=serve, daemon=True).start()
    door = None
    if config.link is not None:
        door = await asyncio.to_thread(ProgramDoor, config.link, service.serve_connection)
    announce(f"worker ready on {LOOPBACK}:{listener.getsockname()[1]}")
    ending = asyncio.create_task(ended.wait())
    await asyncio.wait({stop, ending}, return_when=asyncio.FIRST_COMPLETED)
    if door is not None:
        await asyncio.to_thread(door.close)
    service.stop()
    await ending
    if service.failure is not None:
        raise service.failure


def _check(server: RunningRpcServer) -> None:
    status = server.process.status
    if status.state == ProcessState.FAILED:
        raise LinkcppError(
            f"The worker's rpc-server {status.detail}.",
            hint=f"Its log: {server.process.spec.log_path}",
        )


def main(arguments: list[str]) -> int:
    """Run a worker from a file with its configuration as JSON (``python -m linkcpp.worker``)."""
    return run_child(arguments, WorkerConfig, run_worker)
