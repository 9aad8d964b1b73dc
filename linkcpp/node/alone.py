"""One agent for one identity: two with the same id would be taken for one machine by everybody."""

import contextlib
import fcntl
import os
from collections.abc import Iterator

from linkcpp.common.errors import LinkcppError
from linkcpp.common.paths import state_folder


@contextlib.contextmanager
def only_agent() -> Iterator[None]:
    """Hold this installation's lock, which the system drops however the process ends.

    Raises:
        LinkcppError: another agent holds it, or the state folder cannot be written.
    """
    path = state_folder() / "node.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LinkcppError(
            f"Cannot write {path}: {error.strerror}.",
            hint="Free some space, or set LINKCPP_HOME to a folder that you may write.",
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LinkcppError(
                f"A node runs already with the state folder {path.parent}.",
                hint="Stop that one first; for a second node on this machine set LINKCPP_HOME to "
                "another folder.",
            ) from None
        yield
    finally:
        os.close(descriptor)
