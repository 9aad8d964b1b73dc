"""The HTTP client under everything that reads models from the web: deadlines that hold."""

import contextlib
import socket
import ssl
import threading
import weakref
from typing import Any

import httpx

from linkcpp.common.proxies import ProxiedTransport

MAXIMUM_REDIRECTS = 5
TIMEOUT = httpx.Timeout(30.0, connect=10.0)
# For the head of an answer, redirects included, which no other limit covers.
HEAD_SECONDS = 60.0


class _PunctualClient(httpx.Client):
    """Hangs up where the head of an answer is not there in time, though bytes of it keep coming.

    httpx limits each wait for bytes only. When time is up, the sockets that this client opened are
    shut down, which wakes the thread that reads from them.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(timeout=TIMEOUT, **options)
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._noting = threading.Lock()

    def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        """Send a request; see ``httpx.Client.send``. With ``stream`` this ends with the head."""
        request.extensions = {**request.extensions, "trace": self._note_socket}
        is_late = threading.Event()
        timer = threading.Timer(HEAD_SECONDS, self._hang_up, (is_late,))
        timer.daemon = True
        timer.start()
        try:
            return super().send(request, **options)
        except httpx.RequestError:
            if is_late.is_set():
                raise httpx.ReadTimeout("", request=request) from None
            raise
        finally:
            timer.cancel()

    def _note_socket(self, _: str, info: dict[str, Any]) -> None:
        # Of a connection, and again of TLS over it, the return value is a stream with a socket.
        ask = getattr(info.get("return_value"), "get_extra_info", None)
        opened = ask("socket") if ask else None
        if isinstance(opened, socket.socket):
            with self._noting:
                self._sockets.add(opened)

    def _hang_up(self, is_late: threading.Event) -> None:
        is_late.set()
        with self._noting:
            opened = list(self._sockets)
        for each in opened:
            with contextlib.suppress(OSError):
                # Not that of a TLS socket, which would take its state from under the reader.
                socket.socket.shutdown(each, socket.SHUT_RDWR)


def new_client() -> httpx.Client:
    """A client that keeps connections, follows a few redirects and gives up in time."""
    return _PunctualClient(
        transport=ProxiedTransport(), follow_redirects=True, max_redirects=MAXIMUM_REDIRECTS
    )


def new_direct_client(tls: ssl.SSLContext) -> httpx.Client:
    """A client for one host: no redirects, and no secrets of the environment."""
    return _PunctualClient(transport=ProxiedTransport(tls), trust_env=False)
