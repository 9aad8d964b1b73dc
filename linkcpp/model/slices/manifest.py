"""The manifest of a slice or backbone: what is in the file, with a SHA-256 for every slab."""

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ValidationError

from linkcpp.common.errors import LinkcppError
from linkcpp.common.records import Record
from linkcpp.model.slices.layout import CopyJob, SlicedTensor
from linkcpp.model.slices.segments import Range

SUFFIX = ".manifest.json"
MAXIMUM_MANIFEST_BYTES = 256 * 2**20


class FileKind(StrEnum):
    """What a written file is."""

    SLICE = "slice"
    BACKBONE = "backbone"


class Span(Record):
    """Consecutive bytes of the file and their SHA-256 in hex."""

    offset_bytes: int
    size_bytes: int
    sha256: str


class TensorSlabs(Record):
    """A tensor of a slice: ``sha256`` has one hash for each expert of ``experts``, ascending.

    ``shape`` is in ggml order, its last number the experts held.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    offset_bytes: int
    slab_bytes: int
    experts: tuple[Range, ...]
    sha256: tuple[str, ...]


class ModelOrigin(Record):
    """The model that the bytes are from; ``digest`` as in ``ModelInventory``."""

    name: str
    digest: str
    file_bytes: int
    part_count: int


class Manifest(Record):
    """What a file that linkcpp wrote has in it.

    A slice has its header and its tensors' slabs; a backbone has ``spans``, between which there are
    holes.
    """

    format: Literal["linkcpp-manifest"] = "linkcpp-manifest"
    version: Literal[1] = 1
    kind: FileKind
    file_name: str
    file_bytes: int
    model: ModelOrigin
    spans: tuple[Span, ...]
    tensors: tuple[TensorSlabs, ...] = ()


class Slab(NamedTuple):
    """Bytes to be verified; ``label`` is for people."""

    label: str
    offset_bytes: int
    size_bytes: int
    sha256: str


def manifest_path(file: Path) -> Path:
    """Where the manifest of a file is: next to it."""
    return file.with_name(file.name + SUFFIX)


def read_manifest(file: Path) -> Manifest:
    """Read the manifest next to a slice or backbone.

    Raises:
        LinkcppError: there is none, or it is damaged.
    """
    path = manifest_path(file)
    try:
        if path.stat().st_size > MAXIMUM_MANIFEST_BYTES:
            raise LinkcppError(f"{path} is too large for a manifest.")
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise LinkcppError(
            f"There is no manifest {path} to verify {file.name} with.",
            hint="Copy it from where the file is from, or slice the model again.",
        ) from error
    except OSError as error:
        raise LinkcppError(f"Cannot read {path}: {error.strerror}.") from error
    except ValidationError as error:
        problem = error.errors()[0]
        raise LinkcppError(
            f"{path} is damaged or of a newer linkcpp: {problem['msg']}.",
            hint="Copy it again, or slice the model again.",
        ) from error


def listed_slabs(manifest: Manifest) -> Iterator[Slab]:
    """Everything that a manifest has a hash for, in the order of the file."""
    for span in manifest.spans:
        label = f"bytes {span.offset_bytes} to {span.offset_bytes + span.size_bytes - 1}"
        yield Slab(label, span.offset_bytes, span.size_bytes, span.sha256)
    for tensor in manifest.tensors:
        experts = (e for first, last in tensor.experts for e in range(first, last + 1))
        for index, (expert, sha256) in enumerate(zip(experts, tensor.sha256, strict=False)):
            at = tensor.offset_bytes + index * tensor.slab_bytes
            yield Slab(f"expert {expert} of {tensor.name}", at, tensor.slab_bytes, sha256)


def piece_spans(job: CopyJob, digests: list[list[str]]) -> tuple[Span, ...]:
    """Give every piece of a job its hash."""
    spans = []
    for unit, found in zip(job.units, digests, strict=True):
        at = unit.target_offset_bytes
        for size, sha256 in zip(unit.piece_sizes, found, strict=True):
            spans.append(Span(offset_bytes=at, size_bytes=size, sha256=sha256))
            at += size
    return tuple(spans)


def tensor_slabs(
    tensors: tuple[SlicedTensor, ...], job: CopyJob, digests: list[list[str]]
) -> tuple[TensorSlabs, ...]:
    """Give every tensor of a slice the hashes of its slabs."""
    by_offset: dict[int, list[str]] = {}
    starts = {tensor.offset_bytes for tensor in tensors}
    current: list[str] = []
    for unit, found in zip(job.units, digests, strict=True):
        if unit.target_offset_bytes in starts:
            current = by_offset[unit.target_offset_bytes] = []
        current += found
    return tuple(
        TensorSlabs(
            name=entry.tensor.name,
            type_name=entry.tensor.kind.name,
            shape=entry.tensor.shape(len(by_offset[entry.offset_bytes])),
            offset_bytes=entry.offset_bytes,
            slab_bytes=entry.tensor.slab_bytes,
            experts=entry.ranges,
            sha256=tuple(by_offset[entry.offset_bytes]),
        )
        for entry in tensors
    )
