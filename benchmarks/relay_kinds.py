"""What ``benchmarks/relay.py`` compares: each a process between two ends, or none."""

import asyncio
import multiprocessing
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil
import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from relay_ends import End, masked_frame

from linkcpp.common.sockets import listen
from linkcpp.gateway.relay import Relay, RelayLimits
from linkcpp.gateway.server import serve_gateway
from linkcpp.link.noise import KEY_BYTES
from linkcpp.registry.edges import EdgeRole
from linkcpp.registry.relay import RELAY_PATH, Hello, encode_hello
from linkcpp.registry.tickets import EdgeClaims, HubKey, sign_edge_ticket

_HUB_ID = "11111111-1111-4111-8111-111111111111"
_GATEWAY_ID = "22222222-2222-4222-8222-222222222222"
_SPAWN = multiprocessing.get_context("spawn")
_UPGRADE = (
    "GET {path} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    "Sec-WebSocket-Protocol: binary\r\n\r\n"
)


def connect(port: int) -> socket.socket:
    """Connect to loopback, without waiting for small messages to become larger ones."""
    for _ in range(100):
        with suppress(ConnectionRefusedError):
            opened = socket.create_connection(("127.0.0.1", port), timeout=60)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return opened
        time.sleep(0.1)
    raise ConnectionRefusedError(port)


def upgrade(opened: socket.socket, path: str) -> None:
    """Make a WebSocket of a connection."""
    opened.sendall(_UPGRADE.format(path=path).encode())
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += opened.recv(1)
    if b" 101 " not in head:
        raise ConnectionError(head.decode())


def free_listener() -> socket.socket:
    """Listen on a free port of loopback."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    listener.settimeout(60)
    return listener


def accept(listener: socket.socket) -> socket.socket:
    """Take the next connection."""
    opened, _ = listener.accept()
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return opened


class Kind:
    """Something that carries bytes from a sending to a receiving end."""

    name = "raw TCP"
    max_edges = 100_000

    def __init__(self) -> None:
        self._listener = free_listener()
        self._port: int = self._listener.getsockname()[1]

    def open_pair(self) -> tuple[End, End]:
        """Connect two ends."""
        sender = connect(self._port)
        return End(sender, is_framed=False), End(accept(self._listener), is_framed=False)

    def cpu_seconds(self) -> float:
        """Processor time of the relay so far, its children's included."""
        return 0.0

    def stop(self) -> None:
        """End the relay."""
        self._listener.close()


class _Process(Kind):
    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        super().__init__()
        ours, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=work, args=(theirs, *arguments), daemon=True)
        self._process.start()
        self._relay_port: int = ours.recv()

    def cpu_seconds(self) -> float:
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()
        super().stop()


class PlainRelay(_Process):
    """TCP to TCP over asyncio, as short as such a relay can be, with back-pressure."""

    name = "asyncio TCP relay"

    def __init__(self) -> None:
        super().__init__(run_plain_relay)

    def open_pair(self) -> tuple[End, End]:
        """Tell the relay where to go on to."""
        sender = connect(self._relay_port)
        sender.sendall(self._port.to_bytes(2, "big"))
        return End(sender, is_framed=False), End(accept(self._listener), is_framed=False)


class Gateway(_Process):
    """This gateway; both ends dial it."""

    name = "gateway"

    def __init__(self) -> None:
        self._key = Ed25519PrivateKey.generate()
        super().__init__(run_gateway, self._key.private_bytes_raw())

    def _secret(self) -> bytes | None:
        return None

    def open_pair(self) -> tuple[End, End]:
        """Dial with both ends and wait until they are paired."""
        edge_id, secret = secrets.token_hex(16), self._secret()
        ends = [self._dial(edge_id, role)._replace(secret=secret) for role in EdgeRole]
        for end in ends:
            if end.socket.recv(3, socket.MSG_WAITALL) != b"\x82\x01\x01":
                raise ConnectionError("not paired")
        return ends[0], ends[1]

    def _dial(self, edge_id: str, role: EdgeRole) -> End:
        claims = EdgeClaims(
            iss=_HUB_ID,
            sub=_HUB_ID,
            edge=edge_id,
            role=role,
            gateway=_GATEWAY_ID,
            exp=time.time() + 600,
        )
        opened = connect(self._relay_port)
        upgrade(opened, RELAY_PATH)
        hello = encode_hello(Hello(role, edge_id, sign_edge_ticket(self._key, claims)))
        opened.sendall(masked_frame(hello))
        return End(opened, is_framed=True)


class SealedGateway(Gateway):
    """The same gateway, and what passes is end-to-end encrypted in records of an edge."""

    name = "gateway, end to end"

    def _secret(self) -> bytes | None:
        return secrets.token_bytes(KEY_BYTES)


class Websockify(Kind):
    """websockify of PyPI: WebSocket to TCP, a process for each connection."""

    name = "websockify"
    max_edges = 16  # 200 processes would measure the scheduler

    def __init__(self) -> None:
        super().__init__()
        with free_listener() as probe:
            self._relay_port: int = probe.getsockname()[1]
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "websockify",
                f"127.0.0.1:{self._relay_port}",
                f"127.0.0.1:{self._port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def open_pair(self) -> tuple[End, End]:
        """Dial with the sender; websockify dials the receiver."""
        sender = connect(self._relay_port)
        upgrade(sender, "/websockify")
        return End(sender, is_framed=True), End(accept(self._listener), is_framed=False)

    def cpu_seconds(self) -> float:
        """Add up all processes."""
        total = 0.0
        own = psutil.Process(self._process.pid)
        for process in (own, *own.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def stop(self) -> None:
        """End all processes."""
        children = psutil.Process(self._process.pid).children(recursive=True)
        self._process.terminate()
        self._process.wait()
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.terminate()
        super().stop()


class _PlainSide(asyncio.Protocol):
    """One side of the plain relay."""

    def __init__(self, other: "_PlainSide | None" = None) -> None:
        self.other = other

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.other is None:
            transport.pause_reading()
            self._dialling = asyncio.ensure_future(self._dial())

    async def _dial(self) -> None:
        loop = asyncio.get_running_loop()
        raw = self.transport.get_extra_info("socket")
        port = int.from_bytes(await loop.sock_recv(socket.socket(fileno=os.dup(raw.fileno())), 2))
        _, self.other = await loop.create_connection(lambda: _PlainSide(self), "127.0.0.1", port)
        self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        assert self.other is not None
        self.other.transport.write(data)

    def pause_writing(self) -> None:
        assert self.other is not None
        self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        assert self.other is not None
        self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.close()


def run_plain_relay(pipe: Connection) -> None:
    """Serve the plain relay: the first two bytes of a connection are the port to go on to."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(_PlainSide, "127.0.0.1", 0, backlog=512)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


def run_gateway(pipe: Connection, private_key: bytes) -> None:
    """Serve the gateway."""
    key = Ed25519PrivateKey.from_private_bytes(private_key).public_key()
    sockets = listen("127.0.0.1", 0)

    async def serve() -> None:
        relay = Relay(
            gateway_id=_GATEWAY_ID,
            hub=HubKey(_HUB_ID, key),
            limits=RelayLimits(unpaired_per_caller=4096),
        )
        pipe.send(sockets[0].getsockname()[1])
        await serve_gateway(relay, "unused", sockets, asyncio.Event())

    uvloop.run(serve())
