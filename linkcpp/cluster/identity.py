"""Who this machine is: an id that survives restarts, and a name for people."""

import socket
import uuid

from linkcpp.cluster.records import NodeId
from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import write_once
from linkcpp.common.paths import state_folder
from linkcpp.common.records import Record
from linkcpp.common.text import printable

_FILE_NAME = "node-id"


class Identity(Record):
    """The id (a random UUID) and the name of this machine."""

    node_id: NodeId
    name: str


def load_identity(name: str | None = None) -> Identity:
    """Read this machine's id, or make it; the name is ``name`` or else the host name.

    Raises:
        LinkcppError: the file holds no id, or it cannot be read or written.
    """
    path = state_folder() / _FILE_NAME
    write_once(path, f"{uuid.uuid4()}\n")
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            node_id = str(uuid.UUID(file.read(64).strip()))
    except (OSError, ValueError) as error:
        raise LinkcppError(
            f"{path} does not hold this machine's id: {error}.",
            hint="Delete the file: a new id is made at the next start.",
        ) from error
    return Identity(node_id=NodeId(node_id), name=printable(name or host_name()))


def host_name() -> str:
    """Return the host's own name without its domain."""
    return socket.gethostname().partition(".")[0] or "unnamed"
