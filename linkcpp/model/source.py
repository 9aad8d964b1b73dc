"""Where a model's bytes come from: a local file or a web server, read in ranges.

A source serves ranges and counts what it served, so a header costs only the header, and a slice of
an expert costs only that expert, whether the file lies on this disk or behind HTTP.
"""

import difflib
import errno
import itertools
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from linkcpp.common.closing import Closing
from linkcpp.common.errors import LinkcppError
from linkcpp.common.text import shell_command

# Small enough to stay in a core's cache between reading, hashing and writing.
PIECE_BYTES = 256 * 2**10
# Of a folder without end only so many entries are held against a name that is not there.
_MAX_LOOKED_AT = 10_000


class ByteSource(Protocol):
    """Bytes that can be read in ranges, by several threads at once.

    ``name`` is for people (no secrets). ``size_bytes`` is the whole length.
    """

    name: str
    size_bytes: int

    @property
    def bytes_read(self) -> int:
        """What ``read`` and ``stream`` gave so far."""
        ...

    @property
    def version(self) -> str:
        """Another one when somebody changed the bytes, as far as file system or server tell."""
        ...

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Exactly ``length_bytes`` from ``offset_bytes`` on.

        Raises:
            LinkcppError: the source ends before that, or cannot be read.
        """
        ...

    def stream(self, offset_bytes: int, length_bytes: int) -> Iterator[memoryview]:
        """The same bytes as ``read``, in pieces; each is valid until the next one.

        Raises:
            LinkcppError: as ``read``.
        """
        ...

    def close(self) -> None:
        """Give back the file or connection; may be called twice."""
        ...


class FileSource(Closing):
    """A regular local file."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.bytes_read = 0
        self._counting = threading.Lock()
        self._descriptor = _open_regular_file(path)
        status = os.fstat(self._descriptor)
        self.size_bytes = status.st_size
        self.version = self.version_of(status)

    @staticmethod
    def version_of(status: os.stat_result) -> str:
        """The ``version`` of a file in this state."""
        return f"{status.st_size} bytes of {status.st_mtime_ns}"

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Exactly ``length_bytes`` from ``offset_bytes`` on; see ``ByteSource.read``."""
        check_range(self, offset_bytes, length_bytes)
        data = bytearray(length_bytes)
        self._fill(memoryview(data), offset_bytes)
        return bytes(data)

    def stream(self, offset_bytes: int, length_bytes: int) -> Iterator[memoryview]:
        """The same bytes in pieces; see ``ByteSource.stream``."""
        check_range(self, offset_bytes, length_bytes)
        buffer = memoryview(bytearray(min(length_bytes, PIECE_BYTES)))
        end = offset_bytes + length_bytes
        for at in range(offset_bytes, end, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, end - at)]
            self._fill(piece, at)
            yield piece

    def _fill(self, buffer: memoryview, offset_bytes: int) -> None:
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[done:]], offset_bytes + done)
            except OSError as error:
                raise LinkcppError(
                    f"Cannot read {self.name}: {error.strerror}.",
                    hint="Check the disk, or copy the file again.",
                ) from error
            if not count:
                raise LinkcppError(
                    f"{self.name} became shorter while it was read.",
                    hint="Wait until it is wholly written, then try again.",
                )
            done += count
        with self._counting:
            self.bytes_read += done

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def check_range(source: ByteSource, offset_bytes: int, length_bytes: int) -> None:
    """Refuse a range that does not lie wholly inside the source.

    Raises:
        LinkcppError: it does not.
    """
    if offset_bytes < 0 or length_bytes < 0 or offset_bytes + length_bytes > source.size_bytes:
        raise LinkcppError(
            f"{source.name} is truncated: bytes {offset_bytes} to {offset_bytes + length_bytes} "
            f"are wanted, but it has {source.size_bytes}.",
            hint="Download or copy it again.",
        )


def _open_regular_file(path: Path) -> int:
    try:
        # Asked before opening: opening a pipe would wait for its writer.
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise LinkcppError(f"{path} is a folder, not a model file.", hint=_folder_hint(path))
        if not stat.S_ISREG(status.st_mode):
            raise LinkcppError(
                f"{path} is not a regular file.", hint="Give the path of a GGUF file."
            )
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise _open_error(path, error) from error
    except ValueError as error:
        raise LinkcppError(f"{path} is not a usable path: {error}.") from error
    if status.st_size == 0:
        os.close(descriptor)
        raise LinkcppError(f"{path} is empty.", hint="Download or copy the model again.")
    return descriptor


def _open_error(path: Path, error: OSError) -> LinkcppError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return LinkcppError(f"There is no file {path}.", hint=_missing_hint(path))
    if isinstance(error, PermissionError):
        return LinkcppError(
            f"{path} may not be read by this user.",
            hint=f"Give yourself the right to read it: {shell_command('chmod', 'u+r', path)}",
        )
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return LinkcppError(f"{path} is not a usable path: {error.strerror}.")
    return LinkcppError(f"Cannot open {path}: {error.strerror}.")


def _missing_hint(path: Path) -> str:
    if not path.parent.is_dir():
        return f"There is no folder {path.parent} either; check the path."
    models = _models_in(path.parent)
    near = difflib.get_close_matches(path.name, models, n=1)
    if near:
        return f"Did you mean {path.parent / near[0]}?"
    if models:
        return f"That folder has {', '.join(models[:3])}."
    return "Check the path; there is no GGUF file in that folder."


def _models_in(folder: Path) -> list[str]:
    try:
        found = itertools.islice(folder.glob("*.gguf"), _MAX_LOOKED_AT)
        return sorted(entry.name for entry in found)
    except OSError:
        return []


def _folder_hint(folder: Path) -> str:
    if models := _models_in(folder):
        return f"Name the file in it, for instance {folder / models[0]}"
    return "Give the path of a GGUF file; there is none directly in this folder."
