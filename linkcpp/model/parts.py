"""All files of a model: one file, or the parts of a split one, local or behind HTTP."""

import contextlib
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from linkcpp.common.closing import Closing
from linkcpp.common.errors import LinkcppError
from linkcpp.common.paths import expand_home
from linkcpp.model.header import Header, TensorInfo, Value, read_header
from linkcpp.model.source import ByteSource, FileSource
from linkcpp.model.web_client import new_client
from linkcpp.model.web_source import WebSource

# llama-gguf-split writes, and llama.cpp insists on, exactly this form.
_PART_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MAXIMUM_PARTS = 1000


@dataclass(frozen=True)
class ModelFiles(Closing):
    """The opened files of one model, in order, with their headers.

    Weights can be read through ``sources[part]`` by the offsets of the headers. Use it in a
    ``with`` block: it holds the files or connections open.
    """

    sources: tuple[ByteSource, ...]
    headers: tuple[Header, ...]
    closer: contextlib.ExitStack

    def close(self) -> None:
        """Give back what it holds; may be called twice."""
        self.closer.close()

    @property
    def metadata(self) -> dict[str, Value]:
        """The key-value pairs of the first file, which has all of them."""
        return self.headers[0].metadata

    @property
    def tensors(self) -> tuple[tuple[int, TensorInfo], ...]:
        """Every tensor with the number of the file that has it."""
        return tuple(
            (part, tensor) for part, header in enumerate(self.headers) for tensor in header.tensors
        )

    @property
    def file_bytes(self) -> int:
        """The size of all files together."""
        return sum(source.size_bytes for source in self.sources)

    @property
    def digest(self) -> str:
        """SHA-256 over the headers of all files, in hex: identifies the model without weights."""
        total = hashlib.sha256()
        for header in self.headers:
            total.update(header.digest)
        return total.hexdigest()


def is_url(text: str) -> bool:
    """Whether a model is named by an address on the web."""
    return text.lower().startswith(("http://", "https://"))


def part_urls(url: str) -> list[str]:
    """The addresses of all parts of a model on the web, given that of any one.

    Raises:
        LinkcppError: its name is that of a part that cannot be.
    """
    directory, name, query = _url_pieces(url)
    return [directory + part + query for part in _part_names(name)]


def open_model(location: str | Path) -> ModelFiles:
    """Open a model named by the path or URL of its file, or of any one part of a split model.

    Reads headers only. Raises:
        LinkcppError: a file is missing, unsound or cut off, or the parts do not belong together.
    """
    text = str(location)
    with contextlib.ExitStack() as stack:
        opener, name = _addressing(text, stack)
        names = _part_names(name)
        sources: list[ByteSource] = []
        for part_name in names:
            source = _open_part(opener, part_name, part_name != name, names)
            stack.callback(source.close)
            sources.append(source)
        headers = tuple(read_header(source) for source in sources)
        _check_parts(sources, headers)
        return ModelFiles(tuple(sources), headers, stack.pop_all())


Opener = Callable[[str], ByteSource]


def _addressing(text: str, stack: contextlib.ExitStack) -> tuple[Opener, str]:
    """How to open a file beside the named one by its name, and the name of the named one."""
    if is_url(text):
        directory, name, query = _url_pieces(text)
        client: httpx.Client = stack.enter_context(new_client())
        return lambda part: WebSource(directory + part + query, client=client), name
    path = expand_home(Path(text))
    return lambda part: FileSource(path.with_name(part) if part != path.name else path), path.name


def _url_pieces(url: str) -> tuple[str, str, str]:
    address, mark, query = url.partition("?")
    directory, slash, name = address.rpartition("/")
    return directory + slash, name, mark + query


def _part_names(name: str) -> list[str]:
    match = _PART_NAME.fullmatch(name)
    if match is None:
        return [name]
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count or count > MAXIMUM_PARTS:
        raise LinkcppError(
            f"{name} names part {number} of {count}, which cannot be.",
            hint="Give the file the name that it had when it was published.",
        )
    return [f"{match['prefix']}-{part:05d}-of-{count:05d}.gguf" for part in range(1, count + 1)]


def _open_part(opener: Opener, name: str, is_other: bool, names: list[str]) -> ByteSource:
    try:
        return opener(name)
    except LinkcppError as error:
        if not is_other:
            raise
        raise LinkcppError(
            f"The model has {len(names)} parts, and one cannot be opened: {error.message}",
            hint="Download the missing part into the same folder; all parts are needed.",
        ) from error


def _check_parts(sources: list[ByteSource], headers: tuple[Header, ...]) -> None:
    """Hold the parts to what llama-gguf-split wrote into each of them."""
    count = len(headers)
    seen: set[str] = set()
    for index, (source, header) in enumerate(zip(sources, headers, strict=True)):
        promised = header.metadata.get("split.count", 1)
        # One file may carry split.count 0 or 1; only a true part has more.
        if promised != count and not (count == 1 and promised == 0):
            _refuse_parts(
                source,
                f"by its header it is one of {promised} parts, by its name one of {count}",
                "Give all parts the names that they had when they were published.",
            )
        if count > 1 and header.metadata.get("split.no") != index:
            _refuse_parts(
                source,
                f"by its name it is part {index + 1}, by its header part "
                f"{_one_more(header.metadata.get('split.no'))}",
                "Give all parts the names that they had when they were published.",
            )
        if doubles := seen.intersection(tensor.name for tensor in header.tensors):
            _refuse_parts(source, f"tensor {min(doubles)} is also in an earlier part")
        seen.update(tensor.name for tensor in header.tensors)
        _check_same(source, headers[0], header)
    total = headers[0].metadata.get("split.tensors.count")
    if count > 1 and isinstance(total, int) and total != len(seen):
        _refuse_parts(sources[0], f"it promises {total} tensors, but all parts have {len(seen)}")


def _check_same(source: ByteSource, first: Header, header: Header) -> None:
    for key in ("general.architecture", "split.tensors.count"):
        value = header.metadata.get(key)
        if value is not None and value != first.metadata.get(key):
            _refuse_parts(source, f"it disagrees with part 1 on {key}")


def _one_more(number: Value) -> str:
    return str(number + 1) if isinstance(number, int) else "unknown"


def _refuse_parts(source: ByteSource, why: str, hint: str | None = None) -> None:
    raise LinkcppError(
        f"{source.name} does not belong to its neighbours: {why}.",
        hint=hint or "Download all parts of the model again, from one place.",
    )
