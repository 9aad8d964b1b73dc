"""Cuts long transfers of a tensor into pieces that an rpc-server can stage in little memory.

An rpc-server gathers a whole SET_TENSOR payload, and the whole answer to a GET_TENSOR, in memory of
its own before it goes on, besides the buffers that it was asked for. Both commands carry an offset,
so several short ones do the same.
"""

import struct
from collections.abc import Iterator

from linkcpp.engine import wire_messages as messages
from linkcpp.engine.wire import TENSOR_BYTES, Buffer, Command, Dialect, request_header

PIECE_BYTES = 4 * 2**20

_OFFSET = struct.Struct("<Q")


class SetTensorPieces:
    """One SET_TENSOR on its way: give ``begin`` its head, then ``data`` every part of its data."""

    def __init__(self, dialect: Dialect, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._offset_at = TENSOR_BYTES + dialect.has_cache_flag
        self._head = b""
        self._left_bytes = 0
        self._left_of_piece = 0

    def begin(self, head: Buffer, data_bytes: int) -> list[Buffer]:
        """Start with the payload's part before the data; return what the server gets first."""
        self._head = bytes(head)
        self._left_bytes = data_bytes
        return self._next_head()

    def data(self, data: memoryview) -> Iterator[Buffer]:
        """Pass data on, with the head of a further SET_TENSOR wherever a piece is full."""
        while len(data):
            if not self._left_of_piece:
                (offset,) = _OFFSET.unpack_from(self._head, self._offset_at)
                tail = self._head[self._offset_at + _OFFSET.size :]
                # The server refuses an offset beyond the buffer, and so also one that wrapped.
                moved = _OFFSET.pack((offset + self._piece_bytes) % 2**64)
                self._head = self._head[: self._offset_at] + moved + tail
                yield from self._next_head()
            piece = data[: self._left_of_piece]
            data = data[len(piece) :]
            self._left_of_piece -= len(piece)
            yield piece

    def _next_head(self) -> list[Buffer]:
        self._left_of_piece = min(self._left_bytes, self._piece_bytes)
        self._left_bytes -= self._left_of_piece
        size = len(self._head) + self._left_of_piece
        return [request_header(Command.SET_TENSOR, size), self._head]


def get_tensor_pieces(
    request: messages.GetTensor, piece_bytes: int
) -> Iterator[messages.GetTensor]:
    """Cut one GET_TENSOR; an empty one stays one."""
    begin = 0
    while True:
        size = min(request.size_bytes - begin, piece_bytes)
        yield request._replace(offset=(request.offset + begin) % 2**64, size_bytes=size)
        begin += size
        if begin >= request.size_bytes:
            return
