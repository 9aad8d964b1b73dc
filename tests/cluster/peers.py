"""Peers for discovery to meet: honest agents in miniature, and ones that lie, stall or babble."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from fastapi import FastAPI, Request, Response

from linkcpp.cluster.records import Health, NodeDevice, NodeId, NodeRecord
from linkcpp.common.http_server import BoundedServer, make_server, upgrading_protocol
from linkcpp.engine.records import EngineFeatures, EngineFingerprint, RpcVersion
from linkcpp.link.acceptor import LinkAcceptor, LinkUser
from linkcpp.link.handlers import StreamHandler, StreamPort
from linkcpp.link.handshake import Machine, cluster_psk
from linkcpp.link.stream_transport import StreamTransport
from linkcpp.node.records import API_TARGET
from linkcpp.registry.relay import DIRECT_PATH

TOKEN = "t" * 43
OTHER_TOKEN = "o" * 43


def fingerprint(version: str = "4.0.3", build: int = 10068) -> EngineFingerprint:
    major, minor, patch = (int(part) for part in version.split("."))
    return EngineFingerprint(
        build=build,
        commit="571d0d5",
        ggml_version=None,
        rpc_version=RpcVersion(major=major, minor=minor, patch=patch),
        features=EngineFeatures(rpc=True, override_tensor=True, no_repack=True, fit=True),
    )


def node_record(node_id: str = "id-a", name: str = "attic", **changes: Any) -> NodeRecord:
    cpu = NodeDevice(
        name="CPU",
        description="cpu",
        is_cpu=True,
        total_bytes=8 * 10**9,
        free_bytes=6 * 10**9,
        offered_bytes=5 * 10**9,
        read_bytes_per_second=1e10,
    )
    values: dict[str, Any] = {
        "node_id": NodeId(node_id),
        "name": name,
        "agent_version": "0.1.0",
        "platform": "Linux x86_64",
        "core_count": 4,
        "memory_limit_bytes": None,
        "devices": (cpu,),
        "engine": fingerprint(),
        "engine_problem": None,
    }
    return NodeRecord(**(values | changes))


COORDINATOR = node_record("id-coordinator", "desk")


class Peer:
    """A small agent; its attributes make it lie. ``tokens_seen`` is every token shown to it.

    ``proved_id`` is who it is in the handshake, ``record`` who it says it is afterwards.
    """

    def __init__(self, record: NodeRecord, token: str = TOKEN) -> None:
        self.record = record
        self.token = token
        self.proved_id = record.node_id
        self.node_body: bytes | None = None
        self.stalls = False
        self.tokens_seen: list[str] = []
        self.asked_count = 0
        self.port = 0

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/health")
        async def health(request: Request) -> Health:
            self._note(request)
            who = self.record
            return Health(agent_version="0.1.0", node_id=who.node_id, name=who.name)

        @app.get("/v1/node", response_model=None)
        async def node(request: Request) -> NodeRecord | Response:
            self._note(request)
            self.asked_count += 1
            if self.stalls:
                await asyncio.sleep(3600)
            if self.node_body is not None:
                return Response(self.node_body, media_type="application/json")
            return self.record

        @app.post("/v1/echo")
        async def echo(request: Request) -> dict[str, int]:
            self._note(request)
            return {"received_bytes": len(await request.body())}

        return app

    def take_links(self, server: BoundedServer) -> None:
        """Answer links with what the server answers."""

        def serve(_: LinkUser, target: str, port: StreamPort) -> StreamHandler:
            assert target == API_TARGET
            return StreamTransport(port, lambda: server.new_protocol({}), {})

        self.links = LinkAcceptor(
            own_key=X25519PrivateKey.generate(),
            own=Machine(self.proved_id, self.record.name),
            serve=serve,
            psk=cluster_psk(self.token),
        )

    def _note(self, request: Request) -> None:
        if shown := request.headers.get("authorization", ""):
            self.tokens_seen.append(shown)


def free_socket(host: str = "127.0.0.1") -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    opened.bind(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4])
    return opened


@contextlib.asynccontextmanager
async def served(peer: Peer, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """Run a peer; gives its URL."""
    server = make_server(
        peer.app(),
        http=upgrading_protocol(lambda path: peer.links.take if path == DIRECT_PATH else None),
        max_message_bytes=1024,
    )
    server.config.timeout_graceful_shutdown = 0
    peer.take_links(server)
    with free_socket(host) as opened:
        opened.listen()
        peer.port = opened.getsockname()[1]
        running = asyncio.create_task(server.serve(sockets=[opened]))
        try:
            # The socket listens: who connects before uvicorn runs waits in its queue.
            yield f"http://{f'[{host}]' if ':' in host else host}:{peer.port}"
        finally:
            await peer.links.aclose()
            server.should_exit = True
            server.force_exit = True
            await running


@contextlib.asynccontextmanager
async def babbler(*pieces: bytes, then_stall: bool = False) -> AsyncIterator[str]:
    """Run a server that answers anything with ``pieces``, then ends or stays silent for ever."""
    tasks: set[asyncio.Task[Any]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (task := asyncio.current_task()) is not None:
            tasks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await reader.read(1)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            if then_stall:
                await asyncio.sleep(3600)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def http_answer(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body
