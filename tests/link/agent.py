"""The part of a node's agent that direct paths need: the address of links."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette

from linkcpp.common.http_server import make_server, upgrading_protocol
from linkcpp.common.sockets import listen
from linkcpp.link.acceptor import LinkAcceptor
from linkcpp.registry.relay import DIRECT_PATH


@contextlib.asynccontextmanager
async def direct_route(acceptor: LinkAcceptor) -> AsyncIterator[int]:
    """Serve the route as the agent does; return its port."""
    sockets = listen("127.0.0.1", 0)
    server = make_server(
        Starlette(),
        http=upgrading_protocol(lambda path: acceptor.take if path == DIRECT_PATH else None),
        max_message_bytes=1024,
    )
    serving = asyncio.create_task(server.serve(sockets=sockets))
    try:
        yield sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await serving
        for opened in sockets:
            opened.close()
