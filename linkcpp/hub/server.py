"""The hub on its sockets: as many connections as the system lets it have, until it is stopped."""

import asyncio
import gc
import socket
from collections.abc import Callable

from starlette.types import ASGIApp

from linkcpp.common.descriptors import raise_descriptor_limit
from linkcpp.common.http_server import BoundedHttpProtocol, make_server
from linkcpp.hub.service import Hub

# Machines ping too; together both ends notice a dead link, and proxies see traffic in time.
_PING_INTERVAL_SECONDS = 20.0
_PING_TIMEOUT_SECONDS = 20.0
_MAX_MESSAGE_BYTES = 4096
_MAX_CONNECTIONS = 40_000
# What the database, the log and files of models may need besides.
_RESERVED_DESCRIPTORS = 200


async def serve_hub(
    hub: Hub,
    app: ASGIApp,
    sockets: list[socket.socket],
    stop: asyncio.Event,
    *,
    http: type[BoundedHttpProtocol] = BoundedHttpProtocol,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until ``stop``; ``http`` may be a class that takes some requests for itself."""

    class HubHttpProtocol(http):  # type: ignore[valid-type,misc]
        """The same with room for the machines of a large hub."""

        max_connections = _max_connections()
        max_strangers = max_connections // 2

    server = make_server(
        app,
        http=HubHttpProtocol,
        max_message_bytes=_MAX_MESSAGE_BYTES,
        ping_interval_seconds=_PING_INTERVAL_SECONDS,
        ping_timeout_seconds=_PING_TIMEOUT_SECONDS,
    )
    serving = asyncio.create_task(server.serve(sockets=sockets))
    stopping = asyncio.create_task(stop.wait())
    try:
        on_ready()
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        hub.events.close_all()
        server.should_exit = True
        await serving


def tune_collector() -> None:
    """Let Python look for garbage less often: with many connections one look takes a second.

    What requests leave behind is freed by counting references; cycles are rare here, and are found
    while they are young. For a process that does nothing but serve.
    """
    gc.freeze()
    gc.set_threshold(10_000, 50, 1_000)


def _max_connections() -> int:
    most = raise_descriptor_limit(_MAX_CONNECTIONS + _RESERVED_DESCRIPTORS)
    return max(64, most - _RESERVED_DESCRIPTORS)
