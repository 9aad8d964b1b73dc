"""The program that fetches a slice for an agent: ``python -m linkcpp.node.slice_fetcher CONFIG``.

A program of its own, so that hashing does not delay the bridges of the agent, and a server that
does not answer any more can be left at once. It prints one ``FetchNews`` a line.
"""

import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self

from linkcpp.common.errors import LinkcppError
from linkcpp.common.records import Record, WireRecord
from linkcpp.common.request_ids import continue_request
from linkcpp.common.units import format_bytes
from linkcpp.model.parts import ModelFiles
from linkcpp.model.slices.checked import note_checked
from linkcpp.model.slices.layout import plan_slice
from linkcpp.model.slices.segments import SegmentRequest, merge_segments
from linkcpp.model.slices.writing import (
    SupplyOf,
    choose_segments,
    open_whole_model,
    write_slice,
)
from linkcpp.node.records import SliceRequest
from linkcpp.registry.hub_model import HubAccess, HubModel
from linkcpp.registry.secret_file import read_secret

_NEWS_SECONDS = 0.2


class FetchConfig(Record):
    """What to fetch, the file to write, and how large that may be.

    For a hub's model also its address, and the file that has the node's token, always a fresh one.
    ``request_id`` is that of the call that asked for the slice.
    """

    request: SliceRequest
    output: Path
    max_bytes: int
    hub_url: str | None = None
    token_path: Path | None = None
    request_id: str | None = None


class FetchNews(WireRecord):
    """How far it is, as in ``SliceRecord``; the last one tells that it is done, or why not.

    ``needed_bytes`` is the size of a slice that is larger than it may be.
    """

    file_bytes: int | None = None
    received_bytes: int = 0
    transferred_bytes: int = 0
    is_done: bool = False
    error: str | None = None
    needed_bytes: int | None = None


class _TooLargeError(LinkcppError):
    def __init__(self, file_bytes: int, message: str, *, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.file_bytes = file_bytes


class _Reporter:
    """Counts what was written, from any thread, and prints news now and then while it is open."""

    def __init__(
        self, transferred_bytes: Callable[[], int], file_bytes: int, header_bytes: int
    ) -> None:
        self._transferred_bytes = transferred_bytes
        self._file_bytes = file_bytes
        self._received_bytes = header_bytes
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def add(self, size_bytes: int) -> None:
        """Count bytes that are in the file now."""
        with self._lock:
            self._received_bytes += size_bytes

    def news(self) -> FetchNews:
        """Tell how far it is."""
        return FetchNews(
            file_bytes=self._file_bytes,
            received_bytes=self._received_bytes,
            transferred_bytes=self._transferred_bytes(),
        )

    def _run(self) -> None:
        last = None
        while not self._ended.is_set():
            if (news := self.news()) != last:
                _print(news)
                last = news
            self._ended.wait(_NEWS_SECONDS)


def fetch(config: FetchConfig) -> None:
    """Fetch a slice, going on with what an earlier attempt left.

    Raises:
        LinkcppError: the model cannot be read, is another one, or the slice is too large.
    """
    continue_request(config.request_id)
    wanted = config.request
    if wanted.hub_model is None or config.hub_url is None:
        assert wanted.url is not None  # noqa: S101 - the request names one of both
        with open_whole_model(wanted.url) as files:
            _print(_write(config, files, lambda: sum(s.bytes_read for s in files.sources), None))
        return
    access = HubAccess(config.hub_url, partial(_token, config))
    cache = config.output.parent
    with HubModel(access, wanted.hub_model, url=wanted.url, cache=cache) as model:
        supply_of = model.slice_supply(merge_segments(wanted.segments))
        last = _write(config, model.files, lambda: model.transferred_bytes, supply_of)
        # The agent may end this program as soon as it hears that it is done.
        model.forget()
        _print(last)


def _token(config: FetchConfig) -> str:
    assert config.token_path is not None  # noqa: S101 - there is one where there is a hub
    return read_secret(config.token_path, "this node's token for the hub")


def _write(
    config: FetchConfig,
    files: ModelFiles,
    transferred_bytes: Callable[[], int],
    supply_of: SupplyOf | None,
) -> FetchNews:
    wanted = config.request
    if files.digest != wanted.model_digest:
        raise LinkcppError(
            "What is at the address is another model than the one that was asked for.",
            hint="Inspect it, and plan with that.",
        )
    requests = [
        SegmentRequest(((entry.layer, entry.layer),), ((entry.first, entry.last),))
        for entry in wanted.segments
    ]
    segments = choose_segments(files, requests)
    job = plan_slice(files, segments).job
    if job.file_bytes > config.max_bytes:
        raise _TooLargeError(
            job.file_bytes,
            f"The slice takes {format_bytes(job.file_bytes)}, but the node has "
            f"{format_bytes(config.max_bytes)} left for slices.",
            hint="Delete slices there, raise the owner's limit (`linkcpp node --slices`), or "
            "ask for fewer experts.",
        )
    with _Reporter(transferred_bytes, job.file_bytes, len(job.header)) as reporter:
        write_slice(files, segments, config.output, reporter.add, supply_of)
        note_checked(config.output)
    return reporter.news().model_copy(update={"is_done": True})


def _print(news: FetchNews) -> None:
    print(news.model_dump_json(exclude_none=True), flush=True)


def main(arguments: list[str]) -> int:
    """Run with the configuration in a file."""
    try:
        fetch(FetchConfig.model_validate_json(Path(arguments[0]).read_bytes()))
    except _TooLargeError as error:
        _print(FetchNews(error=str(error), needed_bytes=error.file_bytes))
        return 2
    except LinkcppError as error:
        _print(FetchNews(error=str(error)))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
