"""Connections of the front to llama-server."""

from collections.abc import AsyncIterator

import httpx

from linkcpp.engine.rpc_server import LOOPBACK

# A peer that neither takes nor gives anything for so long is cut off; llama-server has the same.
STALL_SECONDS = 600.0
_CONNECT_SECONDS = 5.0
Headers = list[tuple[bytes, bytes]]


class Upstream:
    """Connections to llama-server, a fresh one a request: it closes idle ones when it likes.

    ``key`` is llama-server's own, which only this machine's owner can read.
    """

    def __init__(self, port: int, key: str) -> None:
        self._authorization = {"Authorization": f"Bearer {key}"}
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS, write=STALL_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )
        self._base = httpx.URL(f"http://{LOOPBACK}:{port}")

    async def send(
        self,
        method: str,
        target: bytes,
        headers: Headers,
        body: AsyncIterator[bytes] | None,
        *,
        with_key: bool,
    ) -> httpx.Response:
        """Send a request; the answer's body is still to be read.

        Without the key llama-server serves only what it shows to everybody.

        Raises:
            httpx.HTTPError: llama-server cannot be reached, or breaks off.
        """
        url = self._base.copy_with(raw_path=target)
        request = httpx.Request(method, url, headers=headers, content=body)
        if with_key:
            request.headers.update(self._authorization)
        return await self._client.send(request, stream=True)

    async def post(self, target: str, *, timeout_seconds: float) -> httpx.Response:
        """Make a call of the front's own; raises as ``send``."""
        url = self._base.copy_with(raw_path=target.encode())
        return await self._client.post(
            url, json={}, headers=self._authorization, timeout=timeout_seconds
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()
