"""Ways for bytes from one process to another on loopback, side by side; see ``deployed.py``.

Weights go from this process, in llama-server's place, to a stock rpc-server on one thread: at once,
or through a coordinator (a process with a forward) and over the link to a node's agent. Copies go
to one process that drops them: over TLS 1.3 of the standard library, and over plain TCP.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ciphers import TlsMachine, tls_contexts

from linkcpp.cluster.token import load_token
from linkcpp.engine.records import EngineLocation
from linkcpp.engine.rpc_socket import RpcSocket
from linkcpp.engine.wire_tensor import empty_tensors
from linkcpp.link.forward import Forward
from linkcpp.node.connector import open_client
from linkcpp.node.records import ServerRequest, server_target
from tests.launch.swarm import Swarm
from tests.support.rpc_servers import rpc_server

PIECE_BYTES = 64 * 2**20
_LOOPBACK = "127.0.0.1"

LINK, BARE, TLS, TCP = "link", "bare rpc-server", "TLS 1.3", "TCP"
Machines = tuple[TlsMachine, TlsMachine]


@contextlib.contextmanager
def ways(
    engine: EngineLocation, folder: Path, total_bytes: int
) -> Iterator[dict[str, Callable[[], float]]]:
    """Open every way; each call sends ``total_bytes`` and returns the MB a second that it took."""
    with contextlib.ExitStack() as stack:
        swarm = Swarm(folder / "bulk", engine)
        stack.callback(swarm.close)
        swarm.start_agents("node-1")
        url = swarm.agents["node-1"].url
        linked = stack.enter_context(_child(_forward, url, str(swarm.home)))
        bare = stack.enter_context(rpc_server(engine))
        machines = TlsMachine(folder, "client"), TlsMachine(folder, "server")
        over_tls = stack.enter_context(_child(_drop, total_bytes, machines))
        over_tcp = stack.enter_context(_child(_drop, total_bytes, None))
        yield {
            LINK: partial(_send_weights, linked, total_bytes),
            BARE: partial(_send_weights, bare, total_bytes),
            TLS: partial(_copy, over_tls, total_bytes, machines),
            TCP: partial(_copy, over_tcp, total_bytes, None),
        }


@contextlib.contextmanager
def _child(target: Callable[..., None], *arguments: Any) -> Iterator[int]:
    """Run a function in a process of its own; yields the port that it tells."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    try:
        yield int(here.recv())
    finally:
        here.close()
        process.join(10)
        process.kill()


def _forward(told: Connection, url: str, home: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["LINKCPP_HOME"] = home
    asyncio.run(_forward_until_told(told, url))


async def _forward_until_told(told: Connection, url: str) -> None:
    async with await open_client(url, load_token()) as client:
        request = ServerRequest(
            deployment="benchmark",
            device="CPU",
            memory_bytes=2 * PIECE_BYTES,
            threads=1,
            lease_seconds=3600,
        )
        server = await client.create_server(request)
        async with await Forward.open(client.link, server_target(server.server_id)) as forward:
            told.send(forward.port)
            await asyncio.to_thread(told.poll, None)


def _drop(told: Connection, total_bytes: int, machines: Machines | None) -> None:
    """Take so many bytes from each who connects, and then answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    buffer = bytearray(2**20)
    with socket.create_server((_LOOPBACK, 0)) as listener:
        told.send(listener.getsockname()[1])
        listener.settimeout(0.2)
        while not told.poll():
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                connection.setblocking(True)
                if machines:
                    connection = tls_contexts(*machines)[1].wrap_socket(
                        connection, server_side=True
                    )
                with connection:
                    left = total_bytes
                    while left:
                        left -= connection.recv_into(buffer)
                    connection.sendall(b"!")


def _copy(port: int, total_bytes: int, machines: Machines | None) -> float:
    data = os.urandom(PIECE_BYTES)
    connection = socket.create_connection((_LOOPBACK, port))
    if machines:
        connection = tls_contexts(*machines)[0].wrap_socket(connection)
    with connection:
        begun = time.perf_counter()
        for _ in range(total_bytes // PIECE_BYTES):
            connection.sendall(data)
        assert connection.recv(1)
        return total_bytes / (time.perf_counter() - begun) / 1e6


def _send_weights(port: int, total_bytes: int) -> float:
    data = os.urandom(PIECE_BYTES)
    tensor = empty_tensors(1)
    with contextlib.closing(RpcSocket(_LOOPBACK, port)) as rpc:
        tensor["buffer"], tensor["data"] = rpc.alloc_buffer(PIECE_BYTES)
        tensor["ne"] = [PIECE_BYTES // 4, 1, 1, 1]
        tensor["nb"] = [4, PIECE_BYTES, PIECE_BYTES, PIECE_BYTES]
        begun = time.perf_counter()
        for _ in range(total_bytes // PIECE_BYTES):
            rpc.set_tensor(tensor.tobytes(), data)
            rpc.flush()
        rpc.buffer_base(int(tensor["buffer"][0]))  # answered once all is written
        return total_bytes / (time.perf_counter() - begun) / 1e6
