"""The dispatching process: a backing rpc-server, the virtual device, links to workers, control."""

import asyncio
import contextlib
import logging
import signal
import threading
from pathlib import Path

from pydantic import Field

from linkcpp.common.child_main import Announce, run_child
from linkcpp.common.errors import LinkcppError
from linkcpp.common.http_server import make_server
from linkcpp.common.records import Record
from linkcpp.common.sockets import listen
from linkcpp.dispatch.control import NewServer, NewWorker, build_control
from linkcpp.dispatch.device import VirtualDevice
from linkcpp.dispatch.failures import FailureLog
from linkcpp.dispatch.fallback import Fallback
from linkcpp.dispatch.swarm import Swarm
from linkcpp.dispatch.swarm_state import SwarmOptions
from linkcpp.dispatch.tally import kept_tally
from linkcpp.engine.ops import read_op_table
from linkcpp.engine.process_spec import ProcessState, ProcessStatus
from linkcpp.engine.records import EngineLocation
from linkcpp.engine.rpc_server import LOOPBACK, RunningRpcServer, start_rpc_server
from linkcpp.engine.rpc_socket import RpcSocket
from linkcpp.worker.sampling import DEFAULT_RATE
from linkcpp.worker.slabs import GgufSlabs

_FIRST_PAUSE_SECONDS = 0.5
_MAX_PAUSE_SECONDS = 10.0

_log = logging.getLogger(__name__)

READY_PATTERN = r"^virtual device ready on 127\.0\.0\.1:(\d+), control on 127\.0\.0\.1:(\d+)"


class DispatchConfig(Record):
    """What the dispatching process is told.

    ``model`` may be the hollow backbone file: only its header is read, unless
    ``fallback_model`` (a file that has all experts) is given. Ports 0 are chosen freely.
    Where nobody can compute a row it is NaN, or zeros with ``zero_missing``: those cannot
    outlive the request in a cache, but somebody must look at ``failure_counter`` then.
    ``routing_counts`` keeps how often each expert was chosen, over restarts.
    With ``check_rows`` workers are used once their rows agree with the fallback model's, or with
    those of other workers where there is none. ``spot_check_rate`` is which part of the experts'
    work is compared in the same way while it is used.
    """

    engine: EngineLocation
    model: str
    fallback_model: str | None = None
    fallback_bytes: int = 2 * 2**30
    check_model_digest: str | None = None
    workers: tuple[NewWorker, ...] = ()
    servers: tuple[NewServer, ...] = ()
    device_port: int = 0
    control_port: int = 0
    control_token: str
    log_folder: Path
    backing_device: str = "CPU"
    threads: int | None = None
    deadline_floor_ms: float = 250.0
    patience_seconds: float = 20.0
    zero_missing: bool = False
    failure_counter: Path | None = None
    routing_counts: Path | None = None
    check_rows: bool = True
    spot_check_rate: float = Field(default=DEFAULT_RATE, ge=0, le=1)


class _Dispatch:
    """One run of the process."""

    def __init__(self, config: DispatchConfig, announce: Announce) -> None:
        self._config = config
        self._announce = announce
        self._stopping = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._servers: list[RunningRpcServer] = []
        self._failure: LinkcppError | None = None
        self._fallback: Fallback | None = None
        self._renewing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stopping.set)
        try:
            backing = await self._start_server("backing")
            fallback = await self._start_server("fallback") if self._config.fallback_model else None
            await self._serve(backing, fallback)
        finally:
            if self._renewing is not None:
                self._renewing.cancel()
                await asyncio.gather(self._renewing, return_exceptions=True)
            for server in self._servers:
                await server.process.stop()
        if self._failure is not None:
            raise self._failure

    async def _start_server(self, name: str) -> RpcSocket:
        def watch(status: ProcessStatus) -> None:
            if status.state != ProcessState.FAILED:
                return
            if name == "backing":
                self._stop_because(LinkcppError(f"The {name} rpc-server {status.detail}."))
            elif self._fallback is not None and (self._renewing is None or self._renewing.done()):
                _log.error("the %s rpc-server %s; starting it again", name, status.detail)
                self._renewing = asyncio.create_task(self._renew_fallback(self._fallback))

        server = await start_rpc_server(
            self._config.engine,
            device=self._config.backing_device if name == "backing" else "CPU",
            log_path=self._config.log_folder / f"{name}.log",
            threads=self._config.threads,
            on_change=watch,
        )
        self._servers.append(server)
        return await asyncio.to_thread(RpcSocket, LOOPBACK, server.port)

    async def _renew_fallback(self, fallback: Fallback) -> None:
        """Give the fallback another rpc-server, however often that has to be tried."""
        pause_seconds = _FIRST_PAUSE_SECONDS
        while True:
            await asyncio.sleep(pause_seconds)
            try:
                rpc = await self._start_server("fallback")
                await asyncio.to_thread(fallback.renew, rpc)
            except LinkcppError as error:
                _log.error("the fallback does not come back: %s", error)
                pause_seconds = min(2 * pause_seconds, _MAX_PAUSE_SECONDS)
            else:
                _log.info("the fallback computes again")
                return

    def _stop_because(self, error: LinkcppError) -> None:
        self._failure = self._failure or error
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stopping.set)

    async def _serve(self, backing: RpcSocket, fallback: RpcSocket | None) -> None:
        swarm = await asyncio.to_thread(self._build_swarm, backing, fallback)
        ops = read_op_table(self._config.engine, backing.version)
        device = VirtualDevice(backing, ops, swarm, self._stop_because)
        try:
            for worker in self._config.workers:
                swarm.holders.add(worker.address())
            for entry in self._config.servers:
                swarm.holders.add(entry.address(self._config.engine))
            (device_listener,) = listen(LOOPBACK, self._config.device_port)
            (control_listener,) = listen(LOOPBACK, self._config.control_port)
            threading.Thread(target=device.serve, args=(device_listener,), daemon=True).start()
            control = make_server(
                build_control(device, swarm, self._config.engine, self._config.control_token)
            )
            controlling = asyncio.create_task(control.serve(sockets=[control_listener]))
            async with kept_tally(swarm.tally, self._config.routing_counts):
                self._announce(
                    f"virtual device ready on {LOOPBACK}:{device_listener.getsockname()[1]}, "
                    f"control on {LOOPBACK}:{control_listener.getsockname()[1]}"
                )
                await self._stopping.wait()
                device.stop()
            control.should_exit = True
            await controlling
        finally:
            device.stop()
            await asyncio.to_thread(swarm.close)

    def _build_swarm(self, backing: RpcSocket, fallback: RpcSocket | None) -> Swarm:
        config = self._config
        slabs = GgufSlabs(config.model)
        try:
            counts = {tensor.layer: tensor.expert_count for tensor in slabs.tensors}
        finally:
            slabs.close()
        local = None
        if fallback is not None and config.fallback_model is not None:
            full = GgufSlabs(config.fallback_model)
            ops = read_op_table(config.engine, fallback.version)
            local = self._fallback = Fallback(fallback, ops, full, config.fallback_bytes)
        missing = 0.0 if config.zero_missing else float("nan")
        options = SwarmOptions(
            config.deadline_floor_ms,
            config.patience_seconds,
            missing,
            config.check_rows,
            config.spot_check_rate,
        )
        failures = FailureLog(config.failure_counter)
        return Swarm(counts, config.check_model_digest, local, options, failures)


async def run_dispatch(config: DispatchConfig, announce: Announce) -> None:
    """Run the virtual device until SIGTERM or SIGINT; ``announce`` gets a line once it serves.

    Raises:
        LinkcppError: it cannot start, or its backing rpc-server was lost.
    """
    await _Dispatch(config, announce).run()


def main(arguments: list[str]) -> int:
    """Run from a file with the configuration as JSON (``python -m linkcpp.dispatch``)."""
    return run_child(arguments, DispatchConfig, run_dispatch)
