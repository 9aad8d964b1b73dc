"""The relay on an HTTP port that it shares with an application."""

import asyncio
import socket

import h11

from linkcpp.common.http_server import BoundedHttpProtocol, make_server
from linkcpp.common.records import ErrorBody
from linkcpp.gateway.app import create_app
from linkcpp.gateway.relay import Relay
from linkcpp.gateway.upgrade import UpgradeError
from linkcpp.registry.relay import RELAY_PATH


def relay_http_protocol(relay: Relay) -> type[BoundedHttpProtocol]:
    """Make the class of HTTP connections that hands WebSockets at ``/v1/relay`` to a relay.

    For ``linkcpp.common.http_server.make_server(http=…)``. Everything else goes to the application.
    """

    class RelayHttpProtocol(BoundedHttpProtocol):
        """Bounded HTTP/1.1 with a relay."""

        def handle_websocket_upgrade(self, event: h11.Request) -> None:
            """Give the connection to whom it asks for."""
            if self.scope["path"] != RELAY_PATH:
                super().handle_websocket_upgrade(event)
                return
            # Relayed connections leave the server's count: the relay has bounds of its own.
            self.connections.discard(self)
            try:
                relay.accept(
                    self.transport,
                    method=event.method,
                    headers=self.headers,
                    peer=self.client[0] if self.client else "",
                )
            except UpgradeError as error:
                told = ErrorBody(code=error.code, message=error.reason)
                self.refuse(error.status, told, self.headers)

    return RelayHttpProtocol


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
