"""The front of a deployment, and the port and key by which it alone uses llama-server."""

import functools
import secrets
from pathlib import Path

from linkcpp.common.files import write_atomically
from linkcpp.common.sockets import HeldPort
from linkcpp.dispatch.failures import FailureCounter
from linkcpp.engine.rpc_server import LOOPBACK
from linkcpp.front.process import HEALTH_PATH, READY_PATTERN, FrontConfig
from linkcpp.launch.api import ApiClient, answers_http, check_port, hold_api_port
from linkcpp.launch.events import reachable
from linkcpp.launch.folder import DeploymentFolder
from linkcpp.launch.programs import Program, start_program
from linkcpp.launch.records import LaunchRequest


class Fronting:
    """Keeps port and key over all runs of llama-server, and the front where it does not end."""

    def __init__(self, folder: DeploymentFolder, request: LaunchRequest) -> None:
        self._folder = folder
        self._request = request
        self._engine_key = secrets.token_urlsafe(32)
        self._engine_port: HeldPort | None = None
        self._program: Program | None = None

    @property
    def engine_key_file(self) -> Path:
        """The file with llama-server's own key, for the owner only."""
        return self._folder.engine_key_file

    def prepare(self) -> int:
        """Write the key, and return the port on loopback where llama-server is to listen.

        Raises:
            LinkcppError: the API's port is taken, or the folder cannot be written.
        """
        if self._program is None:
            check_port(self._request.host, self._request.port)
        if self._engine_port is None:
            self._engine_port = hold_api_port(LOOPBACK, 0)
            write_atomically(self.engine_key_file, f"{self._engine_key}\n", mode=0o600)
        return self._engine_port.number

    async def ensure(self) -> Program:
        """Return the front, started now where none runs.

        Raises:
            LinkcppError: it does not start; says why.
        """
        if self._program is not None and self._program.process.status.state.is_final:
            await self._stop_program()
        if self._program is None:
            self._program = await self._start()
        return self._program

    async def _start(self) -> Program:
        request, folder = self._request, self._folder
        FailureCounter(folder.failure_counter, is_writer=True)
        return await start_program(
            "linkcpp.front",
            FrontConfig(
                host=request.host,
                port=request.port,
                engine_port=self.prepare(),
                engine_key=self._engine_key,
                slot_count=request.plan.options.parallel,
                api_key_file=Path(request.api_key_file) if request.api_key_file else None,
                failure_counter=folder.failure_counter,
                control_file=folder.control_file,
            ),
            name="the front",
            config_path=folder.path / "front.json",
            log_path=folder.front_log,
            ready_pattern=READY_PATTERN,
            probe=functools.partial(
                answers_http, reachable(request.host), request.port, HEALTH_PATH
            ),
        )

    def engine_client(self) -> ApiClient:
        """Return a client of llama-server itself, past the front."""
        return ApiClient(f"http://{LOOPBACK}:{self.prepare()}", str(self.engine_key_file))

    async def aclose(self) -> None:
        """End the front, which tells its clients so; llama-server may still run."""
        await self._stop_program()
        if self._engine_port is not None:
            self._engine_port.close()
            self._engine_port = None
        self.engine_key_file.unlink(missing_ok=True)

    async def _stop_program(self) -> None:
        if self._program is not None:
            program, self._program = self._program, None
            await program.stop()
