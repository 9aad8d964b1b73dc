"""Folders of installed engines: whole or absent, one installation at a time."""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from linkcpp.common.errors import LinkcppError, write_hint
from linkcpp.engine.binaries import engines_folder

# Called with what is being done, and how much of how much is done (``None``: not known).
ProgressReport = Callable[[str, int | None, int | None], None]

_PARTIAL = ".partial-"


@contextlib.contextmanager
def staged_engine(name: str) -> Iterator[Path]:
    """Give an empty folder that becomes ``engines/<name>`` when the block ends well.

    Whatever ends the block early (an error, Ctrl-C, a full disk) leaves nothing behind, and an
    earlier engine of that name as it was. What a killed installation left is removed first.

    Raises:
        LinkcppError: another installation runs, or the disk is full or not writable.
    """
    folder = engines_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _sole_installation(folder):
            for leftover in folder.glob(f"{_PARTIAL}*"):
                shutil.rmtree(leftover, ignore_errors=True)
            partial = Path(tempfile.mkdtemp(dir=folder, prefix=_PARTIAL))
            try:
                partial.chmod(0o755)
                yield partial
                _take_name(partial, folder / name)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise disk_error(error, folder) from error


def disk_error(error: OSError, folder: Path) -> LinkcppError:
    """Say in one sentence why nothing can be written below ``folder``."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return LinkcppError(
            f"The disk of {folder} is full.",
            hint="Free some space, or set LINKCPP_HOME to a folder on another disk.",
        )
    return LinkcppError(
        f"Cannot write to {folder}: {error.strerror or error}.",
        hint=write_hint(error, "set LINKCPP_HOME to another folder"),
    )


@contextlib.contextmanager
def _sole_installation(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LinkcppError(
                "Another `linkcpp engine install` is running.", hint="Wait until it is done."
            ) from None
        yield


def _take_name(partial: Path, final: Path) -> None:
    if not final.exists():
        partial.rename(final)
        return
    # A folder with content cannot be replaced in one step: move the old one aside first.
    aside = Path(tempfile.mkdtemp(dir=final.parent, prefix=_PARTIAL))
    try:
        final.rename(aside / "old")
        try:
            partial.rename(final)
        except BaseException:
            (aside / "old").rename(final)
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    os.utime(final)
