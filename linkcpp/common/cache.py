"""Folders of a cache: those in use are held, the others go when all take too much room.

Small files of a cache carry their own hash: what is damaged counts as absent and is made again.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from linkcpp.common.errors import error_of_system, write_hint
from linkcpp.common.files import write_atomically

_MARK: Final = ".in-use"
_REMOVED: Final = ".removed-"
_SHARE_OF_DISK: Final = 0.1
_SEAL_BYTES: Final = len("sha256 ") + 64 + len("\n")


def write_kept(path: Path, content: bytes | str) -> None:
    """Write a small file of a cache, for ``read_kept``.

    Raises:
        LinkcppError: it cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    write_atomically(path, _seal(data) + data)


def read_kept(path: Path) -> bytes | None:
    """Read what ``write_kept`` wrote; ``None`` where it is not there, or not what was written."""
    try:
        whole = path.read_bytes()
    except OSError:
        return None
    seal, content = whole[:_SEAL_BYTES], whole[_SEAL_BYTES:]
    return content if seal == _seal(content) else None


def _seal(content: bytes) -> bytes:
    return f"sha256 {hashlib.sha256(content).hexdigest()}\n".encode()


def hold_folder(folder: Path) -> BinaryIO:
    """Make a folder of a cache, or find it, and keep it until the returned file is closed.

    The system lets go with the process, however that ends.

    Raises:
        LinkcppError: it cannot be written.
    """
    mark = folder / _MARK
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = mark.open("ab")
        except OSError as error:
            is_removed_meanwhile = isinstance(error, FileNotFoundError | FileExistsError)
            if is_removed_meanwhile and not folder.is_file():
                continue
            raise error_of_system(
                error,
                f"Cannot write {folder}: {error.strerror}.",
                hint=write_hint(error, "set XDG_CACHE_HOME to another folder"),
            ) from error
        fcntl.flock(file, fcntl.LOCK_SH)
        with contextlib.suppress(OSError):
            # It may just have been removed by somebody who held it until now.
            if os.path.samestat(mark.stat(), os.fstat(file.fileno())):
                os.utime(folder)
                return file
        file.close()


def clean_cache(parent: Path, max_bytes: int | None = None) -> list[Path]:
    """Remove folders below ``parent`` that nobody holds, least recently used first.

    Ends when those left take ``max_bytes``; a tenth of the disk if that is not told. Returns the
    folders that were removed.
    """
    if max_bytes is None:
        max_bytes = int(shutil.disk_usage(parent).total * _SHARE_OF_DISK)
    for left in parent.glob(f"{_REMOVED}*"):
        shutil.rmtree(left, ignore_errors=True)
    folders = sorted((path for path in parent.iterdir() if path.is_dir()), key=_used_at)
    sizes = {folder: allocated_bytes(folder) for folder in folders}
    total = sum(sizes.values())
    removed = []
    for folder in folders:
        if total <= max_bytes:
            break
        if _remove(folder):
            removed.append(folder)
            total -= sizes[folder]
    return removed


def allocated_bytes(folder: Path) -> int:
    """What the files of a folder take on the disk."""
    return sum(_blocks(path) for path in folder.rglob("*")) * 512


def _remove(folder: Path) -> bool:
    with _held_alone(folder) as is_free:
        if not is_free:
            return False
        gone = folder.with_name(f"{_REMOVED}{folder.name}")
        with contextlib.suppress(OSError):
            folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
            return True
    return False


@contextlib.contextmanager
def _held_alone(folder: Path) -> Iterator[bool]:
    try:
        file = (folder / _MARK).open("ab")
    except OSError:
        yield False
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _used_at(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def _blocks(path: Path) -> int:
    try:
        return path.lstat().st_blocks
    except OSError:
        return 0
