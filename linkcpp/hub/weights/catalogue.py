"""What the hub keeps of its models: a folder each, which is there wholly or not at all.

``models/NAME/`` has ``entry.json``, ``manifest.json.gz``, the header of each file, and the files
themselves where they were copied. A folder is prepared beside it under another name and gets its
own by one rename, so a kill at any moment leaves the catalogue as it was before or after.
"""

import gzip
import hashlib
import os
import re
import shutil
from pathlib import Path

from pydantic import ValidationError

from linkcpp.common.files import write_atomically
from linkcpp.common.records import Record
from linkcpp.hub.data_folder import make_data_folder, unusable_folder
from linkcpp.hub.errors import ApiError
from linkcpp.model.slices.model_manifest import ModelManifest
from linkcpp.model.source import FileSource
from linkcpp.registry.models import MAX_MODELS, NAME_PATTERN, ServedModel

ENTRY_NAME = "entry.json"
MANIFEST_NAME = "manifest.json.gz"
FILES_NAME = "files"
JOURNAL_NAME = "hashes.journal"

_BEGUN = ".adding-"
_REMOVED = ".removed-"
_NAME = re.compile(NAME_PATTERN)


class LocalFile(Record):
    """A file of a model on the hub's disk; ``version`` is another one when somebody changed it.

    ``path`` is absolute, or within the model's folder where the file was copied there.
    """

    path: Path
    version: str


class Entry(Record):
    """A model of the catalogue; ``files`` is empty where the hub has only its manifest."""

    model: ServedModel
    files: tuple[LocalFile, ...] = ()


def check_name(name: str) -> str:
    """Return a model's name if it is one.

    Raises:
        ApiError: it could be mistaken for a path, or is too long.
    """
    if not _NAME.fullmatch(name):
        raise ApiError(
            422,
            "invalid_name",
            "A model's name has letters, digits, '.', '_' and '-', 64 at most, and begins with a "
            "letter or digit.",
            hint="Choose one with --name.",
        )
    return name


def models_folder(data: Path) -> Path:
    """Where the models of the hub with this data folder are."""
    return data / "models"


class Catalogue:
    """The models below a hub's data folder (``models_folder``). All methods block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        """The names of all models, sorted.

        Raises:
            LinkcppError: the folder cannot be read.
        """
        try:
            found = [path.name for path in self._folder.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise unusable_folder(self._folder, error) from error
        return sorted(name for name in found if _NAME.fullmatch(name))

    def folder(self, name: str) -> Path:
        """Where a model's files are."""
        return self._folder / check_name(name)

    def begun_folder(self, name: str) -> Path:
        """Where a model is prepared."""
        return self._folder / f"{_BEGUN}{check_name(name)}"

    def entry(self, name: str) -> Entry:
        """Look up a model.

        Raises:
            ApiError: there is none of this name, or its entry is damaged.
        """
        try:
            content = (self.folder(name) / ENTRY_NAME).read_bytes()
            return Entry.model_validate_json(content)
        except FileNotFoundError:
            raise unknown_model(name) from None
        except (OSError, ValidationError) as error:
            raise ApiError(
                409,
                "damaged_model",
                f"The hub's entry of {name} cannot be read.",
                hint="Its owner can remove the model and add it again.",
            ) from error

    def entries(self) -> list[Entry]:
        """All models that can be read, each with its problem where it has one."""
        found = []
        for name in self.names()[:MAX_MODELS]:
            try:
                entry = self.entry(name)
            except ApiError:
                continue
            problem = self.problem(entry)
            model = entry.model.model_copy(update={"problem": problem})
            found.append(entry.model_copy(update={"model": model}))
        return found

    def local_files(self, entry: Entry) -> list[LocalFile]:
        """The files on this disk, with absolute paths."""
        folder = self.folder(entry.model.name)
        return [file.model_copy(update={"path": folder / file.path}) for file in entry.files]

    def problem(self, entry: Entry) -> str | None:
        """Say what is wrong with the files of a model, if something is."""
        for file in self.local_files(entry):
            try:
                found = FileSource.version_of(file.path.stat())
            except OSError:
                return "Its file is gone from the hub's disk."
            if found != file.version:
                return "Its file on the hub's disk was changed since it was added."
        return None

    def manifest(self, name: str) -> bytes:
        """Read a model's manifest, compressed by gzip as it is kept.

        Raises:
            ApiError: it is missing.
        """
        try:
            return (self.folder(name) / MANIFEST_NAME).read_bytes()
        except OSError as error:
            raise ApiError(409, "damaged_model", f"The manifest of {name} is gone.") from error

    def begin(self, name: str) -> Path:
        """Make the folder in which a model is prepared, or find the one that was begun.

        Raises:
            ApiError: there is such a model already, or too many.
            LinkcppError: it cannot be written.
        """
        make_data_folder(self._folder.parent)
        names = self.names()
        self._sweep()
        if name in names:
            raise ApiError(
                409,
                "known_model",
                f"There is a model {name} already.",
                hint=f"Choose another name with --name, or `linkcpp hub models remove {name}`.",
            )
        if len(names) >= MAX_MODELS:
            raise ApiError(409, "too_many_models", f"The hub has {MAX_MODELS} models.")
        folder = self.begun_folder(name)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unusable_folder(self._folder, error) from error
        return folder

    def commit(self, entry: Entry, manifest: ModelManifest, headers: list[bytes]) -> None:
        """Have the prepared model in the catalogue; when this returns it outlives a power cut."""
        folder = self.begun_folder(entry.model.name)
        write_atomically(folder / MANIFEST_NAME, packed_manifest(manifest)[0])
        for number, header in enumerate(headers, 1):
            write_atomically(header_path(folder, number), header)
        write_atomically(folder / ENTRY_NAME, entry.model_dump_json())
        (folder / JOURNAL_NAME).unlink(missing_ok=True)
        _sync(folder)
        folder.rename(self.folder(entry.model.name))
        _sync(self._folder)

    def remove(self, name: str) -> None:
        """Take a model, or what was begun of one, out of the catalogue.

        Raises:
            ApiError: there is none.
        """
        gone = self._folder / f"{_REMOVED}{check_name(name)}-{os.urandom(4).hex()}"
        for folder in (self.folder(name), self.begun_folder(name)):
            try:
                folder.rename(gone)
                break
            except FileNotFoundError:
                continue
        else:
            self.entry(name)
        _sync(self._folder)
        self._sweep()

    def _sweep(self) -> None:
        for left in self._folder.glob(f"{_REMOVED}*"):
            shutil.rmtree(left, ignore_errors=True)


def header_path(folder: Path, part: int) -> Path:
    """Where the header of a file is kept; parts count from 1."""
    return folder / f"header-{part:05d}"


def packed_manifest(manifest: ModelManifest) -> tuple[bytes, str]:
    """A manifest as it is kept, and its SHA-256 before compression."""
    content = manifest.model_dump_json().encode()
    return gzip.compress(content, mtime=0), hashlib.sha256(content).hexdigest()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unknown_model(name: str) -> ApiError:
    """Return why a call for a model that is not there (any more) is refused."""
    return ApiError(
        404,
        "unknown_model",
        f"This hub has no model {name!r}.",
        hint="`linkcpp hub models list --hub URL` lists those that it has; plan again with one of "
        "them.",
    )
