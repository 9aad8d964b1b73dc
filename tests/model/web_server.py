"""A small web server that serves ranges of what a test puts on it, well or badly."""

import http.server
import re
import threading
from collections.abc import Callable
from typing import Any

Answer = Callable[["Handler", bytes], None]


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves ranges of the files that a test put on the server."""

    server: "Server"
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        name = self.path.partition("?")[0]
        with self.server.counting:
            self.server.seen.append((self.path, dict(self.headers)))
            self.server.busy += 1
            self.server.most_busy = max(self.server.most_busy, self.server.busy)
        try:
            self.answer(name)
        finally:
            with self.server.counting:
                self.server.busy -= 1

    def answer(self, name: str) -> None:
        if answer := self.server.answers.get(name):
            answer(self, self.server.files.get(name, b""))
        elif name in self.server.files:
            send_range(self, self.server.files[name])
        else:
            send(self, 404, b"no such file")

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class Server(http.server.ThreadingHTTPServer):
    """``sent_bytes`` counts bodies; ``most_busy`` is the most requests that ran at one time."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.answers: dict[str, Answer] = {}
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.sent_bytes = 0
        self.busy = self.most_busy = 0
        self.counting = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that hang up: some tests make them."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


def send(handler: Handler, status: int, body: bytes, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
    with handler.server.counting:
        handler.server.sent_bytes += len(body)


def asked_range(handler: Handler) -> tuple[int, int]:
    match = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers["Range"])
    assert match
    return int(match[1]), int(match[2])


def send_range(handler: Handler, data: bytes) -> None:
    first, last = asked_range(handler)
    if first >= len(data):
        send(handler, 416, b"")
        return
    body = data[first : last + 1]
    send(handler, 206, body, Content_Range=f"bytes {first}-{first + len(body) - 1}/{len(data)}")
