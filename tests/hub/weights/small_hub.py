"""A small hub for tests of its weights: the routes, tokens without signatures, counted bytes."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from linkcpp.common.access import refuse
from linkcpp.common.http_server import make_server
from linkcpp.common.records import ErrorBody
from linkcpp.hub.errors import ApiError
from linkcpp.hub.roles import Caller, check_routes
from linkcpp.hub.weights.adding import Addition, add_model
from linkcpp.hub.weights.catalogue import Catalogue, Entry
from linkcpp.hub.weights.library import Library
from linkcpp.hub.weights.routes import add_weight_routes
from linkcpp.hub.weights.streaming import Downloads
from linkcpp.registry.hub_model import HubAccess
from linkcpp.registry.records import Role

TOKENS = {
    "node-token": Caller("node", Role.NODE),
    "backbone-token": Caller("backbone", Role.BACKBONE),
    "gateway-token": Caller("gateway", Role.GATEWAY),
}


@contextlib.contextmanager
def no_bar(step: str, total_bytes: int) -> Iterator[object]:
    yield lambda done_bytes: None


def add(folder: Path, location: Path | str, name: str = "m", *, copies: bool = False) -> Entry:
    """Add a model to the catalogue in ``folder``."""
    wanted = Addition(str(location), name, copies, unix_time=1.8e9)
    return add_model(Catalogue(folder), wanted, no_bar)  # type: ignore[arg-type]


class SmallHub:
    """A running hub; ``sent`` has (path, bytes of the body) of every answer.

    ``request_ids`` has the ids that its callers sent.
    """

    def __init__(self, folder: Path, port: int = 0, **limits: int) -> None:
        self.downloads = Downloads(**limits)
        self.tokens = dict(TOKENS)
        self.sent: list[tuple[str, int]] = []
        self.request_ids: set[bytes | None] = set()
        self.damage: dict[str, int] = {}
        self.go_on = threading.Event()
        self._pauses: dict[str, int] = {}
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        add_weight_routes(app, Library(Catalogue(folder)), self.downloads)
        check_routes(app.routes)

        @app.exception_handler(ApiError)
        async def on_api_error(_: Request, error: ApiError) -> JSONResponse:
            return JSONResponse(error.body().model_dump(), error.status)

        options = {"max_message_bytes": 1, "ping_interval_seconds": 9, "ping_timeout_seconds": 9}
        self._server = make_server(self._counted(app), **options)  # type: ignore[arg-type]
        self._socket = socket.create_server(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "SmallHub":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()
        self._server.should_exit = True
        self._thread.join()
        self.downloads.close()

    @property
    def sent_bytes(self) -> int:
        return sum(size for _, size in self.sent)

    def pause_after(self, kind: str, size_bytes: int) -> None:
        """Stop sending of a kind after so many bytes, until ``go_on`` is set."""
        self._pauses[kind] = size_bytes

    def access(self, token: str = "node-token") -> HubAccess:  # noqa: S107
        return HubAccess(self.url, lambda: token)

    def call_in_loop(self, call: object, *arguments: object) -> None:
        self._loop.call_soon_threadsafe(call, *arguments)  # type: ignore[arg-type]

    def _run(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await self._server.serve(sockets=[self._socket])

        asyncio.run(serve())

    def _counted(self, app: ASGIApp) -> ASGIApp:
        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            token = dict(scope["headers"]).get(b"authorization", b"").decode()
            caller = self.tokens.get(token.removeprefix("Bearer "))
            if caller is None:
                body = ErrorBody(code="no_token", message="This call needs a token.")
                await refuse(scope, send, 401, body)
                return
            scope["state"] = {"caller": caller}
            self.request_ids.add(dict(scope["headers"]).get(b"x-request-id"))
            path = scope["path"].rpartition("/")[2]

            async def count(message: Message) -> None:
                if message["type"] == "http.response.body":
                    message = {**message, "body": self._damaged(path, message.get("body", b""))}
                    self.sent.append((path, len(message["body"])))
                    while self._is_paused(path):  # noqa: ASYNC110 - set by another thread
                        await asyncio.sleep(0.01)
                await send(message)

            await app(scope, receive, count)

        return counted

    def _is_paused(self, kind: str) -> bool:
        most = self._pauses.get(kind)
        if most is None or self.go_on.is_set():
            return False
        return sum(size for path, size in self.sent if path == kind) > most

    def _damaged(self, path: str, body: bytes) -> bytes:
        """Turn over a bit of as many answers as ``damage`` says for what they are about."""
        if not body or not self.damage.get(path):
            return body
        self.damage[path] -= 1
        return bytes([body[0] ^ 1]) + body[1:]
