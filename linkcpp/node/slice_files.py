"""A slice as a row of pieces with a hash each: what a node checks while bytes come in. Pure."""

import hashlib
import json
from collections.abc import Iterable
from typing import NamedTuple

from pydantic import ValidationError

from linkcpp.common.errors import LinkcppError
from linkcpp.model.expert_tensors import expert_name
from linkcpp.model.slices.encoding import padded
from linkcpp.model.slices.manifest import FileKind, Manifest, listed_slabs
from linkcpp.model.slices.segments import Segment, merge_segments
from linkcpp.node.records import SliceId

_LARGEST_FILE_BYTES = 2**50


class Piece(NamedTuple):
    """Consecutive bytes of a file; ``sha256`` in hex, ``label`` for people."""

    label: str
    size_bytes: int
    sha256: str


def slice_id(model_digest: str, segments: Iterable[Segment]) -> SliceId:
    """Name the slice of these experts, in whatever order and pieces they are written."""
    ranges = [(entry.layer, entry.first, entry.last) for entry in merge_segments(segments)]
    text = json.dumps([model_digest, ranges])
    return SliceId(hashlib.sha256(text.encode()).hexdigest()[:32])


def manifest_segments(manifest: Manifest) -> tuple[Segment, ...]:
    """Return the experts that a slice has by its manifest.

    Raises:
        LinkcppError: it lists what is not a tensor of experts, or experts that no model has.
    """
    found = []
    for tensor in manifest.tensors:
        split = expert_name(tensor.name)
        if split is None:
            raise _refusal(f"{tensor.name[:100]!r} is not a tensor of experts")
        try:
            found += [Segment(layer=split[0], first=a, last=b) for a, b in tensor.experts]
        except ValidationError as error:
            raise _refusal(f"{tensor.name[:100]!r} has ranges that are none of experts") from error
    return merge_segments(found)


def slab_bytes(manifest: Manifest) -> int:
    """What the experts of a slice take."""
    return sum(tensor.slab_bytes * len(tensor.sha256) for tensor in manifest.tensors)


def file_pieces(manifest: Manifest) -> tuple[Piece, ...]:
    """Cut a slice into pieces that leave out no byte, what fills up alignments included.

    Raises:
        LinkcppError: the manifest is none of a slice, or leaves bytes of the file without a hash.
    """
    if manifest.kind is not FileKind.SLICE:
        raise _refusal("it describes a backbone")
    if not 0 < manifest.file_bytes <= _LARGEST_FILE_BYTES:
        raise _refusal(f"a file of {manifest.file_bytes} bytes cannot be")
    for tensor in manifest.tensors:
        if sum(last - first + 1 for first, last in tensor.experts) != len(tensor.sha256):
            raise _refusal(f"{tensor.name[:100]!r} does not have one hash for each expert")
    pieces: list[Piece] = []
    at = 0
    for slab in listed_slabs(manifest):
        if slab.size_bytes <= 0 or slab.offset_bytes not in (at, padded(at)):
            raise _refusal(f"{slab.label[:100]} does not follow on what is before it")
        pieces += _filling(slab.offset_bytes - at)
        pieces.append(Piece(slab.label, slab.size_bytes, slab.sha256))
        at = slab.offset_bytes + slab.size_bytes
    if manifest.file_bytes not in (at, padded(at)):
        raise _refusal(f"it describes {at} of {manifest.file_bytes} bytes")
    return (*pieces, *_filling(manifest.file_bytes - at))


def _filling(size_bytes: int) -> list[Piece]:
    if not size_bytes:
        return []
    zeros = hashlib.sha256(bytes(size_bytes)).hexdigest()
    return [Piece("the bytes between two tensors", size_bytes, zeros)]


def _refusal(why: str) -> LinkcppError:
    return LinkcppError(
        f"This manifest is of no slice that a node takes: {why}.", hint="Slice the model again."
    )
