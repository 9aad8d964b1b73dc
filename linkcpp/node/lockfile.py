"""One agent for one identity: two with the same id would be taken for one machine by everybody."""

from contextlib import AbstractContextManager

from linkcpp.common.errors import NotNowError
from linkcpp.common.lockfile import held_lock
from linkcpp.common.paths import state_folder


def only_agent() -> AbstractContextManager[None]:
    """Hold this installation's lock.

    Raises:
        LinkcppError: another agent holds it, or the state folder cannot be written.
    """
    path = state_folder() / "node.lock"
    taken = NotNowError(
        f"A node runs already with the state folder {path.parent}.",
        hint="Stop that one first; for a second node on this machine set LINKCPP_HOME to "
        "another folder.",
    )
    return held_lock(path, taken)
