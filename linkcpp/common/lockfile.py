"""A lock that one process at a time holds, and that the system drops however the process ends."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from linkcpp.common.errors import LinkcppError, error_of_system, write_hint


@contextlib.contextmanager
def held_lock(path: Path, taken: LinkcppError) -> Iterator[None]:
    """Hold the lock file at ``path`` while the block runs; its folder is made if need be.

    Raises:
        LinkcppError: ``taken``, where another process holds it; or the file cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise error_of_system(
            error,
            f"Cannot write {path}: {error.strerror}.",
            hint=write_hint(error, "set LINKCPP_HOME to another folder"),
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise taken from None
        yield
    finally:
        os.close(descriptor)
