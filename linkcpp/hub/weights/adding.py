"""Adding a model to the hub, and reading it again.

Its files are hashed once, piece by piece, and that can be resumed.
"""

import contextlib
import gzip
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote

from linkcpp.common.errors import LinkcppError
from linkcpp.common.text import printable
from linkcpp.hub.weights.catalogue import (
    FILES_NAME,
    JOURNAL_NAME,
    Catalogue,
    Entry,
    LocalFile,
    check_name,
    packed_manifest,
)
from linkcpp.model.parts import ModelFiles, is_url, part_urls
from linkcpp.model.slices.hashing import Progress, hash_pieces
from linkcpp.model.slices.hollow import has_no_experts
from linkcpp.model.slices.journal import Journal, job_identity
from linkcpp.model.slices.layout import CopyJob
from linkcpp.model.slices.model_manifest import (
    HashPlan,
    ModelManifest,
    has_experts,
    model_manifest,
    plan_hashes,
)
from linkcpp.model.slices.unit_threads import UnitThreads, Work
from linkcpp.model.slices.writing import (
    model_origin,
    open_whole_model,
    write_copy,
)
from linkcpp.model.source import FileSource
from linkcpp.registry.models import ServedModel, ServedPart

_PART_SUFFIX: Final = re.compile(r"-\d{5}-of-\d{5}$")
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9._-]+")

# Shows how far a step is, given its name and all its bytes.
Bar = Callable[[str, int], AbstractContextManager[Progress]]


class Addition(NamedTuple):
    """What to add: a path or URL of a model, the name for it, whether to copy, and the time now."""

    location: str
    name: str
    copies: bool
    unix_time: float


def name_for(location: str) -> str:
    """Make a model's name from its file's.

    Raises:
        ApiError: nothing is left of it that could be a name.
    """
    address = location.partition("?")[0].partition("#")[0] if is_url(location) else location
    name = unquote(address).replace("\\", "/").rpartition("/")[2]
    stem = _PART_SUFFIX.sub("", name.removesuffix(".gguf"))
    return check_name(_NOT_IN_NAMES.sub("-", stem).strip("-._")[:64])


def add_model(catalogue: Catalogue, wanted: Addition, bar: Bar) -> Entry:
    """Add a model; goes on with what an earlier attempt left.

    Raises:
        LinkcppError: there is one of this name, the model cannot be read, is hollow, or changed
            meanwhile; or the folder cannot be written.
    """
    with open_whole_model(wanted.location) as files:
        if has_experts(files) and has_no_experts(files):
            raise LinkcppError(
                f"{files.sources[0].name} is hollow: it has no experts' weights.",
                hint="Add the whole model.",
            )
        folder = catalogue.begin(wanted.name)
        plan = plan_hashes(files)
        job = CopyJob(b"", plan.units, files.file_bytes)
        with Journal(folder / JOURNAL_NAME, job_identity(job, files.sources)) as journal:
            if journal.is_new:
                shutil.rmtree(folder / FILES_NAME, ignore_errors=True)
            if not wanted.copies:
                return _hash_and_commit(catalogue, wanted, files, plan, journal=journal, bar=bar)
            with bar("copying", files.file_bytes) as on_progress:
                paths = write_copy(files, folder / FILES_NAME / "model.gguf", on_progress)
            with open_whole_model(paths[0]) as copied:
                return _hash_and_commit(catalogue, wanted, copied, plan, journal=journal, bar=bar)


def _hash_and_commit(
    catalogue: Catalogue,
    wanted: Addition,
    files: ModelFiles,
    plan: HashPlan,
    *,
    journal: Journal,
    bar: Bar,
) -> Entry:
    with bar("hashing", sum(unit.size_bytes for unit in plan.units)) as on_progress:
        digests = _hash_units(files, plan, journal.done, journal.note, on_progress)
    manifest = model_manifest(files, plan, digests, model_origin(files))
    local = _local_files(files, wanted)
    entry = Entry(model=_record(wanted, files, manifest, has_weights=bool(local)), files=local)
    headers = [
        source.read(0, header.data_offset_bytes)
        for source, header in zip(files.sources, files.headers, strict=True)
    ]
    catalogue.commit(entry, manifest, headers)
    return entry


def _hash_units(
    files: ModelFiles,
    plan: HashPlan,
    done: Mapping[int, list[str]],
    note: Callable[[int, list[str]], None],
    on_progress: Progress,
) -> list[list[str]]:
    """Hash all units of a model but those ``done``, which files in this very state had.

    ``note`` gets each unit that was hashed now.

    Raises:
        LinkcppError: a file cannot be read.
    """
    units = plan.units
    digests = {
        number: found
        for number, found in done.items()
        if number < len(units) and len(found) == len(units[number].piece_sizes)
    }
    missing = [number for number in range(len(units)) if number not in digests]
    on_progress(sum(units[number].size_bytes for number in digests))

    def hash_unit(index: int, check_alive: Callable[[], None]) -> tuple[int, list[str]]:
        unit = units[missing[index]]

        def count(part: memoryview) -> None:
            check_alive()
            on_progress(len(part))

        parts = files.sources[unit.file].stream(unit.source_offset_bytes, unit.size_bytes)
        return missing[index], list(hash_pieces(parts, unit.piece_sizes, count))

    @contextlib.contextmanager
    def worker() -> Iterator[Work[tuple[int, list[str]]]]:
        yield hash_unit

    with UnitThreads(len(missing), worker) as results:
        for number, found in results:
            digests[number] = found
            note(number, found)
    return [digests[number] for number in range(len(units))]


def _local_files(files: ModelFiles, wanted: Addition) -> tuple[LocalFile, ...]:
    """The files as they were when they were opened.

    Raises:
        LinkcppError: one was changed since.
    """
    if is_url(wanted.location) and not wanted.copies:
        return ()
    found = []
    for source in files.sources:
        path = Path(source.name).absolute()
        if source.version != FileSource.version_of(path.stat()):
            raise LinkcppError(
                f"{path} was changed while it was read.", hint="Add it again when it is complete."
            )
        kept = Path(FILES_NAME) / path.name if wanted.copies else path
        found.append(LocalFile(path=kept, version=source.version))
    return tuple(found)


def _record(
    wanted: Addition, files: ModelFiles, manifest: ModelManifest, *, has_weights: bool
) -> ServedModel:
    urls: list[str | None] = [None] * len(manifest.parts)
    if is_url(wanted.location):
        urls = [*part_urls(wanted.location)]
    return ServedModel(
        name=wanted.name,
        model_name=printable(manifest.model.name, 256),
        architecture=printable(str(files.metadata.get("general.architecture"))),
        digest=files.digest,
        manifest_digest=packed_manifest(manifest)[1],
        file_bytes=files.file_bytes,
        parts=tuple(
            ServedPart(
                file_bytes=part.file_bytes,
                header_bytes=part.header_bytes,
                backbone_bytes=part.backbone_bytes,
                url=url,
            )
            for part, url in zip(manifest.parts, urls, strict=True)
        ),
        has_weights=has_weights,
        added_at=wanted.unix_time,
    )


def problem_with(catalogue: Catalogue, entry: Entry, on_progress: Progress) -> str | None:
    """Hash all files of a model that lie on this disk, and say what is wrong with them.

    Raises:
        LinkcppError: the model's manifest cannot be read.
    """
    if problem := catalogue.problem(entry):
        return problem
    if not entry.files:
        return None
    content = gzip.decompress(catalogue.manifest(entry.model.name))
    promised = ModelManifest.model_validate_json(content)
    try:
        with open_whole_model(catalogue.local_files(entry)[0].path) as files:
            plan = plan_hashes(files)
            digests = _hash_units(files, plan, {}, lambda *_: None, on_progress)
            found = model_manifest(files, plan, digests, promised.model)
    except LinkcppError as error:
        return error.message
    if found == promised:
        return None
    return "Its files have other bytes than when it was added, at the same size and time."
