"""What a worker may answer that nobody asked for, or that nobody wants any more."""

import socket
from collections.abc import Iterator

import numpy as np
import pytest

from linkcpp.dispatch.worker_holder import WorkerAddress, WorkerHolder
from linkcpp.worker.chain import KeyedChain
from linkcpp.worker.connection import SocketConnection
from linkcpp.worker.frames import (
    DataType,
    ErrorCode,
    FrameError,
    FrameType,
    TokenPairs,
    pack_error,
    pack_header,
    pack_rows,
)
from tests.worker.test_worker import SWIGLU, WIDTH

CHAIN = KeyedChain.of(1, SWIGLU)
TOKEN = TokenPairs(0, [1, 2, 3, 4], np.ones(WIDTH, np.float32).data.cast("B"))


class Far:
    """The worker's end of a link."""

    def __init__(self) -> None:
        near, self._socket = socket.socketpair()
        self.holder = WorkerHolder(0, WorkerAddress("w", "token"))
        self.holder.link = self.holder._connection = SocketConnection(near)

    def answer(self, number: int, pairs: int = 4) -> None:
        rows = np.full((pairs, WIDTH), number, np.float32).data.cast("B")
        parts = pack_rows(rows, (pairs, WIDTH), 7, DataType.F32)
        size_bytes = sum(map(len, parts))
        self._socket.sendall(b"".join([pack_header(FrameType.ROWS, number, size_bytes), *parts]))

    def refuse(self, number: int) -> None:
        self._socket.sendall(pack_error(number, ErrorCode.ENGINE_FAILED, "It is broken."))

    def heard(self) -> list[int]:
        """Return the numbers of all answers that came through."""
        found = []
        while self.holder.receive():
            while (answer := self.holder.next_answer()) is not None:
                found.append(answer.request_id)
        return found

    def close(self) -> None:
        self._socket.close()
        self.holder.close()


@pytest.fixture
def far() -> Iterator[Far]:
    end = Far()
    for number in (5, 6):
        end.holder.ask_token(number, CHAIN, TOKEN)
    yield end
    end.close()


def test_an_answer_counts_once_and_one_to_nothing_not_at_all(far: Far) -> None:
    for number in (5, 5, 99, 6):
        far.answer(number)
    assert far.heard() == [5, 6]


def test_what_was_forgotten_may_be_answered_in_any_way(far: Far) -> None:
    far.holder.forget(5)
    far.answer(5, pairs=3)
    far.refuse(5)
    far.answer(6)
    assert far.heard() == [6]


def test_rows_of_another_shape_and_refusals_end_the_link(far: Far) -> None:
    far.answer(5, pairs=3)
    with pytest.raises(FrameError, match="3 x 512"):
        far.heard()
    far.refuse(6)
    with pytest.raises(FrameError, match="It is broken"):
        far.heard()
