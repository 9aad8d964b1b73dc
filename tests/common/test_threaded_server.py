"""A service with a thread for each connection, and those who only hold one."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from linkcpp.common.threaded_server import ThreadedServer

MAX_CONNECTIONS = 4
KNOWN = b"known"


@pytest.fixture
def port() -> Iterator[int]:
    """A service that echoes lines of who said the word first."""

    def serve(peer: socket.socket) -> None:
        with peer.makefile("rwb", buffering=0) as lines:
            if lines.readline().strip() == KNOWN:
                server.let_in(peer)
                lines.write(b"welcome\n")
                while line := lines.readline():
                    lines.write(line)

    server = ThreadedServer(serve, MAX_CONNECTIONS, lambda peer: peer.sendall(b"full\n"))
    listener = socket.create_server(("127.0.0.1", 0))
    serving = threading.Thread(target=server.serve, args=(listener,))
    serving.start()
    yield listener.getsockname()[1]
    server.stop()
    serving.join()


def connected(stack: contextlib.ExitStack, port: int, said: bytes = b"") -> socket.socket:
    peer = stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
    peer.sendall(said)
    return peer


def test_who_says_nothing_makes_room_and_who_is_known_stays(port: int) -> None:
    with contextlib.ExitStack() as stack:
        known = connected(stack, port, KNOWN + b"\n")
        assert known.recv(100) == b"welcome\n"
        strangers = [connected(stack, port) for _ in range(3 * MAX_CONNECTIONS)]
        late = connected(stack, port, KNOWN + b"\n")
        assert late.recv(100) == b"welcome\n"
        assert strangers[0].recv(1) == b""
        known.sendall(b"still here\n")
        assert known.recv(100) == b"still here\n"


def test_where_all_are_known_the_newest_is_refused(port: int) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS):
            assert connected(stack, port, KNOWN + b"\n").recv(100) == b"welcome\n"
        assert connected(stack, port).recv(100) == b"full\n"
