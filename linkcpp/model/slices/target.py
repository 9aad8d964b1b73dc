"""A file that is being written: its name, what stands beside it meanwhile, and how it gets it."""

import os
from pathlib import Path
from typing import NamedTuple

from linkcpp.common.errors import LinkcppError
from linkcpp.model.parts import ModelFiles
from linkcpp.model.slices.journal import Journal, job_identity
from linkcpp.model.slices.layout import CopyJob
from linkcpp.model.slices.unit_copier import Supply


class Target(NamedTuple):
    """Where a file is written: its final name and what stands beside it meanwhile."""

    path: Path

    @property
    def partial(self) -> Path:
        """The unfinished file."""
        return self.path.with_name(f".{self.path.name}.partial")

    @property
    def journal(self) -> Path:
        """What of the unfinished file is done."""
        return self.path.with_name(f".{self.path.name}.journal")


def begin_target(target: Target, job: CopyJob, files: ModelFiles, supply: Supply) -> Journal:
    """Make ready to write a file, or to go on with it.

    Raises:
        LinkcppError: it cannot be written there, or another process is writing it.
    """
    path = target.path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise LinkcppError(f"{path} is a folder.", hint="Give the name of a file to write.")
        if path.exists() and not path.is_file():
            # A device or pipe would be replaced, such as /dev/null for root.
            raise LinkcppError(f"{path} is not a file.", hint="Give the name of a file to write.")
    except OSError as error:
        raise LinkcppError(
            f"Cannot write {path}: {error.strerror}.", hint="Choose another folder."
        ) from error
    for source in files.sources:
        if path.exists() and Path(source.name).exists() and path.samefile(source.name):
            raise LinkcppError(f"{path} is the model itself.", hint="Choose another name.")
    journal = Journal(target.journal, job_identity(job, files.sources, supply.promised))
    if journal.is_new:
        # Bytes of another job would stay in the holes and between the tensors.
        target.partial.unlink(missing_ok=True)
    return journal


def take_name(target: Target) -> None:
    """Give a finished file its name.

    Raises:
        LinkcppError: it cannot have it.
    """
    try:
        target.partial.replace(target.path)
        _sync_folder(target.path.parent)
    except OSError as error:
        raise LinkcppError(
            f"Cannot write {target.path}: {error.strerror}.", hint="Choose another name."
        ) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
