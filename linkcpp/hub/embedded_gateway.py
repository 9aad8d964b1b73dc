"""A gateway in the hub's own process, on the hub's own port."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from linkcpp.common.http_server import BoundedHttpProtocol
from linkcpp.gateway.relay import Relay
from linkcpp.gateway.server import relay_http_protocol
from linkcpp.hub.errors import ApiError
from linkcpp.hub.service import Hub
from linkcpp.registry.edges import GATEWAY_HEARTBEAT_SECONDS

_log = logging.getLogger(__name__)


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
