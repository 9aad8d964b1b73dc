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
    it says by ``let_in`` that the peer has shown who it is. Where there are too many, the oldest
    that has not goes for a new one, or ``refuse`` answers that, without waiting for it. Both leave
    the closing to the server.
    """

    def __init__(
        self, serve_peer: Serve, max_connections: int, refuse: Serve | None = None
    ) -> None:
        self._serve_peer = serve_peer
        self._max_connections = max_connections
        self._refuse = refuse
        self._peers: set[socket.socket] = set()
        # In the order in which they came.
        self._strangers: dict[socket.socket, None] = {}
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
            if not self._admit(peer):
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

    def let_in(self, peer: socket.socket) -> None:
        """Keep a peer until it leaves; from its own thread."""
        with self._lock:
            self._strangers.pop(peer, None)

    def _admit(self, peer: socket.socket) -> bool:
        with self._lock:
            if len(self._peers) >= self._max_connections:
                if not self._strangers:
                    return False
                oldest = next(iter(self._strangers))
                self._forget(oldest)
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._peers.add(peer)
            self._strangers[peer] = None
            return True

    def _forget(self, peer: socket.socket) -> None:
        self._peers.discard(peer)
        self._strangers.pop(peer, None)

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
            _log.exception("a connection ended by an internal error")
        finally:
            with self._lock:
                self._forget(peer)
            peer.close()
