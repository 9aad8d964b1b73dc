"""The rpc-servers that an agent runs: promised memory, leases, and who uses them."""

import asyncio
import contextlib
import logging
import sys
import uuid
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from time import monotonic

import psutil

from linkcpp.cluster.measure import CPU, Promise
from linkcpp.cluster.records import NodeRecord
from linkcpp.cluster.text import printable
from linkcpp.common.errors import LinkcppError
from linkcpp.common.units import format_bytes
from linkcpp.engine.guard import MemoryAccount
from linkcpp.engine.process import SupervisedProcess, tail_log
from linkcpp.engine.records import Engine
from linkcpp.engine.rpc_server import RunningRpcServer, start_rpc_server
from linkcpp.node.bridge import Bridge
from linkcpp.node.limits import RefusedError, check_request, most_data_bytes, promised
from linkcpp.node.records import (
    BridgeCloseCode,
    ServerId,
    ServerRecord,
    ServerRequest,
    ServerState,
)

# Ended servers stay listed, so that a coordinator can still read why: this many.
_REMEMBERED = 32
_TICK_SECONDS = 0.25

_log = logging.getLogger(__name__)


class ManagedServer:
    """One rpc-server, from the request to its end."""

    def __init__(self, request: ServerRequest, overhead_bytes: int, log_path: Path) -> None:
        self.server_id = ServerId(uuid.uuid4().hex)
        self.request = request
        self.overhead_bytes = overhead_bytes
        self.log_path = log_path / f"{self.server_id}.log"
        self.state = ServerState.STARTING
        self.detail: str | None = None
        self.running: RunningRpcServer | None = None
        self.is_claimed = False
        self.lease_ends = 0.0
        self._bridge: Bridge | None = None
        self.account = MemoryAccount(request.memory_bytes)
        self.renew()

    @property
    def is_alive(self) -> bool:
        """Whether it holds memory, or may soon."""
        return self.state in (ServerState.STARTING, ServerState.READY)

    @property
    def port(self) -> int:
        """The loopback port that it listens on."""
        if self.running is None:
            raise RuntimeError("the server has not started")
        return self.running.port

    @property
    def resident_bytes(self) -> int:
        """Memory that it holds now, its keeper included."""
        return resident_bytes(self.running.process) if self.running else 0

    def renew(self) -> None:
        """Start the lease again."""
        self.lease_ends = monotonic() + self.request.lease_seconds

    def record(self) -> ServerRecord:
        """Tell how it stands."""
        return ServerRecord(
            server_id=self.server_id,
            deployment=self.request.deployment,
            device=self.request.device,
            memory_bytes=self.request.memory_bytes,
            state=self.state,
            detail=self.detail,
            allocated_bytes=self.account.allocated_bytes,
            tensor_bytes=self.account.tensor_bytes,
            is_bridged=self.is_claimed,
        )

    async def run_bridge(self, bridge: Bridge) -> str:
        """Let a bridge that has claimed the server serve its client."""
        self._bridge = bridge
        if not self.is_alive:
            bridge.end(*self._closing_words())
        try:
            return await bridge.run()
        finally:
            self._bridge = None

    def end(self, state: ServerState, detail: str) -> None:
        """Note the end, the first reason given stays, and end the bridge with it."""
        if not self.is_alive:
            return
        self.state = state
        self.detail = detail
        if self._bridge is not None:
            self._bridge.end(*self._closing_words())

    def _closing_words(self) -> tuple[BridgeCloseCode, str]:
        failed = self.state is ServerState.FAILED
        code = BridgeCloseCode.SERVER_FAILED if failed else BridgeCloseCode.SERVER_STOPPED
        return code, self.detail or "the rpc-server ended"


class ServerManager:
    """Starts rpc-servers within what the node offers, and ends them when nobody wants them.

    ``describe`` tells what the devices offer, given what is promised now. ``overhead_bytes`` is
    what a server takes of the machine's memory besides the buffers that it was promised.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        describe: Callable[[], Awaitable[NodeRecord]],
        overhead_bytes: int,
        log_folder: Path,
        default_threads: int,
    ) -> None:
        self._engine = engine
        self._describe = describe
        self._overhead_bytes = overhead_bytes
        self._log_folder = log_folder
        self._default_threads = default_threads
        self._servers: dict[ServerId, ManagedServer] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self._promising = asyncio.Lock()
        self._is_closing = False

    @property
    def overhead_bytes(self) -> int:
        """What each server costs besides what it is promised."""
        return self._overhead_bytes

    def promises(self) -> Mapping[str, Promise]:
        """Sum up by device what running servers may take and what they hold."""
        return promised(
            (
                server.request.device,
                server.request.memory_bytes,
                server.overhead_bytes,
                server.resident_bytes,
            )
            for server in self._servers.values()
            if server.is_alive
        )

    def records(self) -> tuple[ServerRecord, ...]:
        """List the servers, ended ones included as long as they are remembered."""
        return tuple(server.record() for server in self._servers.values())

    def get(self, server_id: ServerId) -> ManagedServer:
        """Find a server.

        Raises:
            RefusedError: there is none with this id (any more).
        """
        server = self._servers.get(server_id)
        if server is None:
            raise RefusedError(
                404,
                "unknown_server",
                "This node has no such rpc-server.",
                hint="It ended, or the agent was started again since.",
            )
        return server

    async def create(self, request: ServerRequest, peer: str) -> ServerRecord:
        """Start a server for ``peer`` and return when it is ready.

        Raises:
            RefusedError: no such device, too little memory, no working engine, or it did not start.
        """
        server = await self._promise(request)
        _log.info(
            "%s starts an rpc-server for %s on %s, up to %s",
            peer,
            printable(request.deployment),
            request.device,
            format_bytes(request.memory_bytes),
        )
        try:
            running = await start_rpc_server(
                self._engine.location,
                device=request.device,
                threads=request.threads or self._default_threads,
                log_path=server.log_path,
            )
        except LinkcppError as error:
            server.end(ServerState.FAILED, error.message)
            _log.warning("the rpc-server did not start: %s", error.message)
            raise RefusedError(409, "server_failed", error.message, hint=error.hint) from error
        except BaseException:
            server.end(ServerState.FAILED, "the start was given up")
            raise
        server.running = running
        if request.device == CPU:
            cap_memory(running.process, request, request.threads or self._default_threads)
        if not server.is_alive:  # deleted, or the agent stops, while it started
            await running.process.stop()
            raise RefusedError(409, "server_stopped", f"The rpc-server ended: {server.detail}.")
        server.state = ServerState.READY
        server.renew()
        watch = asyncio.create_task(self._watch(server, running.process))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return server.record()

    async def _promise(self, request: ServerRequest) -> ManagedServer:
        # One at a time: two requests must not both be promised the same bytes.
        async with self._promising:
            if self._is_closing:
                raise RefusedError(409, "stopping", "This node agent is being stopped.")
            check_request(request, await self._describe())
            server = ManagedServer(request, self._overhead_bytes, self._log_folder)
            self._servers[server.server_id] = server
            self._forget_old()
            return server

    def renew(self, server_id: ServerId) -> ServerRecord:
        """Start a server's lease again."""
        server = self.get(server_id)
        server.renew()
        return server.record()

    async def delete(self, server_id: ServerId, peer: str) -> None:
        """End a server and return when its memory is free; fine when it is gone."""
        server = self._servers.get(server_id)
        if server is None:
            return
        if server.is_alive:
            _log.info("%s stops the rpc-server of %s", peer, printable(server.request.deployment))
        await self._end(server, "it was stopped by its owner")
        self._servers.pop(server_id, None)

    def logs(self, server_id: ServerId, tail: int) -> str:
        """Read the last lines that a server printed."""
        return "".join(f"{line}\n" for line in tail_log(self.get(server_id).log_path, tail))

    def claim(self, server_id: ServerId, peer: str) -> ManagedServer:
        """Take a server for a bridge; ``release`` gives it back.

        Raises:
            RefusedError: it is bridged already, or not ready.
        """
        server = self.get(server_id)
        if server.state is not ServerState.READY:
            raise RefusedError(
                409, "server_failed", f"The rpc-server is {server.state}: {server.detail}."
            )
        if server.is_claimed:
            raise RefusedError(
                409,
                "already_bridged",
                "This rpc-server has a bridge already, and serves one client only.",
                hint="Close the other one first, or ask for a server of its own.",
            )
        server.is_claimed = True
        _log.info("%s uses the rpc-server of %s", peer, printable(server.request.deployment))
        return server

    def release(self, server: ManagedServer, reason: str) -> None:
        """Give a server back when its bridge has ended for ``reason``; the lease starts again."""
        deployment = printable(server.request.deployment)
        _log.info("the rpc-server of %s is not used any more: %s", deployment, reason)
        server.is_claimed = False
        server.renew()

    async def aclose(self) -> None:
        """End all servers and take no more."""
        self._is_closing = True
        ends = (self._end(server, "the node agent was stopped") for server in self._all())
        await asyncio.gather(*ends)
        await asyncio.gather(*self._watches)

    def _all(self) -> list[ManagedServer]:
        return list(self._servers.values())

    async def _end(self, server: ManagedServer, reason: str) -> None:
        server.end(ServerState.STOPPED, reason)
        if server.running is not None:
            await server.running.process.stop()

    async def _watch(self, server: ManagedServer, process: SupervisedProcess) -> None:
        """See a ready server to its end: by itself, by its lease, or by ``delete``."""
        exited = asyncio.create_task(process.wait())
        while not exited.done():
            await asyncio.wait({exited}, timeout=_TICK_SECONDS)
            is_idle = server.is_alive and not server.is_claimed
            if is_idle and monotonic() > server.lease_ends:
                _log.warning(
                    "nobody renewed the lease of the rpc-server of %s: it ends",
                    printable(server.request.deployment),
                )
                await self._end(server, "its lease ended")
        if server.is_alive:
            reason = exited.result().detail or "it ended"
            deployment = printable(server.request.deployment)
            _log.error("the rpc-server of %s ended: %s", deployment, reason)
            server.end(ServerState.FAILED, reason)

    def _forget_old(self) -> None:
        ended = [server for server in self._all() if not server.is_alive]
        for server in ended[: max(0, len(ended) - _REMEMBERED)]:
            del self._servers[server.server_id]
            server.log_path.unlink(missing_ok=True)


def cap_memory(process: SupervisedProcess, request: ServerRequest, threads: int) -> None:
    """Have the system itself hold a server in RAM to its promise, where it can (Linux).

    The guard refuses every allocation beyond the promise; this holds also for what a graph makes
    the server allocate for itself.
    """
    if not sys.platform.startswith("linux") or process.pid is None:
        return
    with contextlib.suppress(psutil.Error, OSError):
        program = psutil.Process(process.pid)
        most = most_data_bytes(request, program.memory_info().data, threads)
        program.rlimit(psutil.RLIMIT_DATA, (most, most))


def resident_bytes(process: SupervisedProcess) -> int:
    """Return the memory that a program and its keeper hold now; 0 once they are gone."""
    if process.pid is None:
        return 0
    try:
        program = psutil.Process(process.pid)
        return sum(part.memory_info().rss for part in (program, program.parent()) if part)
    except psutil.Error:
        return 0
