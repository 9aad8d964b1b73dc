"""Files that are whole or absent, whatever happens while they are written."""

import contextlib
import os
import tempfile
from pathlib import Path

from linkcpp.common.errors import error_of_system


def write_atomically(path: Path, content: bytes | str, *, mode: int = 0o644) -> None:
    """Replace ``path`` by ``content``: readers see the old file or the new one, never a part.

    The file is synced before it takes the name, and has ``mode`` from its first byte on.

    Raises:
        LinkcppError: the disk is full, or the folder cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            # A device or pipe, such as /dev/null, is written to: root must not replace it.
            path.write_bytes(data)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(file.fileno(), mode)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                Path(temporary).unlink()
            raise
    except OSError as error:
        raise error_of_system(
            error,
            f"Cannot write {path}: {error.strerror or error}.",
            hint="Free some space or choose another folder.",
        ) from error
