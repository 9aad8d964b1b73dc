"""Files that are written once and then only read, though several processes may start at once."""

import contextlib
import os
import secrets
from pathlib import Path

from linkcpp.common.files import OWNERS_MODE, write_atomically


def write_once(path: Path, content: str, *, mode: int = OWNERS_MODE) -> bool:
    """Write ``path`` unless it exists; tell whether this call wrote it.

    Of several processes that try at the same time exactly one wins, and the file is whole from the
    moment it has its name.

    Raises:
        LinkcppError: the disk is full, or the folder cannot be written.
    """
    with contextlib.suppress(OSError):  # what makes it unusable is told by the attempt to write
        if path.exists():
            return False
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    write_atomically(draft, content, mode=mode)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError:
        # Android and some network file systems know no hard links; there the last one wins.
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return True
