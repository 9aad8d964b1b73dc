"""A forward reader over the header at the front of a byte source, with every length checked."""

import hashlib
import struct
from typing import Final

from linkcpp.common.errors import LinkcppError
from linkcpp.model.source import ByteSource

# The largest headers that exist (long merge lists, thousands of tensors) are near 20 MB.
MAXIMUM_HEADER_BYTES: Final = 256 * 2**20
FIRST_CHUNK_BYTES: Final = 64 * 2**10
LARGEST_CHUNK_BYTES: Final = 4 * 2**20

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class HeaderCursor:
    """Reads the header in growing chunks, and hashes every byte that it passes.

    Never asks the source for more than it has, and never allocates more than it is given: a length
    in the header is compared with what remains before anything is read.
    """

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._limit = min(source.size_bytes, MAXIMUM_HEADER_BYTES)
        self._buffer = b""
        self._at = 0
        self._fetched = 0
        self._chunk_bytes = FIRST_CHUNK_BYTES
        self._hash = hashlib.sha256()

    @property
    def position_bytes(self) -> int:
        """Where the next byte lies, from the start of the source."""
        return self._fetched - (len(self._buffer) - self._at)

    def digest(self) -> bytes:
        """SHA-256 of all bytes passed so far."""
        running = self._hash.copy()
        running.update(memoryview(self._buffer)[: self._at])
        return running.digest()

    def take(self, length_bytes: int) -> bytes:
        """The next bytes."""
        self._need(length_bytes)
        start = self._at
        self._at += length_bytes
        return self._buffer[start : self._at]

    def u32(self) -> int:
        """An unsigned 32-bit little-endian number."""
        return int(_U32.unpack(self.take(4))[0])

    def u64(self) -> int:
        """An unsigned 64-bit little-endian number."""
        return int(_U64.unpack(self.take(8))[0])

    def string(self) -> bytes:
        """A GGUF string: a 64-bit length, then that many bytes."""
        return self.take(self.u64())

    def skip(self, length_bytes: int) -> None:
        """Pass over bytes (they still count for the digest)."""
        self.check_room(length_bytes)
        while length_bytes:
            step = min(length_bytes, LARGEST_CHUNK_BYTES)
            self._need(step)
            self._at += step
            length_bytes -= step

    def skip_strings(self, count: int) -> None:
        """Pass over ``count`` GGUF strings; a vocabulary has a quarter of a million."""
        self.check_room(8 * count)
        unpack = _U64.unpack_from
        while count:
            buffer, at, end = self._buffer, self._at, len(self._buffer)
            wanted = 8
            while count and end - at >= 8:
                (length,) = unpack(buffer, at)
                if length > end - at - 8:
                    wanted = 8 + length
                    break
                at += 8 + length
                count -= 1
            self._at = at
            if count:
                self._need(wanted)

    def check_room(self, length_bytes: int) -> None:
        """Refuse a promise of more bytes than are left.

        Raises:
            LinkcppError: the source ends before, or the header is implausibly large.
        """
        end = self.position_bytes + length_bytes
        if end > self._source.size_bytes:
            raise LinkcppError(
                f"{self._source.name} is truncated or damaged: its header needs bytes up to {end}, "
                f"but it has {self._source.size_bytes}.",
                hint="Download or copy it again.",
            )
        if end > self._limit:
            raise LinkcppError(
                f"The header of {self._source.name} is larger than {MAXIMUM_HEADER_BYTES} bytes; "
                "no sound GGUF has that.",
                hint="Download or copy it again.",
            )

    def _need(self, length_bytes: int) -> None:
        available = len(self._buffer) - self._at
        if available >= length_bytes:
            return
        self.check_room(length_bytes)
        self._hash.update(memoryview(self._buffer)[: self._at])
        wanted = max(length_bytes - available, self._chunk_bytes)
        wanted = min(wanted, self._source.size_bytes - self._fetched)
        fresh = self._source.read(self._fetched, wanted)
        self._buffer = self._buffer[self._at :] + fresh
        self._at = 0
        self._fetched += len(fresh)
        self._chunk_bytes = min(2 * self._chunk_bytes, LARGEST_CHUNK_BYTES)
