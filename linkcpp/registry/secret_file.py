"""Secret files: read only where nobody else may read them."""

import os
import stat
from pathlib import Path

from linkcpp.common.errors import LinkcppError
from linkcpp.common.text import shell_command

SECRET_MODE = 0o600

_OPEN_TO_OTHERS = 0o077
_MAX_FILE_BYTES = 64 * 1024


def read_secret(path: Path, what: str) -> str:
    """Read a file that only its owner may read; ``what`` names the content in errors.

    Raises:
        LinkcppError: it is missing, cannot be read, or other users may read it.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise LinkcppError(
            f"{path}, which holds {what}, cannot be read: {error.strerror or error}.",
            hint="Make it readable for this user, and for nobody else.",
        ) from error
    if os.name == "posix" and mode & _OPEN_TO_OTHERS:
        raise LinkcppError(
            f"{path}, which holds {what}, may be used by other users (mode {mode:04o}).",
            hint=f"`{shell_command('chmod', '600', path)}`.",
        )
    return content.decode("utf-8", errors="replace")
