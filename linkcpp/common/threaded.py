"""A service with a thread for each connection, for few peers and short ways."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

Serve = Callable[[socket.socket], None]


class ThreadedServer:
    """Accepts connections until ``stop``, at most so many at once.

    ``serve_peer`` runs in the connection's thread and may end by an ``OSError`` or ``EOFError``;
    ``refuse`` answers those that are too many, without waiting for them. Both leave the closing to
    the server.
    """

    def __init__(self, serve_peer: Serve, most: int, refuse: Serve | None = None) -> None:
        self._serve_peer = serve_peer
        self._most = most
        self._refuse = refuse
        self._peers: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._is_stopping = False
        self.accepted_count = 0

    def serve(self, listener: socket.socket) -> None:
        """Accept until ``stop``."""
        self._listener = listener
        listener.setblocking(True)
        while not self._is_stopping:
            try:
                peer, _ = listener.accept()
            except OSError:
                if self._is_stopping:
                    break
                # Out of descriptors, for instance: the next moment may be better.
                time.sleep(0.05)
                continue
            with self._lock:
                is_full = len(self._peers) >= self._most
                if not is_full:
                    self._peers.add(peer)
            if is_full:
                self._turn_away(peer)
                continue
            self.accepted_count += 1
            threading.Thread(target=self._run, args=(peer,), daemon=True).start()

    def stop(self) -> None:
        """End every connection and the service; from any thread, and more than once."""
        self._is_stopping = True
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def _turn_away(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError):
            peer.setblocking(False)
            if self._refuse is not None:
                self._refuse(peer)
        peer.close()

    def _run(self, peer: socket.socket) -> None:
        try:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._serve_peer(peer)
        except (OSError, EOFError):
            pass
        except Exception:
            _log.exception("a connection ended by a defect")
        finally:
            with self._lock:
                self._peers.discard(peer)
            peer.close()
