"""This machine's token for a hub, for code that blocks: programs and threads that fetch."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from linkcpp.registry.client import HubClient, joined_client
from linkcpp.registry.connection import HubUnreachableError
from linkcpp.registry.hub_model import HubAccess


@contextmanager
def hub_access(url: str) -> Iterator[HubAccess]:
    """Give access to a hub's weights from any threads, with tokens that are renewed in time.

    Raises:
        LinkcppError: this machine did not join the hub.
    """
    client = joined_client(url)
    tokens = _BlockingTokens(client)
    try:
        yield HubAccess(client.url, tokens.token)
    finally:
        tokens.close()


class _BlockingTokens:
    """Runs the client in an event loop of its own, in whichever thread asks; one at a time."""

    def __init__(self, client: HubClient) -> None:
        self._client = client
        self._runner = asyncio.Runner()
        self._lock = threading.Lock()
        self._last: str | None = None

    def token(self) -> str:
        with self._lock:
            try:
                self._last = self._runner.run(self._client.token())
            except HubUnreachableError:
                # It is renewed early, so the last one may do until the hub is back.
                if self._last is None:
                    raise
            return self._last

    def close(self) -> None:
        with self._lock, contextlib.closing(self._runner):
            self._runner.run(self._client.aclose())
