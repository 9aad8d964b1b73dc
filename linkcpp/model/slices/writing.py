"""Writing slices and backbones: planned, copied, synced, described by a manifest, renamed."""

import contextlib
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import write_atomically
from linkcpp.common.records import Record
from linkcpp.common.units import format_bytes
from linkcpp.model.architecture import Architecture
from linkcpp.model.checked_header import checked_architecture
from linkcpp.model.expert_tensors import counts_by_layer, find_expert_tensors
from linkcpp.model.parts import ModelFiles, open_model
from linkcpp.model.slices.copying import Copied, copy_units
from linkcpp.model.slices.hashing import Progress
from linkcpp.model.slices.journal import Journal
from linkcpp.model.slices.layout import SLICE_TYPE, CopyJob, plan_backbone, plan_copy, plan_slice
from linkcpp.model.slices.manifest import (
    FileKind,
    Manifest,
    ModelOrigin,
    Span,
    manifest_path,
    piece_spans,
    tensor_slabs,
)
from linkcpp.model.slices.segments import Segment, SegmentRequest, resolve
from linkcpp.model.slices.target import Target, begin_target, take_name
from linkcpp.model.slices.unit_copier import Place, Supply
from linkcpp.model.source import ByteSource

# Partly filled blocks at the edges of the holes, and what the file system keeps of its own.
_BLOCK_SLACK_BYTES = 2**16


# Where the units of a job are to be had; without one they are read from the model's own files.
SupplyOf = Callable[[CopyJob], Supply]


class WrittenFile(Record):
    """A finished file.

    ``copied_bytes`` is what it has of the source. Of these, ``fetched_bytes`` were read now and
    ``reused_bytes`` were there from an attempt before. ``source_bytes`` is all that was read of the
    model now, headers and other parts included. ``allocated_bytes`` is the room that the file takes
    on the disk.
    """

    kind: FileKind
    path: Path
    manifest: Path
    file_bytes: int
    copied_bytes: int
    fetched_bytes: int
    reused_bytes: int
    source_bytes: int
    allocated_bytes: int
    segments: tuple[Segment, ...] = ()
    notes: tuple[str, ...] = ()


def open_whole_model(location: str | Path) -> ModelFiles:
    """Open a model to slice.

    Raises:
        LinkcppError: it cannot be read, is itself a slice, or has a header that nothing can be made
            of.
    """
    files = open_model(location)
    try:
        _check_whole(files)
    except BaseException:
        files.closer.close()
        raise
    return files


def _check_whole(files: ModelFiles) -> None:
    name = files.sources[0].name
    if files.metadata.get("general.type") == SLICE_TYPE:
        raise LinkcppError(f"{name} is itself a slice.", hint="Give the model that it is from.")
    checked_architecture(name, files.metadata, files.tensors)


def choose_segments(files: ModelFiles, requests: Iterable[SegmentRequest]) -> tuple[Segment, ...]:
    """Check what was asked for against a model.

    Raises:
        LinkcppError: as ``resolve`` and ``find_expert_tensors``.
    """
    name = files.sources[0].name
    counts = counts_by_layer(find_expert_tensors(name, files.metadata, files.tensors))
    architecture = Architecture(
        name, str(files.metadata.get("general.architecture")), files.metadata
    )
    return resolve(requests, counts, architecture.number("block_count"))


def own_supply(files: ModelFiles, job: CopyJob) -> Supply:
    """Take every unit from the model's own files."""
    units = ((files.sources[unit.file], unit.source_offset_bytes) for unit in job.units)
    return Supply([(Place(source, offset_bytes),) for source, offset_bytes in units])


def write_slice(
    files: ModelFiles,
    segments: tuple[Segment, ...],
    output: Path,
    on_progress: Progress,
    supply_of: SupplyOf | None = None,
) -> WrittenFile:
    """Write the experts of ``segments`` (as ``choose_segments`` gives them) as a GGUF file.

    Goes on with what an interrupted attempt left beside ``output``.

    Raises:
        LinkcppError: the source cannot be read, or ``output`` cannot be written.
    """
    plan = plan_slice(files, segments)
    target = Target(output)
    supply = supply_of(plan.job) if supply_of else own_supply(files, plan.job)
    with begin_target(target, plan.job, files, supply) as journal:
        copied = copy_units(plan.job, supply, target.partial, journal, on_progress)
        header = hashlib.sha256(plan.job.header).hexdigest()
        manifest = Manifest(
            kind=FileKind.SLICE,
            file_name=output.name,
            file_bytes=plan.job.file_bytes,
            model=model_origin(files),
            spans=(Span(offset_bytes=0, size_bytes=len(plan.job.header), sha256=header),),
            tensors=tensor_slabs(plan.tensors, plan.job, copied.digests),
        )
        written = _finish(target, journal, manifest, copied, _read_bytes(files, [supply]))
    return written.model_copy(update={"segments": segments})


def backbone_jobs(files: ModelFiles) -> list[CopyJob]:
    """Lay out the hollow copy of every file of a model.

    Raises:
        LinkcppError: the model has no experts.
    """
    find_expert_tensors(files.sources[0].name, files.metadata, files.tensors)
    return hollow_jobs(files)


def hollow_jobs(files: ModelFiles) -> list[CopyJob]:
    """Lay out all bytes but the experts' of every file of a model, which may have no experts."""
    return [
        plan_backbone(header, file, files.sources[file].size_bytes)
        for file, header in enumerate(files.headers)
    ]


def backbone_paths(output: Path, part_count: int) -> list[Path]:
    """Where the files of a hollow model go; parts are named as llama.cpp wants them."""
    if part_count == 1:
        return [output]
    stem = output.name.removesuffix(".gguf")
    return [
        output.with_name(f"{stem}-{part:05d}-of-{part_count:05d}.gguf")
        for part in range(1, part_count + 1)
    ]


def write_backbone(
    files: ModelFiles, output: Path, on_progress: Progress, supply_of: SupplyOf | None = None
) -> list[WrittenFile]:
    """Write a hollow model: as many files as the model has, with holes for the experts' weights.

    A dense model is refused, unless it comes from elsewhere (``supply_of``).

    Raises:
        LinkcppError: as ``write_slice``.
    """
    jobs = hollow_jobs(files) if supply_of else backbone_jobs(files)
    supplies = [supply_of(job) if supply_of else own_supply(files, job) for job in jobs]
    targets = [Target(path) for path in backbone_paths(output, len(jobs))]
    with contextlib.ExitStack() as stack:
        journals = [
            stack.enter_context(begin_target(target, job, files, supply))
            for target, job, supply in zip(targets, jobs, supplies, strict=True)
        ]
        # All parts are renamed together at the end, so that the same command can go on with them.
        copies = [
            copy_units(job, supply, target.partial, journal, on_progress)
            for target, job, supply, journal in zip(targets, jobs, supplies, journals, strict=True)
        ]
        written = []
        for target, job, journal, copied in zip(targets, jobs, journals, copies, strict=True):
            manifest = _backbone_manifest(files, target.path.name, job, copied)
            result = _finish(target, journal, manifest, copied, _read_bytes(files, supplies))
            notes = holes_notes(
                target.path, job.copied_bytes, result.allocated_bytes, job.file_bytes
            )
            written.append(result.model_copy(update={"notes": notes}))
    return written


def write_copy(files: ModelFiles, output: Path, on_progress: Progress) -> list[Path]:
    """Copy all files of a model, and go on with copies that were begun; those that are there stay.

    Raises:
        LinkcppError: as ``write_slice``.
    """
    paths = backbone_paths(output, len(files.sources))
    for file, (path, source) in enumerate(zip(paths, files.sources, strict=True)):
        if path.exists():
            on_progress(source.size_bytes)
            continue
        target, job = Target(path), plan_copy(file, source.size_bytes)
        supply = own_supply(files, job)
        with begin_target(target, job, files, supply) as journal:
            copy_units(job, supply, target.partial, journal, on_progress)
            take_name(target)
            journal.remove()
    return paths


def _backbone_manifest(files: ModelFiles, name: str, job: CopyJob, copied: Copied) -> Manifest:
    return Manifest(
        kind=FileKind.BACKBONE,
        file_name=name,
        file_bytes=job.file_bytes,
        model=model_origin(files),
        spans=piece_spans(job, copied.digests),
    )


def holes_notes(
    path: Path, copied_bytes: int, allocated_bytes: int, file_bytes: int
) -> tuple[str, ...]:
    """Say so where a file system did not keep the holes of a file."""
    holes = file_bytes - copied_bytes
    kept = file_bytes - allocated_bytes
    if holes <= _BLOCK_SLACK_BYTES or kept >= holes // 2:
        return ()
    return (
        f"The file system of {path.parent} does not keep holes: {path.name} takes "
        f"{format_bytes(allocated_bytes)} there, though only {format_bytes(copied_bytes)} are its "
        "own. It works all the same; choose a folder on another file system to save the room.",
    )


def _finish(
    target: Target, journal: Journal, manifest: Manifest, copied: Copied, source_bytes: int
) -> WrittenFile:
    path = target.path
    # First, so that no file is ever without its manifest.
    write_atomically(manifest_path(path), manifest.model_dump_json() + "\n")
    take_name(target)
    journal.remove()
    return WrittenFile(
        kind=manifest.kind,
        path=path,
        manifest=manifest_path(path),
        file_bytes=manifest.file_bytes,
        copied_bytes=copied.fetched_bytes + copied.reused_bytes,
        fetched_bytes=copied.fetched_bytes,
        reused_bytes=copied.reused_bytes,
        source_bytes=source_bytes,
        allocated_bytes=path.stat().st_blocks * 512,
    )


def _read_bytes(files: ModelFiles, supplies: Iterable[Supply]) -> int:
    sources: dict[int, ByteSource] = {id(source): source for source in files.sources}
    for supply in supplies:
        for places in supply.places:
            sources.update((id(place.source), place.source) for place in places)
    return sum(source.bytes_read for source in sources.values())


def model_origin(files: ModelFiles) -> ModelOrigin:
    """Name a model and its digest, as manifests do."""
    name = files.metadata.get("general.name")
    return ModelOrigin(
        name=name if isinstance(name, str) else Path(files.sources[0].name).name,
        digest=files.digest,
        file_bytes=files.file_bytes,
        part_count=len(files.sources),
    )
