"""One request and its answer on their way through the front."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import httpx
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from linkcpp.common.network_errors import in_words
from linkcpp.front.api_keys import KEY_HEADERS
from linkcpp.front.gate import InFlightRequest
from linkcpp.front.openai_errors import ApiError
from linkcpp.front.upstream import STALL_SECONDS, Headers, Upstream

# Of one hop each (RFC 9110, section 7.6.1).
_OWN_HEADERS = frozenset(
    {
        b"connection",
        b"expect",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_EVENT_END = b"\n\n"
_STOPPED = ApiError(503, "The deployment was stopped.")


class ProxiedRequest:
    """One request; ``run`` returns when its answer was sent, or the client or all hope is gone.

    ``with_key``: the caller may have what llama-server gives only to those who show its key.
    ``stopping`` ends it with an error.
    """

    def __init__(
        self,
        upstream: Upstream,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        with_key: bool,
        stopping: asyncio.Event,
    ) -> None:
        self._upstream = upstream
        self._with_key = with_key
        self._stopping = stopping
        self._scope = scope
        self._receive = receive
        self._send = send
        self._body_was_read = asyncio.Event()
        self._has_begun = False
        self._is_events = False
        self._names_events = False
        self._in_flight: InFlightRequest | None = None
        self.has_failed = False

    async def run(self, in_flight: InFlightRequest | None = None) -> None:
        """Carry the request there and the answer back. A failure stops it; see ``has_failed``."""
        self._in_flight = in_flight
        tasks = {
            asyncio.create_task(self._client_gone()),
            asyncio.create_task(_true(self._stopping.wait())),
        }
        if in_flight is not None:
            tasks.add(asyncio.create_task(_true(in_flight.failure_seen.wait())))
        carrying = asyncio.create_task(self._carry())
        try:
            await asyncio.wait({carrying, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            is_carried = carrying.done()
        finally:
            for task in (carrying, *tasks):
                task.cancel()
            results = await asyncio.gather(carrying, *tasks, return_exceptions=True)
        self.has_failed |= in_flight is not None and in_flight.failure_seen.is_set()
        if isinstance(results[0], Exception) and not self.has_failed:
            raise results[0]
        if self._stopping.is_set() and not (is_carried or self.has_failed):
            await self.refuse(_STOPPED)

    async def refuse(self, error: ApiError) -> None:
        """Answer with an error: by its status, or as an event where the answer has begun."""
        self._scope["state"]["problem"] = error.message
        if not self._has_begun:
            headers = {"Retry-After": "5"} if error.status == 503 else {}
            answer = JSONResponse(error.body(), error.status, headers)
            await answer(self._scope, self._receive, self._send)
        elif self._is_events:
            named = {"type": "error"} if self._names_events else {}
            data = f"data: {json.dumps({**named, **error.body()})}".encode()
            await self._put((b"event: error\n" if named else b"") + data + _EVENT_END)
            await self._put(b"", more=False)
        # Of any other answer that has begun the end is left out, which tells the client enough.

    async def _carry(self) -> None:
        try:
            answer = await self._upstream.send(
                self._scope["method"],
                self._target(),
                self._headers(),
                self._body(),
                with_key=self._with_key,
            )
        except httpx.InvalidURL:
            await self.refuse(ApiError(400, "The request's target is not a path of this server."))
            return
        except httpx.ConnectError:
            await self.refuse(ApiError(503, "The model is not served right now: it is loading."))
            return
        except httpx.HTTPError as error:
            await self.refuse(ApiError(502, f"The model stopped answering: {in_words(error)}."))
            return
        try:
            await self._return(answer)
        finally:
            with contextlib.suppress(httpx.HTTPError):
                await answer.aclose()

    async def _return(self, answer: httpx.Response) -> None:
        kind = answer.headers.get("content-type", "")
        self._is_events = kind.startswith("text/event-stream")
        # Whatever is not a stream of events was computed to its end before its head came.
        if self._stop_if_failed():
            return
        headers = [(k, v) for k, v in answer.headers.raw if k.lower() not in _OWN_HEADERS]
        self._has_begun = True
        await self._send(
            {"type": "http.response.start", "status": answer.status_code, "headers": headers}
        )
        try:
            async for data in _whole_events(answer) if self._is_events else answer.aiter_raw():
                self._names_events |= self._is_events and data.startswith(b"event:")
                if self._stop_if_failed():
                    return
                await self._put(data)
        except httpx.HTTPError as error:
            if self._is_events:
                await self.refuse(ApiError(502, f"The answer broke off: {in_words(error)}."))
            return
        if not self._stop_if_failed():
            await self._put(b"", more=False)

    def _stop_if_failed(self) -> bool:
        self.has_failed |= self._in_flight is not None and self._in_flight.has_failed
        return self.has_failed

    async def _put(self, data: bytes, *, more: bool = True) -> None:
        async with asyncio.timeout(STALL_SECONDS):
            await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def _target(self) -> bytes:
        target: bytes = self._scope["raw_path"] or b"/"
        query: bytes = self._scope["query_string"]
        return target + b"?" + query if query else target

    def _headers(self) -> Headers:
        headers: Headers = [(k.lower(), v) for k, v in self._scope["headers"]]
        dropped = _OWN_HEADERS | KEY_HEADERS
        if any(name == b"transfer-encoding" for name, _ in headers):
            dropped |= {b"content-length"}  # which then says nothing (RFC 9112, section 6.3)
        return [(name, value) for name, value in headers if name not in dropped]

    def _body(self) -> AsyncIterator[bytes] | None:
        names = {name.lower() for name, _ in self._scope["headers"]}
        if names & {b"content-length", b"transfer-encoding"}:
            return self._read_body()
        self._body_was_read.set()
        return None

    async def _read_body(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            async with asyncio.timeout(STALL_SECONDS):
                message = await self._receive()
            if message["type"] == "http.disconnect":
                raise httpx.WriteError("the client went away")
            more = message.get("more_body", False)
            if data := message.get("body", b""):
                yield data
        self._body_was_read.set()

    async def _client_gone(self) -> bool:
        # While the body comes, whoever reads it notices.
        await self._body_was_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        return True


async def _whole_events(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Yield an answer in pieces that end with an event, so that an error may follow each."""
    rest = b""
    async for data in answer.aiter_raw():
        events, end, rest = (rest + data).rpartition(_EVENT_END)
        if end:
            yield events + end
    if rest:
        yield rest


async def _true(waiting: Coroutine[Any, Any, Any]) -> bool:
    await waiting
    return True
