"""The program that fetches a slice for an agent: ``python -m linkcpp.node.fetching CONFIG.json``.

A program of its own, so that hashing does not delay the bridges of the agent, and a server that
does not answer any more can be left at once. It prints one ``FetchNews`` a line.
"""

import sys
import threading
from pathlib import Path
from typing import Self

from linkcpp.common.errors import LinkcppError
from linkcpp.common.records import Record, WireRecord
from linkcpp.common.units import format_bytes
from linkcpp.model.parts import ModelFiles
from linkcpp.model.slices.layout import plan_slice
from linkcpp.model.slices.segments import SegmentRequest
from linkcpp.model.slices.writing import choose_segments, open_whole_model, write_slice
from linkcpp.node.records import SliceRequest

_NEWS_SECONDS = 0.2


class FetchConfig(Record):
    """What to fetch, the file to write, and how large that may be."""

    request: SliceRequest
    output: Path
    most_bytes: int


class FetchNews(WireRecord):
    """How far it is, as in ``SliceRecord``; the last one tells that it is done, or why not."""

    file_bytes: int | None = None
    received_bytes: int = 0
    transferred_bytes: int = 0
    is_done: bool = False
    error: str | None = None


class _Reporter:
    """Counts what was written, from any thread, and prints news now and then while it is open."""

    def __init__(self, files: ModelFiles, file_bytes: int, header_bytes: int) -> None:
        self._files = files
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
            transferred_bytes=sum(source.bytes_read for source in self._files.sources),
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
    wanted = config.request
    with open_whole_model(wanted.url) as files:
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
        if job.file_bytes > config.most_bytes:
            raise LinkcppError(
                f"The slice takes {format_bytes(job.file_bytes)}, but the node has "
                f"{format_bytes(config.most_bytes)} left for slices.",
                hint="Delete slices there, raise the owner's limit (`linkcpp node --slices`), or "
                "ask for fewer experts.",
            )
        with _Reporter(files, job.file_bytes, len(job.header)) as reporter:
            write_slice(files, segments, config.output, reporter.add)
        _print(reporter.news().model_copy(update={"is_done": True}))


def _print(news: FetchNews) -> None:
    print(news.model_dump_json(exclude_none=True), flush=True)


def main(arguments: list[str]) -> int:
    """Run with the configuration in a file."""
    try:
        fetch(FetchConfig.model_validate_json(Path(arguments[0]).read_bytes()))
    except LinkcppError as error:
        _print(FetchNews(error=str(error)))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
