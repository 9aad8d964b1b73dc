"""A stock ggml-rpc-server on loopback: its command line, and its start on a free port."""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from linkcpp.common.errors import LinkcppError
from linkcpp.common.sockets import free_port
from linkcpp.engine.process import SupervisedProcess
from linkcpp.engine.process_spec import ProcessSpec, ProcessStatus
from linkcpp.engine.records import EngineLocation
from linkcpp.engine.threads import short_waits

LOOPBACK = "127.0.0.1"
_READY_PATTERN = "^Starting RPC server"
_PORT_TAKEN = "Failed to create server socket"
_PORT_ATTEMPTS = 8


def rpc_server_spec(
    location: EngineLocation,
    *,
    device: str,
    port: int,
    log_path: Path,
    threads: int | None = None,
) -> ProcessSpec:
    """Describe an rpc-server for one device.

    It is never started again by itself: what its client kept in it is gone with it.

    Raises:
        LinkcppError: the engine has no rpc-server.
    """
    if location.rpc_server is None:
        raise LinkcppError(
            f"The engine found by {location.found_by} has no ggml-rpc-server.",
            hint="Install one that has: linkcpp engine install",
        )
    arguments = ["-H", LOOPBACK, "-p", str(port), "-d", device]
    if threads is not None:
        arguments += ["-t", str(threads)]
    return ProcessSpec(
        name=f"ggml-rpc-server on {device}",
        argv=(str(location.rpc_server), *arguments),
        log_path=log_path,
        environment=short_waits(os.environ),
        library_folders=location.library_folders,
        ready_pattern=_READY_PATTERN,
        ready_port=port,
    )


class RunningRpcServer(NamedTuple):
    """An rpc-server that is ready, and the port of loopback where it listens."""

    process: SupervisedProcess
    port: int


async def start_rpc_server(
    location: EngineLocation,
    *,
    device: str,
    log_path: Path,
    threads: int | None = None,
    on_change: Callable[[ProcessStatus], None] | None = None,
    probe: Callable[[], Awaitable[bool]] | None = None,
) -> RunningRpcServer:
    """Start an rpc-server and wait until it listens; where its port was taken meanwhile, again.

    ``on_change`` sees every attempt; a failure because of the port is followed by a new start.
    ``probe`` tells whether it owes nobody an answer, without connecting to it.

    Raises:
        LinkcppError: it does not start.
    """
    for _ in range(_PORT_ATTEMPTS):
        port = free_port()
        spec = rpc_server_spec(
            location, device=device, port=port, log_path=log_path, threads=threads
        )
        process = SupervisedProcess(spec, on_change=on_change, probe=probe)
        try:
            await process.start_and_wait()
        except LinkcppError:
            if not any(_PORT_TAKEN in line for line in process.recent_lines):
                raise
        else:
            return RunningRpcServer(process, port)
    raise LinkcppError(
        f"No port for the rpc-server: {_PORT_ATTEMPTS} in a row were taken.",
        hint="See what else starts servers on this machine.",
    )
