"""The two ends of a relay for ``benchmarks/relay.py``: plain sockets, as little Python as possible.

A message's bytes are made once and sent again and again; the receiver walks over the frames' heads
and throws the payload away. So the ends cost the same whatever is between them. Only with
end-to-end encryption every message is sealed anew, in records, and opened.
"""

import os
import selectors
import socket
import struct
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

from websockets.speedups import apply_mask

from linkcpp.link.noise import MAX_MESSAGE_BYTES, TAG_BYTES, CipherState

_READ_BYTES = 2**20
_MASKED = 0x80
_BINARY = 0x82
_RECORD_BYTES = MAX_MESSAGE_BYTES - TAG_BYTES


class End(NamedTuple):
    """A connected socket. ``is_framed``: it speaks WebSocket, and is its client.

    ``secret`` is the key of its sealed records, both ways.
    """

    socket: socket.socket
    is_framed: bool
    secret: bytes | None = None


def masked_frame(payload: bytes) -> bytes:
    """Write one whole binary message as a client does."""
    size, key = len(payload), os.urandom(4)
    if size < 126:
        head = struct.pack("!BB", _BINARY, _MASKED | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", _BINARY, _MASKED | 126, size)
    else:
        head = struct.pack("!BBQ", _BINARY, _MASKED | 127, size)
    return b"".join((head, key, apply_mask(payload, key)))


class Outgoing:
    """Writes messages as an end sends them."""

    def __init__(self, end: End, payload: bytes) -> None:
        self._cipher = CipherState(end.secret) if end.secret else None
        self._payload = payload
        self._wire = masked_frame(payload) if end.is_framed else payload

    def next(self) -> memoryview:
        """Return the bytes of the next message."""
        if self._cipher is None:
            return memoryview(self._wire)
        records = (
            self._cipher.encrypt(self._payload[at : at + _RECORD_BYTES])
            for at in range(0, len(self._payload), _RECORD_BYTES)
        )
        return memoryview(b"".join(map(masked_frame, records)))


class Incoming:
    """Counts the payload that an end receives, in whatever portions it comes."""

    def __init__(self, end: End) -> None:
        self._is_framed = end.is_framed
        self._cipher = CipherState(end.secret) if end.secret else None
        self._record: list[bytes] = []
        self._left = 0
        self._head = b""
        self.payload_bytes = 0

    def feed(self, data: memoryview) -> None:
        """Take what was read."""
        if not self._is_framed:
            self.payload_bytes += len(data)
            return
        at, end = 0, len(data)
        while at < end:
            if self._left:
                step = min(self._left, end - at)
                self._left -= step
                self._take(data[at : at + step])
                at += step
                continue
            known = len(self._head)
            head = self._head + bytes(data[at : at + 10 - known])
            size = head[1] if len(head) > 1 else 0
            needs = 10 if size == 127 else 4 if size == 126 else 2
            if len(head) < needs:
                self._head = head
                return
            if needs == 4:
                (size,) = struct.unpack_from("!H", head, 2)
            elif needs == 10:
                (size,) = struct.unpack_from("!Q", head, 2)
            self._left, self._head = size, b""
            at += needs - known

    def _take(self, part: memoryview) -> None:
        if self._cipher is None:
            self.payload_bytes += len(part)
            return
        # The relay keeps frames of up to 64 KiB whole, so a frame is a record.
        self._record.append(bytes(part))
        if not self._left:
            self.payload_bytes += len(self._cipher.decrypt(b"".join(self._record)))
            self._record.clear()


def pump(ends: list[End], payload: bytes, messages: int) -> None:
    """Send ``messages`` of each end's, as fast as they go."""
    selector = selectors.DefaultSelector()
    for end in ends:
        end.socket.setblocking(False)
        outgoing = Outgoing(end, payload)
        selector.register(end.socket, selectors.EVENT_WRITE, [outgoing, outgoing.next(), messages])
    while selector.get_map():
        for key, _ in selector.select():
            outgoing, wire, left = key.data
            try:
                wire = wire[key.fileobj.send(wire) :]  # type: ignore[union-attr]
            except BlockingIOError:
                continue
            if not wire:
                left -= 1
                wire = outgoing.next() if left else wire
            if not left:
                selector.unregister(key.fileobj)
            key.data[1:] = wire, left


def drain(ends: list[End], payload_bytes: int) -> float:
    """Receive so much payload from each end; return the monotonic time when all was there."""
    selector = selectors.DefaultSelector()
    for end in ends:
        end.socket.setblocking(False)
        selector.register(end.socket, selectors.EVENT_READ, Incoming(end))
    space = memoryview(bytearray(_READ_BYTES))
    while selector.get_map():
        for key, _ in selector.select():
            try:
                size = key.fileobj.recv_into(space)  # type: ignore[union-attr]
            except BlockingIOError:
                continue
            if not size:
                raise ConnectionError("an end was closed")
            key.data.feed(space[:size])
            if key.data.payload_bytes >= payload_bytes:
                selector.unregister(key.fileobj)
    return time.monotonic()


def receive(end: End, incoming: Incoming, payload_bytes: int, space: memoryview) -> None:
    """Receive so much payload more."""
    goal = incoming.payload_bytes + payload_bytes
    while incoming.payload_bytes < goal:
        size = end.socket.recv_into(space)
        if not size:
            raise ConnectionError("an end was closed")
        incoming.feed(space[:size])


def echo(end: End, payload: bytes, times: int) -> None:
    """Answer every message with one of the same size."""
    outgoing, incoming = Outgoing(end, payload), Incoming(end)
    space = memoryview(bytearray(_READ_BYTES))
    for _ in range(times):
        receive(end, incoming, len(payload), space)
        end.socket.sendall(outgoing.next())


def round_trips(end: End, payload: bytes, times: int) -> list[float]:
    """Send a message and wait for the answer, again and again; the seconds of each."""
    outgoing, incoming = Outgoing(end, payload), Incoming(end)
    space = memoryview(bytearray(_READ_BYTES))
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        end.socket.sendall(outgoing.next())
        receive(end, incoming, len(payload), space)
        seconds.append(time.perf_counter() - begin)
    return seconds


def answer(connection: Connection, work: Callable[..., object], *arguments: object) -> None:
    """Do the work in a process of its own and send what it returns."""
    connection.send(work(*arguments))
