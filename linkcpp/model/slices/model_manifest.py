"""The manifest of a whole model: a hash for every expert's slab and for all other bytes. Pure.

It is made once, where the model is. From it follow the manifests of all slices and of the hollow
backbone, which are the very ones that ``linkcpp slice`` writes.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import Field

from linkcpp.common.errors import LinkcppError
from linkcpp.common.records import WireRecord
from linkcpp.model.expert_tensors import counts_by_layer, expert_name, find_expert_tensors
from linkcpp.model.parts import MAXIMUM_PARTS, ModelFiles
from linkcpp.model.slices.layout import CopyJob, CopyUnit, SlicePlan, plan_backbone, plan_slice
from linkcpp.model.slices.manifest import (
    FileKind,
    Manifest,
    ModelOrigin,
    Slab,
    Span,
    TensorSlabs,
    listed_slabs,
    piece_spans,
)
from linkcpp.model.slices.segments import Segment, count_experts

SLICE_NAME: Final = "slice.gguf"

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ModelPart(WireRecord):
    """One file of a model; ``spans`` are all its bytes but the experts' weights, in order."""

    file_bytes: int = Field(gt=0, le=2**50)
    header_bytes: int = Field(gt=0, le=2**30)
    spans: tuple[Span, ...] = Field(max_length=2**20)

    @property
    def backbone_bytes(self) -> int:
        """What the hollow file has of this one."""
        return sum(span.size_bytes for span in self.spans)


class ExpertHashes(WireRecord):
    """A tensor of experts: ``sha256`` has one hash for each expert, ascending from 0."""

    name: str = Field(max_length=64)
    type_name: str = Field(max_length=16)
    slab_bytes: int = Field(gt=0, le=2**40)
    sha256: tuple[Sha256, ...] = Field(max_length=2**16)


class ModelManifest(WireRecord):
    """The hashes of all bytes of a model."""

    format: Literal["linkcpp-model-manifest"] = "linkcpp-model-manifest"
    version: Literal[1] = 1
    model: ModelOrigin
    parts: tuple[ModelPart, ...] = Field(min_length=1, max_length=MAXIMUM_PARTS)
    tensors: tuple[ExpertHashes, ...] = Field(max_length=2**16)


class HashPlan(NamedTuple):
    """What is to be hashed of a model: the hollow copy of each file, and every expert's slabs."""

    backbones: tuple[CopyJob, ...]
    experts: SlicePlan | None

    @property
    def units(self) -> tuple[CopyUnit, ...]:
        """All units, each piece of which gets a hash; in the order of ``read_all`` below."""
        units = [unit for job in self.backbones for unit in job.units]
        return (*units, *(self.experts.job.units if self.experts else ()))


def plan_hashes(files: ModelFiles) -> HashPlan:
    """Lay out the hashing of a model; a dense one has no experts.

    Raises:
        LinkcppError: its experts cannot be sliced.
    """
    backbones = tuple(
        plan_backbone(header, file, source.size_bytes)
        for file, (header, source) in enumerate(zip(files.headers, files.sources, strict=True))
    )
    if not has_experts(files):
        return HashPlan(backbones, None)
    return HashPlan(backbones, plan_slice(files, all_segments(files)))


def has_experts(files: ModelFiles) -> bool:
    """Whether a model has tensors that can be sliced by expert."""
    return any(expert_name(tensor.name) is not None for _, tensor in files.tensors)


def all_segments(files: ModelFiles) -> tuple[Segment, ...]:
    """All experts of a model.

    Raises:
        LinkcppError: it has none.
    """
    placed = find_expert_tensors(files.sources[0].name, files.metadata, files.tensors)
    counts = counts_by_layer(placed)
    return tuple(Segment(layer=layer, first=0, last=n - 1) for layer, n in sorted(counts.items()))


def model_manifest(
    files: ModelFiles, plan: HashPlan, digests: Sequence[list[str]], model: ModelOrigin
) -> ModelManifest:
    """Put the hashes of a plan's units together; ``digests`` has those of each unit."""
    at = 0
    parts = []
    for header, job in zip(files.headers, plan.backbones, strict=True):
        spans = piece_spans(job, list(digests[at : at + len(job.units)]))
        at += len(job.units)
        parts.append(
            ModelPart(file_bytes=job.file_bytes, header_bytes=header.data_offset_bytes, spans=spans)
        )
    hashes = iter([digest for found in digests[at:] for digest in found])
    tensors = [
        ExpertHashes(
            name=entry.tensor.name,
            type_name=entry.tensor.kind.name,
            slab_bytes=entry.tensor.slab_bytes,
            sha256=tuple(next(hashes) for _ in range(entry.tensor.expert_count)),
        )
        for entry in (plan.experts.tensors if plan.experts else ())
    ]
    return ModelManifest(model=model, parts=tuple(parts), tensors=tuple(tensors))


def slice_manifest(whole: ModelManifest, plan: SlicePlan, header_sha256: str) -> Manifest:
    """Describe a slice by the hashes of the model that it is cut from."""
    known = {tensor.name: tensor for tensor in whole.tensors}
    tensors = []
    for tensor, ranges, offset_bytes in plan.tensors:
        hashes = known[tensor.name].sha256
        tensors.append(
            TensorSlabs(
                name=tensor.name,
                type_name=tensor.kind.name,
                shape=tensor.shape(count_experts(ranges)),
                offset_bytes=offset_bytes,
                slab_bytes=tensor.slab_bytes,
                experts=ranges,
                sha256=tuple(hashes[e] for a, b in ranges for e in range(a, b + 1)),
            )
        )
    header = Span(offset_bytes=0, size_bytes=len(plan.job.header), sha256=header_sha256)
    return Manifest(
        kind=FileKind.SLICE,
        file_name=SLICE_NAME,
        file_bytes=plan.job.file_bytes,
        model=whole.model,
        spans=(header,),
        tensors=tuple(tensors),
    )


def backbone_manifest(whole: ModelManifest, file: int) -> Manifest:
    """Describe the hollow copy of one file of a model."""
    part = whole.parts[file]
    return Manifest(
        kind=FileKind.BACKBONE,
        file_name=f"part {file + 1}",
        file_bytes=part.file_bytes,
        model=whole.model,
        spans=part.spans,
    )


def promised_pieces(job: CopyJob, manifest: Manifest) -> list[tuple[Slab, ...]]:
    """Find what a manifest promises for every piece of every unit of a job.

    Raises:
        LinkcppError: it describes another file than the job makes.
    """
    listed = listed_slabs(manifest)
    if job.header:
        next(listed, None)
    found = [tuple(_next_pieces(unit, listed)) for unit in job.units]
    if manifest.file_bytes != job.file_bytes or next(listed, None) is not None:
        raise _other_file()
    return found


def _next_pieces(unit: CopyUnit, listed: Iterator[Slab]) -> Iterator[Slab]:
    at = unit.target_offset_bytes
    for size in unit.piece_sizes:
        slab = next(listed, None)
        if slab is None or (slab.offset_bytes, slab.size_bytes) != (at, size):
            raise _other_file()
        yield slab
        at += size


def _other_file() -> LinkcppError:
    return LinkcppError(
        "The hub's manifest describes another file than the model's header does.",
        hint="Have the hub's owner remove the model and add it again.",
    )
