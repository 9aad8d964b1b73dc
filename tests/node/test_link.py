"""The bridge's rules, on two ends joined in memory with real sockets at their outer sides."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.websockets import WebSocket, WebSocketState

from linkcpp.node.bridge import Bridge
from linkcpp.node.link import CHUNK_BYTES, Link, LinkError, ReceiveWindow, SendWindow
from linkcpp.node.records import BRIDGE_CLOSE, BRIDGE_OPEN, BRIDGE_WINDOW_BYTES

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Joined:
    """A tunnel's and an agent's link, joined without a WebSocket; ``log`` has what they sent."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str | bytes]] = []
        self.to_agent: asyncio.Queue[str | bytes] = asyncio.Queue()
        self.to_tunnel: asyncio.Queue[str | bytes] = asyncio.Queue()
        self.tunnel = Link(self._send_as("tunnel", self.to_agent))
        self.agent = Link(self._send_as("agent", self.to_tunnel))

    def _send_as(
        self, who: str, queue: asyncio.Queue[str | bytes]
    ) -> Callable[[str | bytes], Awaitable[None]]:
        async def send(message: str | bytes) -> None:
            self.log.append((who, message))
            await queue.put(message)

        return send

    async def run_feeds(self) -> None:
        async def feed(queue: asyncio.Queue[str | bytes], link: Link) -> None:
            while True:
                await link.feed(await queue.get())

        await asyncio.gather(feed(self.to_agent, self.agent), feed(self.to_tunnel, self.tunnel))


@contextlib.asynccontextmanager
async def joined(server: Handler) -> AsyncIterator[tuple[Joined, int]]:
    """Run both ends: connections to the port reach ``server`` through them, one at a time."""
    pair = Joined()
    turn = asyncio.Lock()
    upstream = await asyncio.start_server(server, "127.0.0.1", 0)
    upstream_port = upstream.sockets[0].getsockname()[1]

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with turn:
            await pair.tunnel.open()
            await pair.tunnel.carry(reader, writer, awaits_peer=False)

    async def serve() -> None:
        while True:
            await pair.agent.wait_for_open()
            reader, writer = await asyncio.open_connection("127.0.0.1", upstream_port)
            await pair.agent.carry(reader, writer, awaits_peer=True)

    front = await asyncio.start_server(accept, "127.0.0.1", 0)
    tasks = [asyncio.create_task(pair.run_feeds()), asyncio.create_task(serve())]
    try:
        yield pair, front.sockets[0].getsockname()[1]
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        front.close()
        upstream.close()
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def test_many_short_connections_are_carried_one_after_the_other() -> None:
    async with joined(_echo) as (pair, port):
        for number in range(50):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            message = f"message {number}".encode()
            writer.write(message)
            assert await reader.readexactly(len(message)) == message
            writer.close()
        frames = [message for who, message in pair.log if who == "tunnel"]
        assert frames.count(BRIDGE_OPEN) == 50


async def test_every_connection_gets_one_close_from_each_side() -> None:
    async with joined(_echo) as (pair, port):
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"x")
            await reader.readexactly(1)
            writer.close()
            await writer.wait_closed()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"y")
        await reader.readexactly(1)
        closes = [who for who, message in pair.log if message == BRIDGE_CLOSE]
        assert (closes.count("tunnel"), closes.count("agent")) == (5, 5)
        writer.close()


async def test_answers_of_a_closed_connection_never_reach_the_next_one() -> None:
    async def chatter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = await reader.readexactly(1)
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                writer.write(name * 1000)
                await writer.drain()
        writer.close()

    async with joined(chatter) as (_, port):
        for name in b"abcdefgh":
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(bytes([name]))
            assert set(await reader.readexactly(1500)) == {name}
            writer.close()


async def test_a_server_that_closes_ends_the_client_connection_after_its_last_byte() -> None:
    async def farewell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(2)
        writer.write(b"last words")
        writer.close()

    async with joined(farewell) as (_, port):
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"hi")
            assert await reader.read() == b"last words"
            writer.close()


async def test_a_server_that_reads_nothing_holds_the_sender_within_the_window() -> None:
    stalled = asyncio.Event()

    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await stalled.wait()
        while await reader.read(1 << 20):
            pass
        writer.close()

    async with joined(stall) as (pair, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        sending = asyncio.create_task(_send_much(writer, 64 * 2**20))
        previous = -1
        while pair.tunnel.sent_bytes != previous or not previous:
            previous = pair.tunnel.sent_bytes
            await asyncio.sleep(0.2)
        # The rest waits in the kernels' buffers of the two TCP connections and at the sender.
        assert previous <= BRIDGE_WINDOW_BYTES * 3
        assert not sending.done()
        stalled.set()
        await sending
        writer.close()


async def _send_much(writer: asyncio.StreamWriter, size_bytes: int) -> None:
    for _ in range(size_bytes // CHUNK_BYTES):
        writer.write(bytes(CHUNK_BYTES))
        await writer.drain()


async def _ignore(_: str | bytes) -> None:
    pass


@pytest.mark.parametrize(
    "frame", ["", "hello", "OPEN", "ack", "ack -1", "ack 1", "ack ²", "ack " + "9" * 5000]
)
async def test_a_text_frame_outside_the_protocol_is_refused(frame: str) -> None:
    with pytest.raises(LinkError):
        await Link(_ignore).feed(frame)


async def test_data_before_an_open_is_refused() -> None:
    link = Link(_ignore)
    await link.feed(b"data")
    with pytest.raises(LinkError):
        await link.wait_for_open()


async def test_a_sender_that_ignores_the_window_is_refused() -> None:
    link = Link(_ignore)
    await link.feed(BRIDGE_OPEN)
    with pytest.raises(LinkError, match="ahead of the acknowledgements"):
        for _ in range(BRIDGE_WINDOW_BYTES // CHUNK_BYTES + 1):
            await link.feed(bytes(CHUNK_BYTES))


@given(st.lists(st.integers(0, 1000), max_size=50))
def test_the_receiver_never_acknowledges_more_than_it_took(sizes: list[int]) -> None:
    incoming = ReceiveWindow(4000)
    outgoing = SendWindow(4000)
    for size in sizes:
        outgoing.sent_bytes += size
        incoming.receive(size)
        incoming.take(size)
        if frame := incoming.due_acknowledgement():
            outgoing.acknowledge(int(frame.removeprefix("ack ")))
        assert outgoing.acknowledged_bytes <= outgoing.sent_bytes
        assert outgoing.sent_bytes - outgoing.acknowledged_bytes < 2000


@given(st.lists(st.one_of(st.binary(max_size=64), st.text(max_size=12)), max_size=20))
def test_whatever_frames_come_the_link_takes_them_or_names_what_is_wrong(
    frames: list[str | bytes],
) -> None:
    async def feed_all() -> None:
        link = Link(_ignore)
        try:
            for frame in frames:
                await link.feed(frame)
            if frames:
                await link.wait_for_open()
        except LinkError as error:
            assert error.reason

    asyncio.run(feed_all())


class _Leaving:
    """A client that sends two messages, which nobody takes, and goes away."""

    client_state = WebSocketState.DISCONNECTED

    def __init__(self) -> None:
        self._messages = [bytes(CHUNK_BYTES), b"more"]

    async def accept(self) -> None:
        pass

    async def receive(self) -> dict[str, object]:
        if self._messages:
            return {"type": "websocket.receive", "bytes": self._messages.pop(0)}
        return {"type": "websocket.disconnect"}


async def test_what_a_client_left_with_a_bridge_goes_without_a_collector() -> None:
    gc.disable()
    try:
        bridge = Bridge(cast("WebSocket", _Leaving()), "rpc-server", 1)
        gone = weakref.ref(bridge._link)
        await bridge.run()
        del bridge
        await asyncio.sleep(0)
        assert gone() is None
    finally:
        gc.enable()
