"""Links of two programs whose threads block: bytes, lost paths, strangers, and how they end."""

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from linkcpp.common.errors import LinkcppError
from linkcpp.link.blocking import BlockingStream
from linkcpp.link.introduced import DialledEnd, ProgramLink, new_key
from linkcpp.link.program import AcceptedEnd, ProgramDoor, hand_over, new_door

LINK_ID = "cd" * 16
_GONE = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Agent:
    """Listens for a program, as the agent of its machine does, and hands its connections over."""

    def __init__(self) -> None:
        self.has_program = True
        self.accepted: list[socket.socket] = []
        self.door = new_door()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._take, args=(connection,), daemon=True).start()

    def _take(self, connection: socket.socket) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            piece = connection.recv(4096)
            if not piece:
                return
            head += piece
        if self.has_program:
            self.accepted.append(connection.dup())
            hand_over(connection, head, self.door)
        else:
            connection.sendall(_GONE)
        connection.close()

    def break_paths(self) -> None:
        """Lose all connections, as a network does that fails."""
        for connection in self.accepted:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self.accepted:
            connection.close()


class Two:
    """A program behind an agent, and what another one needs to dial it."""

    def __init__(self, serve: Callable[[BlockingStream], None]) -> None:
        (self._own, public), (own_there, self._peer) = new_key(), new_key()
        self.agent = Agent()
        accepted = AcceptedEnd(
            link_id=LINK_ID, own_key=own_there, peer_key=public, door=self.agent.door
        )
        self.program = ProgramDoor(accepted, serve)

    def end(self, **changes: str) -> DialledEnd:
        urls = (f"http://127.0.0.1:{self.agent.port}",)
        keys = {"own_key": self._own, "peer_key": self._peer, "link_id": LINK_ID, **changes}
        return DialledEnd.model_validate({**keys, "direct_urls": urls})

    def close(self) -> None:
        self.program.close()
        self.agent.close()


@contextlib.contextmanager
def two(serve: Callable[[BlockingStream], None]) -> Iterator[Two]:
    with contextlib.closing(Two(serve)) as made:
        yield made


def exactly(stream: BlockingStream, count: int) -> bytes:
    data = bytearray(count)
    have = 0
    while have < count:
        got = stream.receive_into(memoryview(data)[have:], 20.0)
        assert got
        have += got
    return bytes(data)


def echo(stream: BlockingStream) -> None:
    buffer = memoryview(bytearray(100_000))
    while True:
        count = stream.receive_into(buffer, 1.0)
        if count:
            stream.send_all([bytes(buffer[:count])], 20.0)


def test_threads_at_both_ends_get_every_byte_in_order() -> None:
    chance = random.Random(4)  # noqa: S311
    with two(echo) as both, ProgramLink.dial(both.end(), timeout_seconds=10) as link:
        for size in (1, 3, 60_000, 5_000_000, 17):
            data = chance.randbytes(size)
            sending = threading.Thread(target=link.stream.send, args=([data[:2], data[2:]],))
            sending.start()
            sending.join()
            assert exactly(link.stream, size) == data
        assert link.stream.receive_into(memoryview(bytearray(1))) == 0


def test_a_path_that_breaks_again_and_again_loses_no_byte() -> None:
    chance = random.Random(5)  # noqa: S311
    with two(echo) as both, ProgramLink.dial(both.end(), timeout_seconds=10) as link:
        for _ in range(5):
            data = chance.randbytes(chance.randrange(1, 400_000))
            link.stream.send([data])
            both.agent.break_paths()
            assert exactly(link.stream, len(data)) == data
        status = link.status()
        assert status is not None
        # A break between two others may be one with them.
        assert status.reconnect_count >= 3
        assert (status.why or "").startswith("direct")


def test_a_link_lives_while_both_threads_do_something_else() -> None:
    answered = threading.Event()

    def slow(stream: BlockingStream) -> None:
        exactly(stream, 1)
        answered.wait(20)
        stream.send_all([b"x"], 20.0)

    with two(slow) as both, ProgramLink.dial(both.end(), timeout_seconds=10) as link:
        link.stream.send([b"x"])
        assert link._endpoint is not None
        pump = link._endpoint._paths._pump
        assert pump is not None
        channel = pump.channel
        assert channel is not None
        heard_at = channel.heard_at
        # Each end's caretaker asks and answers meanwhile.
        while channel.heard_at == heard_at:
            time.sleep(0.1)
        assert pump.channel is channel
        answered.set()
        assert exactly(link.stream, 1) == b"x"


def test_a_waiting_thread_gives_the_loop_to_another_that_wants_to_send() -> None:
    with two(echo) as both, ProgramLink.dial(both.end(), timeout_seconds=10) as link:
        found: list[bytes] = []
        waiting = threading.Thread(target=lambda: found.append(exactly(link.stream, 3)))
        waiting.start()
        time.sleep(0.3)
        link.stream.send([b"abc"])
        waiting.join(10)
        assert found == [b"abc"]


def test_a_program_that_is_gone_is_not_waited_for() -> None:
    with two(echo) as both, ProgramLink.dial(both.end(), timeout_seconds=10) as link:
        link.stream.send([b"abc"])
        assert exactly(link.stream, 3) == b"abc"
        both.agent.has_program = False
        both.agent.break_paths()
        with pytest.raises(ConnectionError, match="404"):
            exactly(link.stream, 1)
        with pytest.raises(ConnectionError):
            link.stream.send([b"abc"])


def test_a_link_that_was_closed_can_be_dialled_again() -> None:
    with two(echo) as both:
        for _ in range(3):
            with ProgramLink.dial(both.end(), timeout_seconds=10) as link:
                link.stream.send([b"abc"])
                assert exactly(link.stream, 3) == b"abc"


@pytest.mark.parametrize("what", ["own_key", "peer_key", "link_id"])
def test_only_who_was_introduced_gets_through(what: str) -> None:
    served = threading.Event()
    with two(lambda _: served.set()) as both:
        wrong = "ef" * 16 if what == "link_id" else new_key()[what == "peer_key"]
        with pytest.raises(LinkcppError):
            ProgramLink.dial(both.end(**{what: wrong}), timeout_seconds=10)
        assert not served.is_set()


def test_strangers_who_say_nothing_do_not_keep_the_peer_out() -> None:
    request = (
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    with two(echo) as both, contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", both.agent.port)))
            for _ in range(40)
        ]
        for number, stranger in enumerate(strangers):
            stranger.sendall(request + os.urandom(20 * number))
        with ProgramLink.dial(both.end(), timeout_seconds=10) as link:
            link.stream.send([b"abc"])
            assert exactly(link.stream, 3) == b"abc"


def test_a_peer_that_does_not_read_is_given_up_and_holds_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcome: list[str] = []
    is_over = threading.Event()

    def babble(stream: BlockingStream) -> None:
        exactly(stream, 1)
        try:
            while True:
                stream.send_all([bytes(1_000_000)], 1.0)
                outcome.append("sent")
        except TimeoutError as error:
            outcome.append(str(error))
        is_over.set()

    with two(babble) as both, ProgramLink.dial(both.end(), timeout_seconds=10) as link:
        # What comes is not passed on, so the stream's window stays as it is.
        monkeypatch.setattr(link.stream, "deliver", lambda _: None)
        link.stream.send([b"x"])
        assert is_over.wait(30)
        assert outcome[-1] == "the other side does not read"
        assert outcome.count("sent") <= 4


def test_the_transport_of_a_program_answers_no_request_that_is_not_a_websocket() -> None:
    with two(echo) as both:
        with socket.create_connection(("127.0.0.1", both.agent.port)) as plain:
            plain.sendall(b"GET /v1/edge HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = plain.recv(4096)
        assert answer.startswith(b"HTTP/1.1 4")
