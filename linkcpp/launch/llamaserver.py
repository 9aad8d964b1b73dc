"""The stock llama-server of a deployment as a supervised process."""

import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from linkcpp.common.errors import LinkcppError
from linkcpp.common.processes import ProcessIdentity, identity_of
from linkcpp.engine.process import SupervisedProcess
from linkcpp.engine.process_spec import ProcessSpec
from linkcpp.engine.rpc_server import LOOPBACK
from linkcpp.engine.threads import short_waits
from linkcpp.launch.api import answers_http
from linkcpp.launch.enginelog import failure_reason

# It loads before it is healthy, which may take hours; the process itself is up at once.
START_SECONDS = 60.0
# Freeing buffers over a slow link takes a while; what is not freed goes with the connection.
STOP_SECONDS = 10.0


class LlamaServer:
    """One run of llama-server: it is not started again here, since a new run needs new tunnels."""

    def __init__(self, process: SupervisedProcess, identity: ProcessIdentity) -> None:
        self._process = process
        self.identity = identity

    @classmethod
    async def start(
        cls,
        command: tuple[str, ...],
        *,
        library_folders: Iterable[Path],
        log_path: Path,
        on_line: Callable[[str], None],
        port: int,
        shares_cores: bool = False,
    ) -> "LlamaServer":
        """Start it; returns when the process runs, long before the model is loaded.

        ``on_line`` gets every line that it logs; ``port`` is where it will listen on loopback.
        ``shares_cores``: other engine programs of this machine compute while it waits.

        Raises:
            LinkcppError: it cannot be started or ended at once.
        """
        spec = ProcessSpec(
            name="llama-server",
            argv=command,
            log_path=log_path,
            # A backtrace of an abort tells nothing here and takes seconds.
            environment={
                "GGML_NO_BACKTRACE": "1",
                **(short_waits(os.environ) if shares_cores else {}),
            },
            library_folders=tuple(library_folders),
            ready_timeout_seconds=START_SECONDS,
            stop_timeout_seconds=STOP_SECONDS,
        )
        probe = functools.partial(answers_http, LOOPBACK, port, "/health")
        process = SupervisedProcess(spec, on_line=on_line, probe=probe)
        await process.start_and_wait()
        identity = identity_of(process.pid) if process.pid else None
        if identity is None:
            await process.stop()
            raise LinkcppError(
                f"llama-server ended at once: {_why_it_ended(process)}.",
                hint=f"Its log: {log_path}",
            )
        return cls(process, identity)

    @property
    def has_ended(self) -> bool:
        """Whether it does not run any more."""
        return self._process.status.state.is_final

    async def wait_for_end(self) -> str:
        """Wait until it ends by itself, and say how."""
        await self._process.wait()
        return f"llama-server stopped ({_why_it_ended(self._process)})"

    async def stop(self) -> None:
        """End it and all that it started."""
        await self._process.stop()


def drop_overrides_from_environment() -> None:
    """Make this process forget the variables that would change llama-server's options.

    They would overrule the plan where its command line is silent. An empty value will not do: it
    counts as a value, and as a wrong one.
    """
    for name in [name for name in os.environ if name.startswith(("LLAMA_ARG_", "LLAMA_API_KEY"))]:
        del os.environ[name]


def _why_it_ended(process: SupervisedProcess) -> str:
    reason = process.complaint or failure_reason("\n".join(process.recent_lines))
    return reason or process.status.detail or "no reason given"
