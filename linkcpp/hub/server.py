"""The hub on its sockets until it is stopped, and the gateway that may run in its process."""

import asyncio
import contextlib
import gc
import logging
import socket
from collections.abc import AsyncIterator, Callable

from starlette.types import ASGIApp

from linkcpp.common.descriptors import raise_descriptor_limit
from linkcpp.common.http_server import BoundedHttpProtocol, make_server
from linkcpp.gateway.relay import Relay
from linkcpp.gateway.server import relay_http_protocol
from linkcpp.hub.errors import ApiError
from linkcpp.hub.service import Hub
from linkcpp.registry.edges import GATEWAY_HEARTBEAT_SECONDS

_log = logging.getLogger(__name__)

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


@contextlib.asynccontextmanager
async def embedded_gateway(hub: Hub) -> AsyncIterator[type[BoundedHttpProtocol]]:
    """Run a relay meanwhile; gives the class of HTTP connections for ``serve_hub``.

    Its metrics are among the hub's.
    """
    relay = Relay(gateway_id=hub.identity.hub_id, hub=hub.identity.verifier, clock=hub.clock)
    hub.metrics.add_relay(relay)
    await hub.registrar.enter_embedded_gateway()
    await hub.registrar.see_gateway(hub.identity.hub_id, "", ())
    ticking = asyncio.create_task(_tick(hub, relay))
    try:
        yield relay_http_protocol(relay)
    finally:
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
        await relay.aclose()


async def _tick(hub: Hub, relay: Relay) -> None:
    while True:
        await asyncio.sleep(GATEWAY_HEARTBEAT_SECONDS)
        try:
            relay.close_edges(
                await hub.registrar.see_gateway(hub.identity.hub_id, "", relay.edge_ids)
            )
        except ApiError as error:
            _log.warning("the hub's own gateway is not noted: %s", error)
