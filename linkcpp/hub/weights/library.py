"""What a request for weights is answered with: models are read once, layouts kept for a while."""

import gzip
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

from linkcpp.common.errors import LinkcppError
from linkcpp.hub.errors import ApiError
from linkcpp.hub.weights.catalogue import (
    ENTRY_NAME,
    Catalogue,
    Entry,
    LocalFile,
    header_path,
    unknown_model,
)
from linkcpp.hub.weights.layout import Extent, Layout, backbone_layout, slice_layout
from linkcpp.model.header import read_header
from linkcpp.model.parts import ModelFiles
from linkcpp.model.remote import HeaderBytes
from linkcpp.model.slices.layout import SlicePlan, plan_backbone, plan_slice
from linkcpp.model.slices.model_manifest import ModelManifest, slice_manifest
from linkcpp.model.slices.segments import Segment, describe
from linkcpp.model.slices.writing import choose_segments
from linkcpp.registry.models import parse_segments_text

# A large model's manifest takes some megabytes, as does a slice's layout of many ranges.
_MAX_MODELS: Final = 4
_MAX_PLANS: Final = 32

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class Content(NamedTuple):
    """Bytes to be sent: ranges of ``files``; ``etag`` changes with them."""

    layout: Layout
    files: tuple[LocalFile, ...]
    etag: str
    media_type: str = "application/octet-stream"
    encoding: str | None = None


class _Loaded(NamedTuple):
    entry: Entry
    files: ModelFiles
    manifest: ModelManifest


class Library:
    """Contents by what they are asked for. All methods block, and may be called by any thread."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self._models: _Recent[tuple[str, int, int], _Loaded] = _Recent(_MAX_MODELS)
        self._plans: _Recent[tuple[str, tuple[Segment, ...]], SlicePlan] = _Recent(_MAX_PLANS)

    def record(self, name: str) -> Content:
        """What the hub tells of one model.

        Raises:
            ApiError: as all methods here: there is no such model, or it cannot be served.
        """
        entry = self.catalogue.entry(name)
        problem = self.catalogue.problem(entry)
        model = entry.model.model_copy(update={"problem": problem})
        return _json(model.model_dump_json().encode())

    def manifest(self, name: str, *, packed: bool) -> Content:
        """The whole model's manifest, ``packed`` by gzip or not."""
        self.catalogue.entry(name)
        content = self.catalogue.manifest(name)
        if packed:
            return _json(content)._replace(encoding="gzip")
        return _json(gzip.decompress(content))

    def slice_manifest(self, name: str, segments_text: str) -> Content:
        """The manifest of a slice."""
        loaded, plan, _ = self._slice(name, segments_text)
        header = hashlib.sha256(plan.job.header).hexdigest()
        return _json(slice_manifest(loaded.manifest, plan, header).model_dump_json().encode())

    def slice(self, name: str, segments_text: str) -> Content:
        """A slice, as ``linkcpp slice`` writes it."""
        loaded, plan, segments = self._slice(name, segments_text)
        files = self._weights(loaded)
        what = ";".join(describe(segments))
        return Content(slice_layout(plan.job), files, _etag(loaded, "slice", what))

    def backbone(self, name: str, part: int) -> Content:
        """One hollow file of a model, without its holes."""
        loaded = self._load(name)
        files = self._weights(loaded)
        file = _checked_part(loaded, part) - 1
        file_bytes = loaded.manifest.parts[file].file_bytes
        job = plan_backbone(loaded.files.headers[file], file, file_bytes)
        return Content(backbone_layout(job), files, _etag(loaded, "backbone", str(part)))

    def header(self, name: str, part: int) -> Content:
        """The front of one file of a model."""
        loaded = self._load(name)
        path = header_path(self.catalogue.folder(name), _checked_part(loaded, part))
        size = loaded.manifest.parts[part - 1].header_bytes
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ApiError(409, "damaged_model", f"A header of {name} is gone.") from error
        return Content(
            Layout([Extent(size, None, 0, content)]), (), _etag(loaded, "header", str(part))
        )

    def _slice(
        self, name: str, segments_text: str
    ) -> tuple[_Loaded, SlicePlan, tuple[Segment, ...]]:
        loaded = self._load(name)
        try:
            segments = choose_segments(loaded.files, parse_segments_text(segments_text))
            key = (loaded.entry.model.manifest_digest, segments)
            plan = self._plans.get(key, lambda: plan_slice(loaded.files, segments))
        except ApiError:
            raise
        except LinkcppError as error:
            raise ApiError(422, "no_such_slice", error.message, hint=error.hint) from error
        return loaded, plan, segments

    def _weights(self, loaded: _Loaded) -> tuple[LocalFile, ...]:
        model = loaded.entry.model
        if not model.has_weights:
            raise ApiError(
                409,
                "no_weights",
                f"This hub has the manifest of {model.name} only.",
                hint="Fetch its weights from the addresses that its parts have.",
            )
        return tuple(self.catalogue.local_files(loaded.entry))

    def _load(self, name: str) -> _Loaded:
        path = self.catalogue.folder(name) / ENTRY_NAME
        try:
            status = path.stat()
        except OSError:
            self.catalogue.entry(name)  # says that there is none
            raise unknown_model(name) from None
        # Removed and added again it is another file.
        return self._models.get((name, status.st_ino, status.st_mtime_ns), lambda: self._read(name))

    def _read(self, name: str) -> _Loaded:
        entry = self.catalogue.entry(name)
        content = gzip.decompress(self.catalogue.manifest(name))
        if hashlib.sha256(content).hexdigest() != entry.model.manifest_digest:
            raise ApiError(409, "damaged_model", f"The manifest of {name} is damaged.")
        manifest = ModelManifest.model_validate_json(content)
        headers = []
        sources = []
        for number, part in enumerate(manifest.parts, 1):
            path = header_path(self.catalogue.folder(name), number)
            # The names of the sources are only ever told in errors about the model's header.
            source = HeaderBytes(name, _read_bytes(path, name), part.file_bytes)
            sources.append(source)
            headers.append(read_header(source))
        files = ModelFiles(tuple(sources), tuple(headers), ExitStack())
        if files.digest != entry.model.digest:
            raise ApiError(409, "damaged_model", f"A header of {name} is damaged.")
        return _Loaded(entry, files, manifest)


class _Recent(Generic[_K, _V]):
    """The values that were asked for last; each is made once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[_K, _V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: _K, make: Callable[[], _V]) -> _V:
        with self._lock:
            if key not in self._values:
                self._values[key] = make()
            self._values.move_to_end(key)
            while len(self._values) > self._most:
                self._values.popitem(last=False)
            return self._values[key]


def _checked_part(loaded: _Loaded, part: int) -> int:
    count = len(loaded.manifest.parts)
    if not 1 <= part <= count:
        raise ApiError(404, "unknown_part", f"The model has parts 1 to {count}.")
    return part


def _json(content: bytes) -> Content:
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return Content(Layout([Extent(len(content), None, 0, content)]), (), etag, "application/json")


def _etag(loaded: _Loaded, kind: str, what: str) -> str:
    text = "\n".join((loaded.entry.model.manifest_digest, kind, what))
    return f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'


def _read_bytes(path: Path, name: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ApiError(409, "damaged_model", f"A header of {name} is gone.") from error
