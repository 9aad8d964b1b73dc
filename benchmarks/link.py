"""What a link costs, against the same rpc-server over a bare TCP connection.

    python benchmarks/link.py [--engine FOLDER] [--megabytes 1024]

Round trip: the smallest answered call, a thousand times, median. Bulk: SET_TENSOR of 64 MiB pieces
into one buffer, as a model load sends them, ended by a call that the server answers. Agent,
coordinator and rpc-server share this machine, so they also share its cores.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from linkcpp.cluster.token import create_token, load_token
from linkcpp.common.sockets import free_port
from linkcpp.engine.check import choose_engine
from linkcpp.engine.rpc_server import start_rpc_server
from linkcpp.engine.wire_tensor import empty_tensors
from linkcpp.link.forward import Forward
from linkcpp.node.connector import open_client
from linkcpp.node.records import ServerRequest, server_target
from tests.support.rpc_client import RpcClient

PIECE_BYTES = 64 * 2**20
ROUND_TRIPS = 1000


async def measure(port: int, total_bytes: int) -> dict[str, float]:
    async with await RpcClient.connect("127.0.0.1", port, timeout_seconds=60) as client:
        times = []
        for _ in range(ROUND_TRIPS):
            begin = time.perf_counter()
            await client.device_count()
            times.append(time.perf_counter() - begin)
        buffer = await client.alloc_buffer(PIECE_BYTES)
        base = await client.buffer_base(buffer.buffer)
        tensor = empty_tensors(1)
        tensor["buffer"], tensor["data"] = buffer.buffer, base
        tensor["ne"] = [PIECE_BYTES // 4, 1, 1, 1]
        tensor["nb"] = [4, PIECE_BYTES, PIECE_BYTES, PIECE_BYTES]
        data = os.urandom(PIECE_BYTES)
        begin = time.perf_counter()
        for _ in range(total_bytes // PIECE_BYTES):
            await client.set_tensor(tensor.tobytes(), data)
        await client.device_count()
        took = time.perf_counter() - begin
    return {
        "round_trip_us": statistics.median(times) * 1e6,
        "bulk_mb_per_second": total_bytes / took / 1e6,
    }


async def through_agent(engine: Path | None, total_bytes: int) -> dict[str, float]:
    port = free_port()
    command = [sys.executable, "-m", "linkcpp.cli.main", "node", "--no-mdns"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    if engine:
        command += ["--engine", str(engine)]
    agent = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient() as http:
            while True:
                try:
                    await http.get(f"{url}/v1/health")
                    break
                except httpx.HTTPError:
                    await asyncio.sleep(0.1)
        async with await open_client(url, load_token()) as client:
            request = ServerRequest(
                deployment="benchmark", device="CPU", memory_bytes=2 * PIECE_BYTES, threads=1
            )
            server = await client.create_server(request)
            async with await Forward.open(client.link, server_target(server.server_id)) as forward:
                return await measure(forward.port, total_bytes)
    finally:
        agent.terminate()
        await agent.wait()


async def direct(engine: Path | None, total_bytes: int) -> dict[str, float]:
    log_path = Path(os.environ["LINKCPP_HOME"], "direct.log")
    location = (await asyncio.to_thread(choose_engine, engine)).location
    running = await start_rpc_server(location, device="CPU", log_path=log_path, threads=1)
    try:
        return await measure(running.port, total_bytes)
    finally:
        await running.process.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", type=Path)
    parser.add_argument("--megabytes", type=int, default=1024)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ["LINKCPP_HOME"] = home
        create_token()
        total_bytes = arguments.megabytes * 2**20
        bare = asyncio.run(direct(arguments.engine, total_bytes))
        linked = asyncio.run(through_agent(arguments.engine, total_bytes))
    result = {
        "direct": bare,
        "linked": linked,
        "added_round_trip_us": linked["round_trip_us"] - bare["round_trip_us"],
        "bulk_ratio": linked["bulk_mb_per_second"] / bare["bulk_mb_per_second"],
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
