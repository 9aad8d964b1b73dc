"""How far a machine is from gateways: what a path over each of them would cost."""

import asyncio
import math
import time
from collections.abc import Iterable
from urllib.parse import urlsplit, urlunsplit

import httpx

from linkcpp.common.errors import LinkcppError
from linkcpp.common.proxies import ProxiedAsyncTransport
from linkcpp.registry.edges import GatewayRecord
from linkcpp.registry.trust import tls_context

_CALLS = 4
_DEADLINE_SECONDS = 10.0
_MAX_CONCURRENT = 8


async def relay_rtts_ms(gateways: Iterable[GatewayRecord]) -> dict[str, float]:
    """Measure the round trip to every gateway that is online, in milliseconds.

    The best of several calls over one kept connection; a gateway that does not answer is left out.
    """
    turn = asyncio.Semaphore(_MAX_CONCURRENT)

    async def measure(gateway_id: str, url: str) -> tuple[str, float]:
        async with turn:
            return gateway_id, await _rtt_ms(health_url(url))

    online = [(one.gateway_id, one.url) for one in gateways if one.is_online and one.url]
    measured = await asyncio.gather(*(measure(*gateway) for gateway in online))
    return {gateway: rtt for gateway, rtt in measured if math.isfinite(rtt)}


def health_url(relay_url: str) -> str:
    """Return where a gateway with this relay address tells that it lives. Pure."""
    parts = urlsplit(relay_url)
    scheme = "https" if parts.scheme in ("wss", "https") else "http"
    return urlunsplit((scheme, parts.netloc, "/v1/health", "", ""))


async def _rtt_ms(url: str) -> float:
    best = math.inf
    try:
        async with (
            asyncio.timeout(_DEADLINE_SECONDS),
            httpx.AsyncClient(
                trust_env=False,
                transport=ProxiedAsyncTransport(tls_context()),
                timeout=_DEADLINE_SECONDS,
            ) as http,
        ):
            for _ in range(_CALLS):
                began = time.perf_counter()
                async with http.stream("GET", url) as response:
                    response.raise_for_status()
                best = min(best, (time.perf_counter() - began) * 1000)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, TimeoutError, LinkcppError):
        pass
    return best
