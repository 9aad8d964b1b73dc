"""The relay on an HTTP port that it shares with an application."""

import asyncio
import socket

from linkcpp.common.http_server import BoundedHttpProtocol, make_server, upgrading_protocol
from linkcpp.gateway.app import create_app
from linkcpp.gateway.relay import Relay
from linkcpp.registry.relay import RELAY_PATH


def relay_http_protocol(relay: Relay) -> type[BoundedHttpProtocol]:
    """Make the class of HTTP connections that hands WebSockets at ``/v1/relay`` to a relay.

    For ``linkcpp.common.http_server.make_server(http=…)``. Everything else goes to the application.
    """
    return upgrading_protocol(lambda path: relay.accept if path == RELAY_PATH else None)


async def serve_gateway(
    relay: Relay, metrics_token: str, sockets: list[socket.socket], stop: asyncio.Event
) -> None:
    """Serve a relay and nothing but it until ``stop``, then close every connection."""
    server = make_server(
        create_app(relay, metrics_token),
        http=relay_http_protocol(relay),
        # The application has no WebSocket: these bound what it refuses.
        max_message_bytes=1024,
        ping_interval_seconds=30.0,
        ping_timeout_seconds=30.0,
    )
    serving = asyncio.create_task(server.serve(sockets=sockets))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        await relay.aclose()
        server.should_exit = True
        await serving
