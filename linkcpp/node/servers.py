"""The rpc-servers that an agent runs: promised memory, leases, and who uses them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from linkcpp.cluster.measure import CPU
from linkcpp.cluster.records import NodeRecord
from linkcpp.common.errors import LinkcppError
from linkcpp.common.text import printable
from linkcpp.common.units import format_bytes
from linkcpp.engine.guard import MemoryAccount
from linkcpp.engine.records import Engine
from linkcpp.engine.rpc_server import start_rpc_server
from linkcpp.node.limits import RefusedError, check_request, max_data_bytes
from linkcpp.node.managed_program import ManagedProgram, ProgramManager, cap_memory
from linkcpp.node.records import ServerId, ServerRecord, ServerRequest, ServerState

_log = logging.getLogger(__name__)


class ManagedServer(ManagedProgram):
    """One rpc-server, from the request to its end."""

    def __init__(self, request: ServerRequest, overhead_bytes: int, log_folder: Path) -> None:
        super().__init__(
            "rpc-server",
            deployment=request.deployment,
            device=request.device,
            memory_bytes=request.memory_bytes,
            overhead_bytes=overhead_bytes,
            lease_seconds=request.lease_seconds,
            log_folder=log_folder,
        )
        self.request = request
        self.account = MemoryAccount(request.memory_bytes)
        self.turn = asyncio.Lock()

    def record(self) -> ServerRecord:
        """Tell how it stands."""
        return ServerRecord(
            server_id=ServerId(self.key),
            deployment=self.deployment,
            device=self.device,
            memory_bytes=self.memory_bytes,
            state=self.state,
            detail=self.detail,
            allocated_bytes=self.account.allocated_bytes,
            tensor_bytes=self.account.tensor_bytes,
            is_used=self.stream_count > 0,
            resident_bytes=self.resident_bytes,
        )


class ServerManager(ProgramManager[ManagedServer]):
    """Starts rpc-servers within what the node offers.

    ``describe`` tells what the devices offer, given what is promised now; ``promising`` is held
    while something is promised. ``overhead_bytes`` is what a server takes of the machine's memory
    besides the buffers that it was promised.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        describe: Callable[[], Awaitable[NodeRecord]],
        promising: asyncio.Lock,
        overhead_bytes: int,
        log_folder: Path,
        max_threads: int,
    ) -> None:
        super().__init__("rpc-server", "server", max_streams=None)
        self._engine = engine
        self._describe = describe
        self._promising = promising
        self._overhead_bytes = overhead_bytes
        self._log_folder = log_folder
        self._max_threads = max_threads

    @property
    def overhead_bytes(self) -> int:
        """What each server costs besides what it is promised."""
        return self._overhead_bytes

    def records(self) -> tuple[ServerRecord, ...]:
        """List the servers, ended ones included as long as they are remembered."""
        return tuple(server.record() for server in self._items.values())

    async def create(self, request: ServerRequest, peer: str) -> ServerRecord:
        """Start a server for ``peer`` and return when it is ready.

        Raises:
            RefusedError: no such device, too little memory, no working engine, or it did not start.
        """
        server = await self._promise(request)
        threads = min(request.threads or self._max_threads, self._max_threads)
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
                threads=threads,
                log_path=server.log_path,
                # A card may compute for long while the CPU has nothing to do.
                probe=server.owes_nothing if request.device == CPU else None,
            )
        except LinkcppError as error:
            server.end(ServerState.FAILED, error.message)
            _log.warning("the rpc-server did not start: %s", error.message)
            raise RefusedError(409, "server_failed", error.message, hint=error.hint) from error
        except BaseException:
            server.end(ServerState.FAILED, "the start was given up")
            raise
        server.process, server.port = running
        cap_memory(
            running.process.pid, request.device, max_data_bytes(request.memory_bytes, threads)
        )
        if not server.is_alive:  # deleted, or the agent stops, while it started
            await running.process.stop()
            raise RefusedError(409, "server_stopped", f"The rpc-server ended: {server.detail}.")
        self._become_ready(server, running.process)
        return server.record()

    async def _promise(self, request: ServerRequest) -> ManagedServer:
        # One at a time: two requests must not both be promised the same bytes.
        async with self._promising:
            self._check_open()
            check_request(
                request.device,
                request.memory_bytes,
                await self._describe(),
                served=self.deployments(),
            )
            server = ManagedServer(request, self._overhead_bytes, self._log_folder)
            self._add(server)
            return server

    def renew(self, server_id: ServerId) -> ServerRecord:
        """Start a server's lease again."""
        server = self.get(server_id)
        server.renew()
        return server.record()
