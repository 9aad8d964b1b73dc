"""The part of a node's agent that direct paths need: one WebSocket route."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from linkcpp.common.http_server import make_server
from linkcpp.common.sockets import listen
from linkcpp.link.acceptor import LinkAcceptor
from linkcpp.link.transport import AcceptedTransport
from linkcpp.registry.relay import DIRECT_PATH


@contextlib.asynccontextmanager
async def direct_route(acceptor: LinkAcceptor) -> AsyncIterator[int]:
    """Serve the route as the agent does; return its port."""

    async def accept(websocket: WebSocket) -> None:
        await websocket.accept()
        await acceptor.accept_direct(AcceptedTransport(websocket))

    app = Starlette(routes=[WebSocketRoute(DIRECT_PATH, accept)])
    sockets = listen("127.0.0.1", 0)
    server = make_server(
        app, max_message_bytes=2**20, ping_interval_seconds=5.0, ping_timeout_seconds=30.0
    )
    serving = asyncio.create_task(server.serve(sockets=sockets))
    try:
        yield sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await serving
        for opened in sockets:
            opened.close()
