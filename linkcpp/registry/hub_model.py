"""A hub's model, seen from a machine that wants parts of it: headers, hashes, and where bytes are.

All bytes are held to the hub's hashes, wherever they come from: the hub itself, or the model's own
address on the web. The calls block: they are for programs and threads that fetch.
"""

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import quote

from pydantic import ValidationError

from linkcpp.common.cache import read_kept, write_kept
from linkcpp.common.closing import Closing
from linkcpp.common.errors import LinkcppError
from linkcpp.common.records import Record
from linkcpp.common.request_ids import request_id_headers
from linkcpp.common.text import printable
from linkcpp.model.checked_header import checked_architecture
from linkcpp.model.header import Header, read_header
from linkcpp.model.parts import ModelFiles, part_urls
from linkcpp.model.remote import HeaderBytes, LazySource
from linkcpp.model.slices.layout import CopyJob
from linkcpp.model.slices.manifest import Manifest
from linkcpp.model.slices.model_manifest import (
    ModelManifest,
    backbone_manifest,
    promised_pieces,
)
from linkcpp.model.slices.segments import Segment
from linkcpp.model.slices.unit_copier import Place, Supply
from linkcpp.model.slices.writing import SupplyOf
from linkcpp.model.source import ByteSource
from linkcpp.model.web_client import new_client, new_direct_client
from linkcpp.model.web_source import WebSource, public_url
from linkcpp.registry.models import ServedModel, segments_text
from linkcpp.registry.trust import tls_context

MAXIMUM_MANIFEST_BYTES = 64 * 2**20
_CACHE_PREFIX = "hub-"
_MAX_RECORD_BYTES = 8 * 2**20

_R = TypeVar("_R", bound=Record)


class HubAccess(NamedTuple):
    """A hub's address, and what gives this machine's token for it before every call."""

    url: str
    token: Callable[[], str]


class HubModel(Closing):
    """A model of a hub, for use in a ``with`` block.

    ``record`` is what the hub tells of it; ``files`` has its headers, and reads weights from the
    model's own addresses, if it has some. ``url`` is one more address of the same model, which is
    then asked first. What is in the folder ``cache`` from an earlier attempt is not asked for
    again; ``forget`` empties it.

    Raises:
        LinkcppError: the hub cannot be reached, has no such model, or its header is damaged.
    """

    def __init__(
        self, access: HubAccess, name: str, *, url: str | None = None, cache: Path | None = None
    ) -> None:
        self._access = access
        self._base = f"{access.url}/v1/models/{quote(name, safe='')}"
        self._cache = cache
        self._closer = contextlib.ExitStack()
        self._asked: list[WebSource] = []
        self._hub = self._closer.enter_context(new_direct_client(tls_context()))
        self._hub.headers.update(request_id_headers())
        self._web = self._closer.enter_context(new_client())
        try:
            self.record = self._get_record()
            self._origins = self._find_origins(url)
            self.files = self._open_files()
        except BaseException:
            self._closer.close()
            raise

    def close(self) -> None:
        """Give back what it holds; may be called twice."""
        self._closer.close()

    @property
    def transferred_bytes(self) -> int:
        """All that came over the network for this model so far."""
        return sum(source.bytes_read for source in self._asked)

    def slice_manifest(self, segments: tuple[Segment, ...]) -> Manifest:
        """Return the hashes of a slice.

        Raises:
            LinkcppError: they are not to be had.
        """
        query = _segments_query(segments)
        return self._manifest(Manifest, f"manifest?{query}", query)

    def slice_supply(self, segments: tuple[Segment, ...]) -> SupplyOf:
        """Say where the units of a slice are and what they must be.

        The returned function raises ``LinkcppError`` where the hub's hashes are not to be had, or
        describe another file.
        """
        query = _segments_query(segments)

        def supply_of(job: CopyJob) -> Supply:
            manifest = self.slice_manifest(segments)
            header = hashlib.sha256(job.header).hexdigest()
            if [span.sha256 for span in manifest.spans] != [header]:
                raise LinkcppError(
                    "The hub writes another header for this slice than this machine does.",
                    hint="Install the same version of linkcpp on both machines.",
                )
            served = self._served(f"/slice?{query}", job.file_bytes)
            places = [
                self._ordered(unit.file, unit.source_offset_bytes, served, unit.target_offset_bytes)
                for unit in job.units
            ]
            return Supply(places, promised_pieces(job, manifest))

        return supply_of

    def backbone_supply(self) -> SupplyOf:
        """Say the same of the hollow files' units; raises as ``slice_supply``."""
        whole = self._manifest(ModelManifest, "manifest", "")

        def supply_of(job: CopyJob) -> Supply:
            file = job.units[0].file
            served = self._served(f"/backbone?part={file + 1}", job.copied_bytes)
            places = []
            sent = 0
            for unit in job.units:
                places.append(self._ordered(file, unit.source_offset_bytes, served, sent))
                sent += unit.size_bytes
            return Supply(places, promised_pieces(job, backbone_manifest(whole, file)))

        return supply_of

    def forget(self) -> None:
        """Remove what was kept for another attempt."""
        if self._cache is not None:
            for path in self._cache.glob(f"{_CACHE_PREFIX}*"):
                path.unlink(missing_ok=True)

    def _ordered(
        self, file: int, origin_bytes: int, served: ByteSource | None, served_bytes: int
    ) -> tuple[Place, ...]:
        at_hub = [Place(served, served_bytes)] if served else []
        at_origins = [Place(sources[file], origin_bytes) for sources in self._origins]
        # Without an address of its own the hub is nearer than where it has the model from.
        first = at_origins if self._asks_origin_first else at_hub
        return (*first, *(at_hub if self._asks_origin_first else at_origins))

    def _served(self, path: str, size_bytes: int) -> ByteSource | None:
        if not self.record.has_weights:
            return None
        return LazySource(self._base, size_bytes, lambda: self._open_at_hub(path, size_bytes))

    def _open_at_hub(self, path: str, size_bytes: int | None) -> WebSource:
        source = WebSource(
            self._base + path,
            client=self._hub,
            bearer=self._access.token,
            size_bytes=size_bytes,
        )
        self._asked.append(source)
        return source

    def _find_origins(self, url: str | None) -> list[list[ByteSource]]:
        parts = self.record.parts
        self._asks_origin_first = url is not None
        own = [part.url for part in parts if part.url is not None]
        found: list[list[ByteSource]] = []
        for urls in (part_urls(url) if url else [], own):
            if urls and len(urls) != len(parts):
                raise LinkcppError(
                    f"The model at the address has {len(urls)} parts, at the hub {len(parts)}.",
                    hint="Inspect both: are they the same model?",
                )
            if urls:
                sizes = [part.file_bytes for part in parts]
                found.append([self._origin(u, n) for u, n in zip(urls, sizes, strict=True)])
        return found

    def _origin(self, url: str, size_bytes: int) -> ByteSource:
        def opener() -> ByteSource:
            source = WebSource(url, client=self._web, size_bytes=size_bytes)
            self._asked.append(source)
            return source

        return LazySource(public_url(url), size_bytes, opener)

    def _open_files(self) -> ModelFiles:
        headers = [self._header(file) for file in range(len(self.record.parts))]
        sources = self._origins[0] if self._origins else self._no_weights()
        files = ModelFiles(tuple(sources), tuple(headers), contextlib.ExitStack())
        if files.digest != self.record.digest:
            self.forget()
            raise LinkcppError(
                f"The header of {self.record.name} that came from the hub is damaged.",
                hint="Try again; have the hub's owner add the model again if that does not help.",
            )
        checked_architecture(self.record.name, files.metadata, files.tensors)
        return files

    def _no_weights(self) -> list[ByteSource]:
        def refuse() -> ByteSource:
            raise LinkcppError(f"The hub gives slices and the backbone of {self.record.name} only.")

        return [LazySource(self._base, part.file_bytes, refuse) for part in self.record.parts]

    def _header(self, file: int) -> Header:
        part = self.record.parts[file]

        def fetch() -> bytes:
            source = self._open_at_hub(f"/header?part={file + 1}", part.header_bytes)
            parts = source.stream(0, part.header_bytes)
            return b"".join(bytes(piece) for piece in parts)

        content = self._kept(f"{self.record.digest[:16]}-header-{file + 1}", fetch)
        return read_header(HeaderBytes(self._base, content, part.file_bytes))

    def _manifest(self, kind: type[_R], path: str, what: str) -> _R:
        which = hashlib.sha256(what.encode()).hexdigest()[:16]
        content = self._kept(
            f"{self.record.manifest_digest[:16]}-manifest-{which}",
            lambda: self._whole(f"/{path}", MAXIMUM_MANIFEST_BYTES),
        )
        if not what and hashlib.sha256(content).hexdigest() != self.record.manifest_digest:
            self.forget()
            raise LinkcppError(
                f"The manifest of {self.record.name} that came from the hub is damaged.",
                hint="Have the hub's owner remove the model and add it again.",
            )
        return self._parsed(kind, content)

    def _kept(self, name: str, fetch: Callable[[], bytes]) -> bytes:
        if self._cache is None:
            return fetch()
        path = self._cache / f"{_CACHE_PREFIX}{name}"
        content = read_kept(path)
        if content is None:
            content = fetch()
            write_kept(path, content)
        return content

    def _parsed(self, kind: type[_R], content: bytes) -> _R:
        try:
            return kind.model_validate_json(content)
        except ValidationError as error:
            self.forget()
            raise LinkcppError(
                f"What {self._access.url} tells of the model is of no version that fits this one.",
                hint="Install the same version of linkcpp on both machines.",
            ) from error

    def _get_record(self) -> ServedModel:
        record = self._parsed(ServedModel, self._whole("", _MAX_RECORD_BYTES))
        if record.problem is not None:
            raise LinkcppError(f"{self._base}: {printable(record.problem, 500)}")
        return record

    def _whole(self, path: str, max_bytes: int) -> bytes:
        source = self._open_at_hub(path, None)
        if source.size_bytes > max_bytes:
            raise LinkcppError(f"{source.name} has {source.size_bytes} bytes, which cannot be.")
        return b"".join(bytes(part) for part in source.stream(0, source.size_bytes))


def _segments_query(segments: tuple[Segment, ...]) -> str:
    return f"segments={quote(segments_text(segments), safe=':;,-')}"
