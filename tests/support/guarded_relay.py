"""A TCP relay that puts a guard on every connection to an rpc-server, as a node's bridge does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from linkcpp.engine.guard import Flow, GuardError, LinkGuard, MemoryAccount
from linkcpp.engine.wire import Buffer, encode_answer

# What a client is told where an allocation is beyond the limit.
_DENIED = encode_answer(bytes(16))


@dataclass
class GuardedRelay:
    """Where the relay listens, and what it saw."""

    port: int
    account: MemoryAccount
    refusals: list[str] = field(default_factory=list)
    max_allocated_bytes: int = 0
    denied_count: int = 0
    link_count: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)


@contextlib.asynccontextmanager
async def guarded_relay(
    server_port: int, memory_bytes: int, *, piece_bytes: int | None = None
) -> AsyncIterator[GuardedRelay]:
    """Relay to the rpc-server at ``server_port``."""
    relay = GuardedRelay(0, MemoryAccount(memory_bytes))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relay.link_count += 1
        guard = LinkGuard(relay.account, piece_bytes=piece_bytes)
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", server_port)
        relay.writers.append(writer)

        async def pump(source: asyncio.StreamReader, take: Callable[[Buffer], Flow]) -> None:
            try:
                while data := await source.read(1 << 18):
                    flow = take(data)
                    relay.denied_count += flow.to_client.count(_DENIED)
                    server_writer.writelines(flow.to_server)
                    writer.writelines(flow.to_client)
                    await asyncio.gather(server_writer.drain(), writer.drain())
                    relay.max_allocated_bytes = max(
                        relay.max_allocated_bytes, relay.account.allocated_bytes
                    )
            except GuardError as error:
                relay.refusals.append(error.message)
            except OSError:
                pass
            finally:
                server_writer.close()
                writer.close()

        await asyncio.gather(
            pump(reader, guard.from_client), pump(server_reader, guard.from_server)
        )
        guard.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    relay.port = server.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        server.close()
        for writer in relay.writers:
            writer.close()
        await server.wait_closed()
