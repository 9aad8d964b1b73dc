"""What of an unfinished file is already there: one line a unit, with the hashes of its slabs.

The journal says only where to look. Nothing that it lists is used before the bytes in the
unfinished file have been hashed again.
"""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from linkcpp.common.closing import Closing
from linkcpp.common.errors import LinkcppError
from linkcpp.model.slices.layout import CopyJob
from linkcpp.model.slices.manifest import Slab
from linkcpp.model.source import ByteSource

FORMAT = "linkcpp-journal-1"
_LINE = re.compile(rb"(\d{1,12})((?: [0-9a-f]{64})+)")


def job_identity(
    job: CopyJob, sources: Iterable[ByteSource], promised: Iterable[Iterable[Slab]] | None = None
) -> str:
    """A digest of all that decides a file's bytes, so that a journal is used for no other file.

    Where it is promised what the pieces are, it does not matter who gives them.
    """
    total = hashlib.sha256(job.header)
    facts = [job.file_bytes, *(tuple(unit) for unit in job.units)]
    if promised is None:
        facts += [(source.name, source.size_bytes, source.version) for source in sources]
    else:
        facts += [piece.sha256 for pieces in promised for piece in pieces]
    total.update(json.dumps(facts).encode())
    return total.hexdigest()


class Journal(Closing):
    """The journal of one unfinished file, locked against other processes while it is open.

    ``done`` has the hashes that were noted for each finished unit; ``is_new`` says that there was
    no journal of this very job.

    Raises:
        LinkcppError: another process is writing the same file, or the folder cannot be written.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self._path = path
        try:
            # Read and appended through one descriptor, which also carries the lock.
            self._file = open(path, "a+b")  # noqa: PTH123, SIM115
        except OSError as error:
            raise LinkcppError(
                f"Cannot write {path}: {error.strerror}.", hint="Choose another folder."
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise LinkcppError(
                f"Another linkcpp is writing {path.name.removesuffix('.journal')} in "
                f"{path.parent} now.",
                hint="Wait until it is done, or choose another name.",
            ) from error
        self.is_new = False
        self.done = self._load(f"{FORMAT} {identity}\n".encode())

    def close(self) -> None:
        """Give back what it holds; may be called twice."""
        self._file.close()

    def note(self, unit: int, digests: list[str]) -> None:
        """Write down that a unit has been written with these hashes."""
        self._file.write(f"{unit} {' '.join(digests)}\n".encode())
        self._file.flush()

    def remove(self) -> None:
        """Remove the journal of a file that is finished."""
        self._path.unlink(missing_ok=True)

    def _load(self, opening: bytes) -> dict[int, list[str]]:
        self._file.seek(0)
        done: dict[int, list[str]] = {}
        if self._file.readline(len(opening) + 1) != opening:
            self.is_new = True
            self._file.truncate(0)
            self._file.write(opening)
            self._file.flush()
            return done
        sound_bytes = len(opening)
        for line in self._file:
            # A process that was killed may have left half a line.
            match = _LINE.fullmatch(line.removesuffix(b"\n")) if line.endswith(b"\n") else None
            if match is None:
                break
            done[int(match[1])] = match[2].decode().split()
            sound_bytes += len(line)
        os.truncate(self._file.fileno(), sound_bytes)
        return done
