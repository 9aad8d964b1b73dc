"""A slice that somebody sends: every piece is hashed as it comes, and kept only if it is right."""

import errno
import hashlib
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import OWNERS_MODE
from linkcpp.common.units import format_bytes
from linkcpp.node.limits import RefusedError
from linkcpp.node.slice_files import Piece

_READ_BYTES = 2**20


class Receiver:
    """Writes a file piece by piece. All methods block: for threads, one at a time.

    What is in the file at the start is hashed again, and used as far as whole pieces are right.
    """

    def __init__(self, path: Path, pieces: tuple[Piece, ...]) -> None:
        self._path = path
        self._pieces = pieces
        self._number = 0
        self._start = 0
        self._hash = hashlib.sha256()
        self.received_bytes = 0
        self.file_bytes = sum(piece.size_bytes for piece in pieces)
        self._reuse()

    @property
    def is_whole(self) -> bool:
        """Whether every piece is there and right."""
        return self._number == len(self._pieces)

    def take(self, data: bytes | bytearray | memoryview) -> None:
        """Take the bytes that follow on ``received_bytes``.

        Raises:
            RefusedError: more bytes than the file has; a piece with another hash, which is dropped,
                so that ``received_bytes`` goes back to its start; the disk is full; or what had
                come was removed, so that ``received_bytes`` is 0.
        """
        if len(data) > self.file_bytes - self.received_bytes:
            raise RefusedError(
                413, "too_large", f"The slice has {self.file_bytes} bytes by its manifest."
            )
        view = memoryview(data)
        with self._open() as target:
            self._check_there(target)
            while view:
                piece = self._pieces[self._number]
                part = view[: self._start + piece.size_bytes - self.received_bytes]
                self._write(target, part)
                self._hash.update(part)
                self.received_bytes += len(part)
                view = view[len(part) :]
                self._close_piece(piece)

    def sync(self) -> None:
        """Have the disk really hold the file, and nothing behind its end."""
        with self._open() as target:
            target.truncate(self.file_bytes)
            os.fsync(target.fileno())

    def _check_there(self, target: FileIO) -> None:
        if os.fstat(target.fileno()).st_size >= self.received_bytes:
            return
        self._number = self._start = self.received_bytes = 0
        self._hash = hashlib.sha256()
        raise RefusedError(
            409,
            "wrong_offset",
            "What had come of the slice was removed from the node's disk.",
            hint="Send it again from byte 0 on.",
        )

    def _close_piece(self, piece: Piece) -> None:
        if self.received_bytes < self._start + piece.size_bytes:
            return
        if self._hash.hexdigest() != piece.sha256:
            self.received_bytes = self._start
            self._hash = hashlib.sha256()
            raise RefusedError(
                422,
                "wrong_hash",
                f"What came for {piece.label} is not what the manifest tells.",
                hint=f"Send the file again from byte {self._start} on; is it the manifest's file?",
            )
        self._next_piece()

    def _next_piece(self) -> None:
        self._start += self._pieces[self._number].size_bytes
        self._number += 1
        self._hash = hashlib.sha256()

    def _reuse(self) -> None:
        if not self._path.exists():
            return
        with self._open() as file:
            for piece in self._pieces:
                found = hashlib.sha256()
                for part in _parts(file, piece.size_bytes):
                    found.update(part)
                if found.hexdigest() != piece.sha256:
                    return
                self._next_piece()
                self.received_bytes = self._start

    def _write(self, target: FileIO, part: memoryview) -> None:
        try:
            target.seek(self.received_bytes)
            while part:
                part = part[target.write(part) :]
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise RefusedError(
                    507,
                    "disk_full",
                    f"The node's disk became full after {format_bytes(self.received_bytes)}.",
                    hint="Free some space there, then go on.",
                ) from error
            raise LinkcppError(f"The node cannot write the slice: {error.strerror}.") from error

    def _open(self) -> FileIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return FileIO(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWNERS_MODE), "r+")


def _parts(file: FileIO, size_bytes: int) -> Iterator[bytes]:
    left = size_bytes
    while left and (part := file.read(min(left, _READ_BYTES))):
        yield part
        left -= len(part)
