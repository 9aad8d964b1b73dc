"""Peers for discovery to meet: honest agents in miniature, and ones that lie, stall or babble."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response

from linkcpp.cluster.records import Health, NodeDevice, NodeId, NodeRecord
from linkcpp.cluster.token import canonical_address, health_proof, tokens_equal
from linkcpp.engine.records import EngineFeatures, EngineFingerprint, RpcVersion

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
    """A small agent; its attributes make it lie. ``tokens_seen`` is every token shown to it."""

    def __init__(self, record: NodeRecord, token: str = TOKEN) -> None:
        self.record = record
        self.token = token
        self.claimed_address: str | None = None
        self.relay: Callable[[str], Awaitable[Health]] | None = None
        self.accepted_token = token
        self.node_body: bytes | None = None
        self.stalls = False
        self.tokens_seen: list[str] = []
        self.challenges_seen: list[str] = []
        self.port = 0

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/health")
        async def health(request: Request, challenge: str | None = None) -> Health:
            who = self.record
            self._note(request)
            told = Health(agent_version="0.1.0", node_id=who.node_id, name=who.name)
            if challenge is None:
                return told
            self.challenges_seen.append(challenge)
            if self.relay is not None:
                return await self.relay(challenge)
            address = self.claimed_address or canonical_address(*request.scope["server"])
            proof = health_proof(
                self.token, challenge=challenge, node_id=who.node_id, address=address
            )
            return told.model_copy(update={"address": address, "proof": proof})

        @app.get("/v1/node", response_model=None)
        async def node(request: Request) -> NodeRecord | Response:
            if not self._note(request):
                return Response(status_code=401)
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

    def _note(self, request: Request) -> bool:
        shown = request.headers.get("authorization", "").removeprefix("Bearer ")
        if shown:
            self.tokens_seen.append(shown)
        return tokens_equal(shown, self.accepted_token)


def free_socket(host: str = "127.0.0.1") -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    opened.bind(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4])
    return opened


@contextlib.asynccontextmanager
async def served(peer: Peer, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """Run a peer; gives its URL."""
    config = uvicorn.Config(
        peer.app(), log_config=None, lifespan="off", timeout_graceful_shutdown=0
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    with free_socket(host) as opened:
        opened.listen()
        peer.port = opened.getsockname()[1]
        running = asyncio.create_task(server.serve(sockets=[opened]))
        try:
            # The socket listens: who connects before uvicorn runs waits in its queue.
            yield f"http://{f'[{host}]' if ':' in host else host}:{peer.port}"
        finally:
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
