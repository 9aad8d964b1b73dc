"""Files that are whole or absent, whatever happens while they are written, and who may read them.

What linkcpp keeps is its owner's alone; a file that a person named is as the person's umask says.
"""

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from linkcpp.common.errors import error_of_system, write_hint

OWNERS_MODE: Final = 0o600

_OTHERS: Final = 0o077
# Of the person who started the program; nothing where it does not keep to its owner.
_users_umask: Final[list[int]] = []

# Size, time of the last change of the content and of anything, in ns, and number of a file.
FileState = tuple[int, int, int, int]


def file_state(path: Path) -> FileState:
    """Return what differs as soon as somebody changed a file, without reading it.

    The second time tells of a change even where the first was set back, as ``touch`` can.

    Raises:
        OSError: it is not there.
    """
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def keep_to_owner(folders: Iterable[Path]) -> None:
    """Let nobody else read what this program and those that it starts write from now on.

    ``folders`` are closed where an earlier version left them open. For the beginning of a program.
    """
    _users_umask[:] = [os.umask(_OTHERS)]
    for folder in folders:
        with contextlib.suppress(OSError):
            mode = stat.S_IMODE(folder.stat().st_mode)
            if mode & _OTHERS:
                folder.chmod(mode & ~_OTHERS)


def users_mode() -> int:
    """Return the mode of a file that a person named: what their umask leaves."""
    if not _users_umask:
        now = os.umask(_OTHERS)
        os.umask(now)
        return 0o666 & ~now
    return 0o666 & ~_users_umask[0]


def write_atomically(path: Path, content: bytes | str, *, mode: int = OWNERS_MODE) -> None:
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
            hint=write_hint(error, "choose another folder"),
        ) from error


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
