"""The models that a hub has: what it tells of them.

| call | answer |
| --- | --- |
| ``GET /v1/models`` | ``ServedModelList`` |
| ``GET /v1/models/{name}`` | ``ServedModel`` |
| ``GET /v1/models/{name}/manifest`` | ``linkcpp.model.slices.model_manifest.ModelManifest`` |
| ``…/manifest?segments=S`` | the ``Manifest`` of that slice, as ``linkcpp slice`` writes it |
| ``…/header?part=N`` | the first bytes of a file of the model, up to the tensors' data |
| ``…/slice?segments=S`` | the slice |
| ``…/backbone?part=N`` | all of a file but its experts' weights: the manifest's spans in a row |

All are for the roles node, backbone and admin. Parts count from 1. All but the first take
``Range`` and ``If-Range``. ``segments`` is what ``segments_text`` writes, ``0-3:0-31;4:16-63``.
"""

from collections.abc import Iterable
from typing import Annotated, Final

from pydantic import Field

from linkcpp.common.errors import LinkcppError
from linkcpp.common.records import WireRecord
from linkcpp.model.parts import MAXIMUM_PARTS
from linkcpp.model.slices.segments import Segment, SegmentRequest, describe, parse_segment
from linkcpp.registry.fields import ModelDigest, UnixTime

NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
MAX_MODELS: Final = 1024
# nginx takes request lines of 8 KiB.
MAX_SEGMENTS_CHARACTERS: Final = 6000

# What a hub calls a model: never a path.
ModelName = Annotated[str, Field(pattern=NAME_PATTERN)]
ModelUrl = Annotated[str, Field(pattern=r"^https?://[^\s\x00-\x1f\x7f]+$", max_length=4096)]


class ServedPart(WireRecord):
    """One file of a model. ``backbone_bytes`` of it are not experts' weights.

    ``url`` is where it lies on the web, if it does.
    """

    file_bytes: int = Field(gt=0, le=2**50)
    header_bytes: int = Field(gt=0, le=2**30)
    backbone_bytes: int = Field(gt=0, le=2**50)
    url: ModelUrl | None = None


class ServedModel(WireRecord):
    """A model of a hub.

    ``digest`` is that of ``ModelInventory``; ``manifest_digest`` the SHA-256 of the manifest, so
    that another one means other weights. With ``has_weights`` the hub serves slices; else they are
    fetched from the parts' addresses and held to the hub's hashes. ``problem`` says why the hub
    does not serve the model now.
    """

    name: ModelName
    model_name: str = Field(max_length=256)
    architecture: str = Field(max_length=64)
    digest: ModelDigest
    manifest_digest: ModelDigest
    file_bytes: int = Field(gt=0)
    parts: tuple[ServedPart, ...] = Field(min_length=1, max_length=MAXIMUM_PARTS)
    has_weights: bool
    added_at: UnixTime
    problem: str | None = None


class ServedModelList(WireRecord):
    """All models of a hub."""

    models: tuple[ServedModel, ...] = Field(max_length=MAX_MODELS)


def segments_text(segments: Iterable[Segment]) -> str:
    """Write segments for an address.

    Raises:
        LinkcppError: they are too many ranges for one.
    """
    text = ";".join(describe(segments))
    if len(text) > MAX_SEGMENTS_CHARACTERS:
        raise LinkcppError(
            f"The slice has so many ranges of experts that they take {len(text)} characters; "
            f"a hub takes {MAX_SEGMENTS_CHARACTERS}.",
            hint="Choose experts that are next to each other, or several slices.",
        )
    return text


def parse_segments_text(text: str) -> list[SegmentRequest]:
    """Read what ``segments_text`` wrote.

    Raises:
        LinkcppError: it has another form.
    """
    if len(text) > MAX_SEGMENTS_CHARACTERS:
        raise LinkcppError(f"`segments` is longer than {MAX_SEGMENTS_CHARACTERS} characters.")
    return [parse_segment(item) for item in text.split(";")]
