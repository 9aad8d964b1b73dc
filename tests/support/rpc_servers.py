"""Stock rpc-servers for tests, each idle and on a port of its own."""

import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

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
