"""A client's requests arrive whole, however its bytes are cut."""

import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from linkcpp.dispatch.memory import RequestError
from linkcpp.dispatch.reading import RequestReader
from linkcpp.engine.wire import DIALECT_4, TENSOR_BYTES, Command, Limits, encode_request
from linkcpp.engine.wire_messages import PLAIN_TCP

HEAD = bytes(TENSOR_BYTES + 8)
HELLO = encode_request(Command.HELLO, PLAIN_TCP)
GET = encode_request(Command.GET_TENSOR, bytes(TENSOR_BYTES + 16))
GRAPH = encode_request(Command.GRAPH_COMPUTE, bytes(20_000))


def set_tensor(size_bytes: int) -> bytes:
    return encode_request(Command.SET_TENSOR, HEAD + b"x" * size_bytes)


class Client:
    """One end of a pair of sockets; the reader, greeted, is at the other."""

    def __init__(self) -> None:
        self.socket, self._other = socket.socketpair()
        self.reader = RequestReader(self._other, Limits(set_tensor_bytes=1 << 22))
        self.socket.sendall(HELLO)
        assert self.read() == [(Command.HELLO, len(PLAIN_TCP))]
        self.reader.speak(DIALECT_4)

    def read(self) -> list[tuple[Command, int]] | None:
        found = self.reader.read()
        return None if found is None else [(m.command, len(m.payload)) for m in found]

    def read_all(self, count: int) -> list[tuple[Command, int]]:
        found: list[tuple[Command, int]] = []
        while len(found) < count:
            more = self.read()
            assert more
            found += more
        return found

    def close(self) -> None:
        self.socket.close()
        self._other.close()


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


@pytest.mark.parametrize("seed", range(8))
def test_any_cut_gives_the_same_messages(client: Client, seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = [300, 2048, 2_000_000, 0, 250_000]
    messages = [set_tensor(int(size)) for size in random.permutation(sizes)]
    messages.insert(int(random.integers(5)), GRAPH)
    stream = b"".join([*messages, GET])

    def send() -> None:
        at = 0
        while at < len(stream):
            step = int(random.choice([1, 8, 9, 313, 65_536]))
            client.socket.sendall(stream[at : at + step])
            at += step

    sender = threading.Thread(target=send)
    sender.start()
    found = client.read_all(7)
    sender.join()
    assert [size for _, size in found] == [len(message) - 9 for message in [*messages, GET]]
    assert found[-1][0] == Command.GET_TENSOR


def test_a_graph_is_not_kept_back_by_the_beginning_of_what_follows(client: Client) -> None:
    client.socket.sendall(set_tensor(10) + GRAPH + GET[:5])
    assert [command for command, _ in client.read_all(2)] == [
        Command.SET_TENSOR,
        Command.GRAPH_COMPUTE,
    ]
    client.socket.sendall(GET[5:])
    assert client.read() == [(Command.GET_TENSOR, TENSOR_BYTES + 16)]


def test_what_came_before_the_end_is_given_and_a_half_message_is_not(client: Client) -> None:
    client.socket.sendall(set_tensor(10) + GET[:100])
    client.socket.shutdown(socket.SHUT_WR)
    assert client.read() == [(Command.SET_TENSOR, len(HEAD) + 10)]
    assert client.read() is None


def test_sizes_beyond_the_limits_are_refused_before_they_come(client: Client) -> None:
    client.socket.sendall(struct.pack("<BQ", Command.SET_TENSOR, 1 << 40))
    with pytest.raises(RequestError, match="bytes"):
        client.read()
