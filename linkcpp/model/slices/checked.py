"""The state in which a written file was last seen to be as its manifest tells.

A model may have 77 GB, so a file is read again only where something of it changed since: size, time
of change, number, or the same of its manifest. What a disk changes silently, a full check finds.
"""

import contextlib
import time
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import FileState, file_state, write_atomically
from linkcpp.common.records import Record
from linkcpp.model.slices.manifest import manifest_path

# Two changes within one tick of the file system's clock look the same.
_TICK_SECONDS: Final = 0.02


class CheckedState(Record):
    """A file and its manifest, as the file system tells of them."""

    file: FileState
    manifest: FileState


def checked_state(path: Path) -> CheckedState | None:
    """Return the state of a file and its manifest now; ``None`` where one is missing."""
    try:
        return CheckedState(file=file_state(path), manifest=file_state(manifest_path(path)))
    except OSError:
        return None


def is_as_checked(path: Path) -> bool:
    """Whether a file was seen to be sound, and did not change since. Reads no more than that."""
    state = checked_state(path)
    try:
        noted = CheckedState.model_validate_json(_note_path(path).read_bytes())
    except (OSError, ValidationError):
        return False
    return noted == state


def note_checked(path: Path, state: CheckedState | None = None) -> None:
    """Note that a file is sound in ``state``, by default as it is now."""
    state = state or checked_state(path)
    if state is None:
        return
    time.sleep(_TICK_SECONDS)
    # A folder that cannot be written only has the file read again.
    with contextlib.suppress(LinkcppError):
        write_atomically(_note_path(path), state.model_dump_json())


def forget_checked(path: Path) -> None:
    """Have a file read before it is used again."""
    with contextlib.suppress(OSError):
        _note_path(path).unlink()


def remove_checked(path: Path) -> None:
    """Remove a file with its manifest and what was noted of it; fine where they are gone."""
    for gone in (path, manifest_path(path), _note_path(path)):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            gone.unlink()


def _note_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.checked")
