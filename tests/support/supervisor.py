"""A supervisor to be killed by a test: starts two rpc-servers and prints the pids of all.

Arguments: rpc-server, folder of its libraries, folder for logs.
"""

import asyncio
import json
import sys
from pathlib import Path

from linkcpp.engine.records import EngineLocation
from linkcpp.engine.rpc_server import start_rpc_server


async def main() -> None:
    program, libraries, logs = map(Path, sys.argv[1:])
    location = EngineLocation(
        llama_server=None, rpc_server=program, library_folders=(libraries,), found_by="test"
    )
    servers = [
        await start_rpc_server(location, device="CPU", log_path=logs / f"{number}.log", threads=1)
        for number in range(2)
    ]
    print(json.dumps([server.process.pid for server in servers]), flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
