"""A ggml-RPC client over TCP with every command, for tests of real servers and what is before them.

Never connect to an rpc-server that serves somebody else: it serves one client at a time, and a
client that leaves while it waits can end the server (``docs/wire.md``). Ask its supervisor instead.
"""

import asyncio
import contextlib
import socket
from typing import Self

from linkcpp.common.closing import AsyncClosing
from linkcpp.engine import wire_messages as messages
from linkcpp.engine.records import RpcVersion
from linkcpp.engine.wire import (
    AnswerParser,
    Buffer,
    Command,
    Dialect,
    Message,
    WireError,
    dialect_of,
    encode_request,
    request_header,
)
from linkcpp.engine.wire_tensor import Graph, build_graph

_READ_BYTES = 1 << 20


class RpcClient(AsyncClosing):
    """One connection to a ggml-RPC server, greeted; made by ``RpcClient.connect``.

    Every call has the deadline ``timeout_seconds``. Calls raise ``WireError`` where the server
    answers out of protocol, closes the connection (its way to refuse a request), or is late; the
    connection is of no use afterwards. Calls do not overlap.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        address: str,
        timeout_seconds: float,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._address = address
        self._timeout_seconds = timeout_seconds
        self._parser = AnswerParser()
        self.version: RpcVersion
        self.dialect: Dialect

    @classmethod
    async def connect(cls, host: str, port: int, *, timeout_seconds: float = 10.0) -> Self:
        """Connect and exchange HELLO.

        Raises:
            WireError: nothing answers at the address, or not in a dialect that linkcpp speaks.
        """
        address = f"{host}:{port}"
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except OSError as error:
            raise WireError(f"Cannot connect to {address}: {error.strerror or error}.") from error
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = cls(reader, writer, address=address, timeout_seconds=timeout_seconds)
        try:
            size = 4 + len(messages.PLAIN_TCP)
            answer = await client._exchange(Command.HELLO, (messages.PLAIN_TCP,), size)
            client.version = messages.parse_hello_answer(answer)
            client.dialect = dialect_of(client.version)
        except BaseException:
            await client.aclose()
            raise
        return client

    async def aclose(self) -> None:
        """End the connection; the server then frees the buffers of this client."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(self._timeout_seconds):
                await self._writer.wait_closed()

    async def device_count(self) -> int:
        """Return how many devices the server offers."""
        answer = await self._call(Command.DEVICE_COUNT)
        return messages.DEVICE_COUNT_ANSWER.parse(answer).value

    async def device_memory(self, device: int = 0) -> messages.DeviceMemory:
        """Return free and total bytes of a device."""
        answer = await self._call(Command.GET_DEVICE_MEMORY, _index(device))
        return messages.DEVICE_MEMORY.parse(answer)

    async def alignment(self, device: int = 0) -> int:
        """Return the alignment in bytes of tensors in a buffer of the device."""
        answer = await self._call(Command.GET_ALIGNMENT, _index(device))
        return messages.NUMBER.parse(answer).value

    async def largest_buffer_bytes(self, device: int = 0) -> int:
        """Return the size of the largest buffer that the device allows."""
        answer = await self._call(Command.GET_MAX_SIZE, _index(device))
        return messages.NUMBER.parse(answer).value

    async def alloc_buffer(self, size_bytes: int, device: int = 0) -> messages.AllocatedBuffer:
        """Allocate a buffer.

        Raises:
            WireError: the server has no such memory.
        """
        request = messages.ALLOC_BUFFER.build(messages.AllocBuffer(device, size_bytes))
        allocated = messages.ALLOCATED_BUFFER.parse(await self._call(Command.ALLOC_BUFFER, request))
        if not allocated.buffer:
            raise WireError(f"{self._address} cannot allocate {size_bytes} bytes.")
        return allocated

    async def buffer_base(self, buffer: int) -> int:
        """Return the address of a buffer's first byte, which tensors' ``data`` count from."""
        answer = await self._call(Command.BUFFER_GET_BASE, _pointer(buffer))
        return messages.NUMBER.parse(answer).value

    async def free_buffer(self, buffer: int) -> None:
        """Free a buffer."""
        await self._call(Command.FREE_BUFFER, _pointer(buffer))

    async def clear_buffer(self, buffer: int, value: int = 0) -> None:
        """Fill a buffer with one byte."""
        request = messages.BUFFER_CLEAR.build(messages.BufferClear(buffer, value))
        await self._call(Command.BUFFER_CLEAR, request)

    async def init_tensor(self, tensor: bytes) -> None:
        """Let the device set up what it keeps besides a tensor's data."""
        await self._call(Command.INIT_TENSOR, tensor)

    async def alloc_size(self, tensor: bytes, sources: bytes, device: int = 0) -> int:
        """Return how many bytes a tensor takes on the device; ``sources`` are ten records."""
        request = messages.GET_ALLOC_SIZE.build(messages.GetAllocSize(device, tensor, sources))
        answer = await self._call(Command.GET_ALLOC_SIZE, request)
        return messages.NUMBER.parse(answer).value

    async def set_tensor(
        self, tensor: bytes, data: Buffer, offset: int = 0, *, may_cache: bool = False
    ) -> None:
        """Write ``data`` into a tensor, ``offset`` bytes from its start."""
        head = messages.build_set_tensor_head(
            self.dialect, messages.SetTensor(tensor, offset, may_cache)
        )
        await self._call(Command.SET_TENSOR, head, data)

    async def set_tensor_by_hash(self, tensor: bytes, data_hash: int, offset: int = 0) -> bool:
        """Let the server fill a tensor from its own cache; tell whether it could."""
        request = messages.TENSOR_HASH.build(messages.TensorHash(tensor, offset, data_hash))
        answer = await self._call(Command.SET_TENSOR_HASH, request)
        return bool(messages.RESULT.parse(answer).done)

    async def memset_tensor(
        self, tensor: bytes, size_bytes: int, value: int, offset: int = 0
    ) -> None:
        """Fill a part of a tensor with one byte (7.x only)."""
        request = messages.MEMSET_TENSOR.build(
            messages.MemsetTensor(tensor, offset, size_bytes, value)
        )
        await self._call(Command.MEMSET_TENSOR, request)

    async def get_tensor(self, tensor: bytes, size_bytes: int, offset: int = 0) -> memoryview:
        """Read ``size_bytes`` of a tensor, ``offset`` bytes from its start."""
        request = messages.GET_TENSOR.build(messages.GetTensor(tensor, offset, size_bytes))
        return await self._exchange(Command.GET_TENSOR, (request,), size_bytes)

    async def copy_tensor(self, source: bytes, destination: bytes) -> bool:
        """Copy a tensor within the server; tell whether it could."""
        request = messages.COPY_TENSOR.build(messages.CopyTensor(source, destination))
        answer = await self._call(Command.COPY_TENSOR, request)
        return bool(messages.RESULT.parse(answer).done)

    async def graph_compute(self, graph: Graph) -> None:
        """Send a graph; the server runs it before it reads the next request."""
        await self._call(Command.GRAPH_COMPUTE, build_graph(graph))

    async def graph_recompute(self, device: int = 0) -> None:
        """Let the device run its last graph again."""
        await self._call(Command.GRAPH_RECOMPUTE, _index(device))

    async def _call(self, command: Command, *parts: Buffer) -> memoryview:
        if command not in self.dialect.commands:
            raise WireError(f"RPC {self.dialect.name} has no {command.name}.")
        return await self._exchange(command, parts, self.dialect.answer_bytes.get(command))

    async def _exchange(
        self, command: Command, parts: tuple[Buffer, ...], answer_bytes: int | None
    ) -> memoryview:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                self._send(command, parts)
                await self._writer.drain()
                if answer_bytes is None:
                    return memoryview(b"")
                self._parser.expect(command, answer_bytes)
                return await self._receive(command)
        except TimeoutError as error:
            raise WireError(
                f"{self._address} did not answer {command.name} within {self._timeout_seconds:g} s."
            ) from error
        except OSError as error:
            raise WireError(
                f"The connection to {self._address} broke at {command.name}: "
                f"{error.strerror or error}."
            ) from error

    def _send(self, command: Command, parts: tuple[Buffer, ...]) -> None:
        if len(parts) == 1:
            self._writer.write(encode_request(command, parts[0]))
            return
        self._writer.write(request_header(command, sum(len(part) for part in parts)))
        for part in parts:
            self._writer.write(part)

    async def _receive(self, command: Command) -> memoryview:
        while True:
            data = await self._reader.read(_READ_BYTES)
            if not data:
                raise WireError(f"{self._address} closed the connection at {command.name}.")
            for event in self._parser.feed(data):
                if isinstance(event, Message):
                    return event.payload


def _index(device: int) -> bytes:
    return messages.DEVICE_INDEX.build(messages.DeviceIndex(device))


def _pointer(buffer: int) -> bytes:
    return messages.BUFFER_POINTER.build(messages.BufferPointer(buffer))
