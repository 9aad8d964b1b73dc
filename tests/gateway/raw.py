"""A WebSocket client that does what it should not."""

import asyncio
import contextlib
from typing import Self

from websockets.frames import Frame, Opcode

from linkcpp.registry.edges import EdgeRole
from linkcpp.registry.relay import RELAY_PATH
from tests.gateway.gateways import Gateway

_UPGRADE = (
    f"GET {RELAY_PATH} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
).encode()


class RawClient:
    """Sends any bytes; reads frames of at most 125 bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def dial(cls, gateway: Gateway) -> Self:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=2**16)
        writer.write(_UPGRADE)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 ")
        return cls(reader, writer)

    @classmethod
    async def side(cls, gateway: Gateway, edge_id: str, role: EdgeRole) -> Self:
        client = await cls.dial(gateway)
        client.send(Opcode.BINARY, gateway.signer.hello(edge_id, role))
        return client

    def send(self, opcode: Opcode, payload: bytes, *, fin: bool = True) -> None:
        self.writer.write(Frame(opcode, payload, fin).serialize(mask=True))

    async def frame(self) -> tuple[int, bytes]:
        """Read a short frame: opcode and payload."""
        first, second = await self.reader.readexactly(2)
        assert first & 0x80
        assert second <= 125
        return first & 0x0F, await self.reader.readexactly(second)

    async def close_code(self) -> int:
        """Read until the gateway's close frame, and see that it closes the connection then."""
        while True:
            opcode, payload = await self.frame()
            if opcode == Opcode.CLOSE:
                break
        # One that was still writing may be told of the end by a reset.
        with contextlib.suppress(ConnectionResetError):
            assert await self.reader.read() == b""
        return int.from_bytes(payload[:2], "big")

    async def aclose(self) -> None:
        self.writer.transport.abort()
        await asyncio.sleep(0)
