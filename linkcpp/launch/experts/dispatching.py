"""The dispatch process of a deployment: started, asked, and told of workers."""

import re
from pathlib import Path

import httpx
from pydantic import ValidationError

from linkcpp.common.errors import LinkcppError
from linkcpp.common.network_errors import in_words
from linkcpp.dispatch.control import DispatchStatus, NewServer, NewWorker
from linkcpp.dispatch.process import READY_PATTERN, DispatchConfig
from linkcpp.engine.rpc_server import LOOPBACK
from linkcpp.launch.programs import Program, start_program
from linkcpp.link.introduced import DialledEnd

_CALL_SECONDS = 10.0

NewHolder = NewWorker | NewServer


class Dispatcher:
    """A running dispatch process and its control endpoint."""

    def __init__(self, program: Program, config: DispatchConfig) -> None:
        self.program = program
        self.device_port, self.control_port = program.ports
        self.token = config.control_token
        self._http = httpx.AsyncClient(
            base_url=f"http://{LOOPBACK}:{self.control_port}",
            headers={"Authorization": f"Bearer {self.token}"},
            timeout=_CALL_SECONDS,
            trust_env=False,
        )

    @classmethod
    async def start(cls, config: DispatchConfig, *, folder: Path, log_path: Path) -> "Dispatcher":
        """Start it; returns when the virtual device can be connected to.

        Raises:
            LinkcppError: it does not start; says why.
        """
        program = await start_program(
            "linkcpp.dispatch",
            config,
            name="the dispatch process",
            config_path=folder / "dispatch.json",
            log_path=log_path,
            ready_pattern=READY_PATTERN,
        )
        return cls(program, config)

    @property
    def endpoint(self) -> str:
        """Where llama-server reaches the virtual device."""
        return f"{LOOPBACK}:{self.device_port}"

    async def status(self) -> DispatchStatus:
        """Ask what it did so far.

        Raises:
            LinkcppError: it does not answer.
        """
        answer = await self._call("GET", "/status")
        try:
            return DispatchStatus.model_validate_json(answer.content)
        except ValidationError as error:
            raise LinkcppError(f"The dispatch process answers nonsense: {error}.") from error

    async def add(self, holder: NewHolder) -> None:
        """Have it use a worker, or an rpc-server of this machine, from now on.

        Raises:
            LinkcppError: it does not answer, or has one of that name.
        """
        path = "/servers" if isinstance(holder, NewServer) else "/workers"
        await self._call("POST", path, holder.model_dump_json())

    async def change_link(self, name: str, link: DialledEnd) -> None:
        """Have it know other ways to a worker; raises as ``add``."""
        await self._call("PUT", f"/workers/{name}/link", link.model_dump_json())

    async def remove(self, name: str) -> None:
        """Have it do without a worker; also fine when it has none of that name."""
        await self._call("DELETE", f"/workers/{name}")

    async def _call(self, method: str, path: str, body: str | None = None) -> httpx.Response:
        headers = {"Content-Type": "application/json"} if body else {}
        try:
            answer = await self._http.request(method, path, content=body, headers=headers)
        except httpx.HTTPError as error:
            raise LinkcppError(
                f"The dispatch process does not answer: {in_words(error)}."
            ) from error
        if answer.is_error and not (method == "DELETE" and answer.status_code == 409):
            raise LinkcppError(f"The dispatch process refuses: {answer.text[:300]}")
        return answer

    async def stop(self) -> None:
        """End it and all that it started."""
        await self._http.aclose()
        await self.program.stop()


def holder_name(node_name: str, share: int, start: int) -> str:
    """Name a worker in the dispatch process so that no two starts share a name."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", node_name).strip("-") or "worker"
    return f"{plain}.{share}.{start}"
