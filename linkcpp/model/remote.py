"""Files of which something is known before they are opened."""

import threading
from collections.abc import Callable, Iterator

from linkcpp.model.source import ByteSource, check_range


class LazySource:
    """Bytes of a known size that are opened when the first of them is wanted."""

    def __init__(self, name: str, size_bytes: int, opener: Callable[[], ByteSource]) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self._opener = opener
        self._opened: ByteSource | None = None
        self._opening = threading.Lock()

    @property
    def bytes_read(self) -> int:
        """What was read so far."""
        return self._opened.bytes_read if self._opened else 0

    @property
    def version(self) -> str:
        """The hashes of a hub say more than a date would."""
        return f"{self.size_bytes} bytes"

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """See ``ByteSource.read``."""
        return b"".join(bytes(part) for part in self.stream(offset_bytes, length_bytes))

    def stream(self, offset_bytes: int, length_bytes: int) -> Iterator[memoryview]:
        """See ``ByteSource.stream``."""
        check_range(self, offset_bytes, length_bytes)
        with self._opening:
            if self._opened is None:
                self._opened = self._opener()
        yield from self._opened.stream(offset_bytes, length_bytes)

    def close(self) -> None:
        """See ``ByteSource.close``."""
        if self._opened is not None:
            self._opened.close()


class HeaderBytes:
    """The front of a file; what the header's reader takes beyond it, it does not look at."""

    def __init__(self, name: str, header: bytes, size_bytes: int) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self.bytes_read = 0
        self.version = ""
        self._header = header

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """See ``ByteSource.read``."""
        return self._header[offset_bytes : offset_bytes + length_bytes].ljust(length_bytes, b"\0")

    def stream(self, offset_bytes: int, length_bytes: int) -> Iterator[memoryview]:
        """See ``ByteSource.stream``."""
        yield memoryview(self.read(offset_bytes, length_bytes))

    def close(self) -> None:
        """Nothing is open."""
