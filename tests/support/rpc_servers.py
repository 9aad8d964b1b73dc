"""Stock rpc-servers for tests, each idle and on a port of its own."""

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil

from linkcpp.engine.records import EngineLocation
from linkcpp.engine.rpc_server import start_rpc_server


@contextlib.asynccontextmanager
async def running_rpc_server(engine: EngineLocation) -> AsyncIterator[int]:
    """Run an rpc-server on the CPU and give its port; it is idle, so a client may connect."""
    with tempfile.TemporaryDirectory() as folder:
        server = await start_rpc_server(
            engine, device="CPU", log_path=Path(folder, "log"), threads=1
        )
        try:
            yield server.port
        finally:
            await server.process.stop()


def process_on(port: int) -> psutil.Process:
    """Find the rpc-server that listens on a port."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.name() == "ggml-rpc-server" and str(port) in process.cmdline():
                return process
    raise AssertionError(f"no rpc-server on port {port}")


@contextlib.contextmanager
def rpc_server(engine: EngineLocation) -> Iterator[int]:
    """As ``running_rpc_server`` where there is no event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    running = running_rpc_server(engine)
    try:
        yield asyncio.run_coroutine_threadsafe(running.__aenter__(), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(running.__aexit__(None, None, None), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
