"""Nothing of what a client sent to the virtual device outlives it."""

import gc
import socket
import struct
import time
import weakref
from pathlib import Path

import psutil

from linkcpp.dispatch.program import Program
from linkcpp.engine import wire_messages as messages
from linkcpp.engine.records import EngineLocation
from linkcpp.engine.wire import Command, encode_request, request_header
from linkcpp.engine.wire_tensor import empty_tensors
from tests.support import models
from tests.support.swarm import Device, running_device

MEBIBYTE = 2**20
SENT_BYTES = 96 * MEBIBYTE
SLACK_BYTES = 32 * MEBIBYTE


class Client:
    """A client of the device that has greeted."""

    def __init__(self, device: Device) -> None:
        self.socket = socket.create_connection(("127.0.0.1", device.port), 120)
        self.socket.sendall(encode_request(Command.HELLO, messages.PLAIN_TCP))
        self.major = self.answer()[0]

    def answer(self) -> bytes:
        (size,) = struct.unpack("<Q", self._read(8))
        return self._read(size)

    def _read(self, size: int) -> bytes:
        return self.socket.recv(size, socket.MSG_WAITALL) if size else b""

    def fill_a_buffer(self) -> None:
        """Allocate a buffer, put something into all of it, and wait until it is there."""
        wanted = messages.ALLOC_BUFFER.build(messages.AllocBuffer(0, SENT_BYTES))
        self.socket.sendall(encode_request(Command.ALLOC_BUFFER, wanted))
        buffer = messages.ALLOCATED_BUFFER.parse(self.answer()).buffer
        tensor = empty_tensors(1)
        tensor["buffer"] = tensor["data"] = buffer
        tensor["ne"] = [SENT_BYTES // 4, 1, 1, 1]
        tensor["nb"] = [4, SENT_BYTES, SENT_BYTES, SENT_BYTES]
        tensor["name"] = b"large"
        head = tensor.tobytes() + bytes(9 if self.major >= 7 else 8)
        self.socket.sendall(request_header(Command.SET_TENSOR, len(head) + SENT_BYTES) + head)
        self.socket.sendall(bytes(SENT_BYTES))
        self.socket.sendall(encode_request(Command.GET_ALIGNMENT, bytes(4)))
        self.answer()


def held_bytes(device: Device) -> int:
    main = psutil.Process(device.running.process.pid)
    return sum(process.memory_info().rss for process in (main, *main.children(recursive=True)))


def wait_for_less(device: Device, max_bytes: int) -> None:
    deadline = time.monotonic() + 120
    while (held := held_bytes(device)) > max_bytes:
        assert time.monotonic() < deadline, f"{held} bytes are held, not {max_bytes}"
        time.sleep(0.05)


def test_what_clients_sent_goes_when_they_close(engine: EngineLocation, tmp_path: Path) -> None:
    with running_device(engine, models.qwen3moe(), [], tmp_path) as device:
        before = held_bytes(device)
        for _ in range(4):
            client = Client(device)
            client.fill_a_buffer()
            assert held_bytes(device) > before + SENT_BYTES - SLACK_BYTES
            client.socket.close()
        wait_for_less(device, before + SLACK_BYTES)
        # One that breaks off in the middle of a message, too.
        client = Client(device)
        client.socket.sendall(
            request_header(Command.SET_TENSOR, SENT_BYTES) + bytes(SENT_BYTES // 2)
        )
        client.socket.close()
        wait_for_less(device, before + SLACK_BYTES)


def test_programs_that_follow_each_other_in_a_circle_go_without_a_collector() -> None:
    gc.disable()
    try:
        one, other = Program(b"one", ()), Program(b"other", ())
        one.follower, other.follower = weakref.ref(other), weakref.ref(one)
        gone = weakref.ref(one)
        del one, other
        assert gone() is None
    finally:
        gc.enable()
