"""Sending weights: whole or a range, piece by piece, as fast as the caller takes them.

A piece is read when the one before it was taken, so memory does not grow with the file or with a
slow caller. A file that is not the one that was hashed any more is not sent.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from linkcpp.common.text import printable
from linkcpp.hub.problems import HubProblem
from linkcpp.hub.weights.byte_ranges import asked_range, is_known
from linkcpp.hub.weights.catalogue import LocalFile
from linkcpp.hub.weights.layout import Extent
from linkcpp.hub.weights.library import Content
from linkcpp.model.source import FileSource

PIECE_BYTES: Final = 256 * 2**10
# A caller that takes no piece for so long is left.
STALL_SECONDS: Final = 60.0
RETRY_AFTER_SECONDS: Final = 2
# Disks are read by few threads: more would only make its head jump.
_READERS: Final = 4

_R = TypeVar("_R")

_log = logging.getLogger(__name__)


class Downloads:
    """How many downloads run, for whom, and how much they sent; ends those of one machine."""

    def __init__(self, *, most: int = 64, most_per_machine: int = 8) -> None:
        self._most = most
        self._most_per_machine = most_per_machine
        self._running: Counter[str] = Counter()
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}
        self.sent_bytes = 0
        self.refused_count = 0
        self._reader = ThreadPoolExecutor(_READERS, thread_name_prefix="weights")

    @property
    def running_count(self) -> int:
        """Downloads that run now."""
        return self._running.total()

    def end_all_of(self, machine: str) -> None:
        """End the downloads of a machine that was revoked."""
        for task in self._tasks.get(machine, ()):
            task.cancel()

    def close(self) -> None:
        """Give back the threads."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    async def read(self, call: Callable[[], _R]) -> _R:
        """Have a thread read from the disk."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, call)

    def take(self, machine: str) -> bool:
        """Begin one, unless too many run."""
        is_full = self.running_count >= self._most
        if is_full or self._running[machine] >= self._most_per_machine:
            self.refused_count += 1
            return False
        self._running[machine] += 1
        return True

    def give_back(self, machine: str) -> None:
        """End one that was taken."""
        self._running[machine] -= 1
        if not self._running[machine]:
            del self._running[machine]

    @asynccontextmanager
    async def ended_with(self, machine: str, task: asyncio.Task[None]) -> AsyncIterator[None]:
        """Have a task ended when its machine is revoked."""
        tasks = self._tasks.setdefault(machine, set())
        tasks.add(task)
        try:
            yield
        finally:
            tasks.discard(task)
            if not tasks:
                self._tasks.pop(machine, None)


def answer(content: Content, request: Request, downloads: Downloads, machine: str) -> Response:
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
        problem = HubProblem(416, "no_such_range", f"There are bytes 0 to {size - 1}.")
        headers = {"Content-Range": f"bytes */{size}"}
        return JSONResponse(problem.body().model_dump(), 416, headers)
    if asked is not None:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    return ContentResponse(
        content,
        (start, end),
        headers,
        downloads=downloads,
        machine=machine,
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
        machine: str,
        is_head: bool,
    ) -> None:
        self._content = content
        self._downloads = downloads
        self._machine = machine
        self._start, self._end = part
        self._is_head = is_head
        self.status_code = 206 if "Content-Range" in headers else 200
        self.media_type = content.media_type
        self.background = None
        self.body = b""
        self.init_headers({**headers, "Content-Length": str(self._end - self._start)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, unless too many downloads run."""
        if not self._downloads.take(self._machine):
            await _busy(scope, receive, send)
            return
        try:
            needed = self._content.layout.files(self._start, self._end)
            files = await self._downloads.read(lambda: _OpenFiles(self._content.files, needed))
        except HubProblem as problem:
            self._downloads.give_back(self._machine)
            await JSONResponse(problem.body().model_dump(), problem.status)(scope, receive, send)
            return
        except BaseException:
            self._downloads.give_back(self._machine)
            raise
        try:
            await self._send_while_heard(files, receive, send)
        finally:
            files.close()
            self._downloads.give_back(self._machine)

    async def _send_while_heard(self, files: "_OpenFiles", receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(files, send))
        leaving = asyncio.create_task(_left(receive))
        async with self._downloads.ended_with(self._machine, sending):
            try:
                await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (sending, leaving):
                    task.cancel()
                with suppress(asyncio.CancelledError):
                    await leaving
                with suppress(asyncio.CancelledError):
                    await sending

    async def _send(self, files: "_OpenFiles", send: Send) -> None:
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
            except HubProblem as problem:
                # The caller sees an answer that ends too early, and no wrong byte.
                _log.error("a download was broken off: %s", printable(str(problem), 500))
                return
            try:
                async with asyncio.timeout(STALL_SECONDS):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            except TimeoutError:
                _log.warning("%s takes no more of its download and is left", self._machine)
                return
            self._downloads.sent_bytes += len(body)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _OpenFiles:
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
            HubProblem: a file was changed, or cannot be read.
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


def _changed(error: OSError | None = None) -> HubProblem:
    if error is not None:
        _log.error("a model's file cannot be read: %s", error)
    return HubProblem(
        409,
        "model_changed",
        "The model's file on the hub's disk is gone, or is not the one that was added.",
        hint="The hub's owner can `linkcpp hub models remove` it and add it again.",
    )


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _busy(scope: Scope, receive: Receive, send: Send) -> None:
    problem = HubProblem(
        503,
        "too_many_downloads",
        "The hub sends as many downloads now as it takes on.",
        hint=f"Try again in {RETRY_AFTER_SECONDS} s.",
    )
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
    await JSONResponse(problem.body().model_dump(), 503, headers)(scope, receive, send)
