"""A gateway of its own and its hub: heartbeats, and the edges that the hub wants no more."""

import asyncio
import logging

from linkcpp.gateway.relay import Relay
from linkcpp.registry.client import HubClient
from linkcpp.registry.connection import HubError, HubRefusedError
from linkcpp.registry.edges import GATEWAY_HEARTBEAT_SECONDS, GatewayHeartbeat

_log = logging.getLogger(__name__)


async def stay_registered(relay: Relay, client: HubClient, url: str) -> None:
    """Tell the hub again and again that this gateway is alive at ``url``, until cancelled.

    While the hub is away the relay goes on with what it has: tickets are verified without a hub.

    Raises:
        HubRefusedError: the hub wants this gateway no more.
    """
    is_known: bool | None = None
    while True:
        interval = GATEWAY_HEARTBEAT_SECONDS
        try:
            answer = await client.gateway_heartbeat(GatewayHeartbeat(url=url, edges=relay.edge_ids))
        except HubError as error:
            if isinstance(error, HubRefusedError) and error.is_final:
                raise
            if is_known is not False:
                _log.warning("the hub does not know of this gateway now: %s", error)
            is_known = False
        else:
            if not is_known:
                _log.info("the hub knows of this gateway")
            is_known = True
            relay.close_edges(answer.close_edges)
            interval = answer.interval_seconds
        await asyncio.sleep(interval)
