"""Stock rpc-servers for tests, each idle and on a port of its own."""

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import AsyncIterator

import psutil

from linkcpp.engine.records import EngineLocation


def free_port() -> int:
    """Return a port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def running_rpc_server(engine: EngineLocation) -> AsyncIterator[int]:
    """Run an rpc-server on the CPU and give its port; it is idle, so a client may connect."""
    port = free_port()
    folders = os.pathsep.join(str(folder) for folder in engine.library_folders)
    process = subprocess.Popen(  # noqa: ASYNC220 - starts in no time
        [str(engine.rpc_server), "-H", "127.0.0.1", "-p", str(port), "-t", "1", "-d", "CPU"],
        env={**os.environ, "LD_LIBRARY_PATH": folders},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        restore_signals=False,
    )
    try:
        while not psutil.Process(process.pid).net_connections(kind="tcp4"):
            assert process.poll() is None, "the rpc-server ended at its start"
            await asyncio.sleep(0.02)
        yield port
    finally:
        process.kill()
        process.wait()
