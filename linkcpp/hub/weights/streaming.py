"""Sending weights: whole or a range, piece by piece, as fast as the caller takes them.

A download counts from before its content is planned: a plan takes memory and time too, and a
machine that is revoked meanwhile is sent nothing.

A piece is read when the one before it was taken, so memory does not grow with the file or with a
slow caller. A file that is not the one that was hashed any more is not sent.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from linkcpp.common.text import printable
from linkcpp.hub.errors import ApiError, revoked
from linkcpp.hub.weights.byte_ranges import asked_range, is_known
from linkcpp.hub.weights.catalogue import LocalFile
from linkcpp.hub.weights.layout import Extent
from linkcpp.hub.weights.library import Content
from linkcpp.model.source import FileSource

# Twice this is held for each download; smaller pieces cost more processor time a byte.
PIECE_BYTES: Final = 512 * 2**10
# A caller that takes no piece for so long is left.
STALL_SECONDS: Final = 60.0
RETRY_AFTER_SECONDS: Final = 2
# Disks are read by few threads: more would only make its head jump.
_READERS: Final = 4

_R = TypeVar("_R")

_log = logging.getLogger(__name__)


class OpenFiles:
    """The files of a content, held to be those that were hashed. Its methods block."""

    def __init__(self, files: tuple[LocalFile, ...], needed: set[int]) -> None:
        self._files = files
        self._descriptors: dict[int, int] = {}
        try:
            for number in needed:
                self._descriptors[number] = _open(files[number])
                self._check(number)
        except BaseException:
            self.close()
            raise

    def read(self, piece: list[Extent]) -> bytes:
        """Read the bytes of a piece.

        Raises:
            ApiError: a file was changed, or cannot be read.
        """
        parts = []
        for extent in piece:
            if extent.file is None:
                parts.append(extent.content or bytes(extent.size_bytes))
                continue
            try:
                part = os.pread(
                    self._descriptors[extent.file], extent.size_bytes, extent.offset_bytes
                )
            except OSError as error:
                raise _changed(error) from error
            if len(part) != extent.size_bytes:
                raise _changed()
            parts.append(part)
        # Looked at after the reading: what was read before a change is as it was hashed.
        for number in {extent.file for extent in piece if extent.file is not None}:
            self._check(number)
        return b"".join(parts)

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}

    def _check(self, number: int) -> None:
        status = os.fstat(self._descriptors[number])
        if FileSource.version_of(status) != self._files[number].version:
            raise _changed()


def _open(file: LocalFile) -> int:
    try:
        return os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _changed(error) from error


def _changed(error: OSError | None = None) -> ApiError:
    if error is not None:
        _log.error("a model's file cannot be read: %s", error)
    return ApiError(
        409,
        "model_changed",
        "The model's file on the hub's disk is gone, or is not the one that was added.",
        hint="The hub's owner can `linkcpp hub models remove` it and add it again.",
    )


class Download:
    """One download of a machine; ``ended`` is set when the machine was revoked."""

    def __init__(self, machine: str) -> None:
        self.machine = machine
        self.ended = asyncio.Event()


class Downloads:
    """How many downloads run, for whom, and how much they sent; ends those of one machine."""

    def __init__(self, *, most: int = 64, max_per_machine: int = 8) -> None:
        self._most = most
        self._max_per_machine = max_per_machine
        self._running: set[Download] = set()
        self._reader = ThreadPoolExecutor(_READERS, thread_name_prefix="weights")
        self.sent_bytes = 0

    @property
    def running_count(self) -> int:
        """Downloads that run now."""
        return len(self._running)

    def end_all_of(self, machine: str) -> None:
        """End the downloads of a machine that was revoked."""
        for download in self._of(machine):
            download.ended.set()

    def close(self) -> None:
        """Give back the threads."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    async def read(self, call: Callable[[], _R]) -> _R:
        """Have a thread read from the disk."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, call)

    @contextmanager
    def running(self, machine: str) -> Iterator[Download | None]:
        """Count a download while the block runs; ``None`` where too many run already."""
        is_full = len(self._running) >= self._most
        if is_full or len(self._of(machine)) >= self._max_per_machine:
            yield None
            return
        download = Download(machine)
        self._running.add(download)
        try:
            yield download
        finally:
            self._running.discard(download)

    def _of(self, machine: str) -> list[Download]:
        return [download for download in self._running if download.machine == machine]


class DownloadResponse(Response):
    """Plans a content and answers with it, a range of it, or why not."""

    def __init__(
        self, plan: Callable[[], Content], request: Request, downloads: Downloads, machine: str
    ) -> None:
        self._plan = plan
        self._request = request
        self._downloads = downloads
        self._machine = machine
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Plan it and send it, unless too many downloads run.

        Raises:
            ApiError: nothing was sent: there is no such content, or the machine was revoked.
        """
        with self._downloads.running(self._machine) as download:
            if download is None:
                await _busy(scope, receive, send)
                return
            content = await asyncio.to_thread(self._plan)
            if download.ended.is_set():
                raise revoked()
            response = _answer(content, self._request, self._downloads, download)
            await response(scope, receive, send)


def _answer(
    content: Content, request: Request, downloads: Downloads, download: Download
) -> Response:
    """Answer a request with a content, a range of it, or why not."""
    size = content.layout.size_bytes
    headers = {"Accept-Ranges": "bytes", "ETag": content.etag, "Cache-Control": "no-cache"}
    if content.encoding is not None:
        headers |= {"Content-Encoding": content.encoding, "Vary": "Accept-Encoding"}
    if is_known(request.headers.get("If-None-Match"), content.etag):
        return Response(status_code=304, headers=headers)
    asked = asked_range(
        request.headers.get("Range"), request.headers.get("If-Range"), content.etag, size
    )
    start, end = asked if asked is not None else (0, size)
    if start is None or end is None:
        error = ApiError(416, "no_such_range", f"There are bytes 0 to {size - 1}.")
        headers = {"Content-Range": f"bytes */{size}"}
        return JSONResponse(error.body().model_dump(), 416, headers)
    if asked is not None:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    return ContentResponse(
        content,
        (start, end),
        headers,
        downloads=downloads,
        download=download,
        is_head=request.method == "HEAD",
    )


class ContentResponse(Response):
    """Sends a range of a content."""

    def __init__(
        self,
        content: Content,
        part: tuple[int, int],
        headers: dict[str, str],
        *,
        downloads: Downloads,
        download: Download,
        is_head: bool,
    ) -> None:
        self._content = content
        self._downloads = downloads
        self._download = download
        self._start, self._end = part
        self._is_head = is_head
        self.status_code = 206 if "Content-Range" in headers else 200
        self.media_type = content.media_type
        self.background = None
        self.body = b""
        self.init_headers({**headers, "Content-Length": str(self._end - self._start)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, until the machine is revoked.

        Raises:
            ApiError: nothing was sent: a file was changed.
        """
        needed = self._content.layout.files(self._start, self._end)
        files = await self._downloads.read(lambda: OpenFiles(self._content.files, needed))
        try:
            ended = self._download.ended.wait()
            await _first_of(self._send(files, send), _left(receive), ended)
        finally:
            files.close()

    async def _send(self, files: OpenFiles, send: Send) -> None:
        start: Message = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        await send(start)
        end = self._start if self._is_head else self._end
        for piece in self._content.layout.pieces(self._start, end, PIECE_BYTES):
            try:
                body = await self._downloads.read(partial(files.read, piece))
            except ApiError as error:
                # The caller sees an answer that ends too early, and no wrong byte.
                _log.error("a download was broken off: %s", printable(str(error), 500))
                return
            try:
                async with asyncio.timeout(STALL_SECONDS):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            except TimeoutError:
                _log.warning("%s takes no more of its download and is left", self._download.machine)
                return
            self._downloads.sent_bytes += len(body)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _first_of(*calls: Coroutine[Any, Any, object]) -> None:
    """Wait until one of them is done, and end the others."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _busy(scope: Scope, receive: Receive, send: Send) -> None:
    error = ApiError(
        503,
        "too_many_downloads",
        "The hub sends as many downloads now as it takes on.",
        hint=f"Try again in {RETRY_AFTER_SECONDS} s.",
    )
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
    await JSONResponse(error.body().model_dump(), 503, headers)(scope, receive, send)
