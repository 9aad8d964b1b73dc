"""HTTP over the streams of a link, for httpx."""

import asyncio
import ssl
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx

from linkcpp.link.endpoint import LinkEndpoint

_MAX_CONNECTIONS = 32
# Less than a server keeps an idle connection, so that both do not decide at the same moment.
_KEPT_SECONDS = 5.0


def link_transport(link: LinkEndpoint, target: str) -> httpx.AsyncHTTPTransport:
    """Make what carries httpx's requests to ``target``, whatever host their URLs name."""
    transport = httpx.AsyncHTTPTransport()
    # httpx lets nobody choose how httpcore connects; all else of its transport is wanted.
    transport._pool = httpcore.AsyncConnectionPool(
        max_connections=_MAX_CONNECTIONS,
        keepalive_expiry=_KEPT_SECONDS,
        network_backend=_LinkBackend(link, target),
    )
    return transport


class _LinkBackend(httpcore.AsyncNetworkBackend):
    def __init__(self, link: LinkEndpoint, target: str) -> None:
        self._link = link
        self._target = target

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            return _LinkStream(*self._link.connect(self._target))
        except ConnectionError as error:
            raise httpcore.ConnectError(str(error)) from error

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _LinkStream(httpcore.AsyncNetworkStream):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        try:
            async with asyncio.timeout(timeout):
                return await self._reader.read(max_bytes)
        except TimeoutError as error:
            raise httpcore.ReadTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.ReadError(str(error)) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        try:
            self._writer.write(buffer)
            async with asyncio.timeout(timeout):
                await self._writer.drain()
        except TimeoutError as error:
            raise httpcore.WriteTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.WriteError(str(error)) from error

    async def aclose(self) -> None:
        self._writer.close()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's
    ) -> httpcore.AsyncNetworkStream:
        raise httpcore.ConnectError("a link is encrypted already")

    def get_extra_info(self, info: str) -> Any:
        # httpcore asks before it uses a kept connection again.
        is_over = self._reader.at_eof() or self._writer.is_closing()
        return is_over if info == "is_readable" else None
