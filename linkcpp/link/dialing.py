"""How a coordinator opens paths to a node: one, or all of an offer at the same time."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from linkcpp.link.channel import SecureChannel
from linkcpp.link.choosing import Path, PathKind
from linkcpp.link.core import Resume
from linkcpp.link.handshake import HANDSHAKE_SECONDS, EdgeKeys, initiate
from linkcpp.link.records import EdgeTimes
from linkcpp.link.transport import DialledTransport, Transport, TransportLostError
from linkcpp.registry.edges import EdgeOffer
from linkcpp.registry.relay import DIRECT_PATH, PAIRED, Hello, encode_hello
from linkcpp.registry.trust import websocket_url


class Way(NamedTuple):
    """An address to dial, and what path that is."""

    path: Path
    url: str


def direct_ways(offer: EdgeOffer) -> tuple[Way, ...]:
    """Return the addresses of the node itself."""
    path = Path(PathKind.DIRECT)
    urls = (websocket_url(url.removesuffix(DIRECT_PATH), DIRECT_PATH) for url in offer.direct_urls)
    return tuple(Way(path, url) for url in urls)


def relay_ways(offer: EdgeOffer) -> tuple[Way, ...]:
    """Return the relay's address, if the offer has one that may be dialled."""
    if offer.relay_url is None:
        return ()
    path = Path(PathKind.RELAY, offer.gateway_id, offer.gateway_name)
    return (Way(path, offer.relay_url),)


async def open_channel(
    way: Way, offer: EdgeOffer, edge: EdgeKeys, resume: Resume, times: EdgeTimes
) -> SecureChannel:
    """Open one path, up to the end of the handshake.

    Raises:
        TransportLostError: it does not work, with the reason.
    """
    is_relay = way.path.kind is PathKind.RELAY
    transport = await dial_paired(
        way.url,
        Hello(offer.role, offer.edge_id, offer.ticket),
        dial_seconds=times.dial,
        pairing_seconds=times.pairing if is_relay else HANDSHAKE_SECONDS,
    )
    try:
        return SecureChannel(transport, await initiate(transport, edge, resume), path=str(way.path))
    except BaseException:
        await transport.close()
        raise


async def dial_paired(
    url: str, hello: Hello, *, dial_seconds: float, pairing_seconds: float
) -> Transport:
    """Dial a relay or a node, and wait until the other side is there.

    Raises:
        TransportLostError: it cannot be reached, refuses, or the other side did not come.
    """
    transport = await DialledTransport.dial(url, timeout_seconds=dial_seconds)
    try:
        await transport.send(encode_hello(hello))
        async with asyncio.timeout(pairing_seconds):
            answer = await transport.receive()
    except TimeoutError:
        await transport.close()
        raise TransportLostError("no answer in time") from None
    except BaseException:
        await transport.close()
        raise
    if answer != PAIRED:
        await transport.close()
        raise TransportLostError("it speaks another protocol")
    return transport


class Reached(NamedTuple):
    """The path that answered first, and what became of the others so far."""

    way: Way
    channel: SecureChannel
    failures: tuple[str, ...]


async def reach_first(
    preferred: Iterable[Way],
    others: Iterable[Way],
    open_way: Callable[[Way], Awaitable[SecureChannel]],
    *,
    head_start_seconds: float,
) -> Reached:
    """Open all ways at the same time and keep the first that works; the preferred have a start.

    Raises:
        TransportLostError: none works; the reason names each.
    """
    failures: list[str] = []
    preferred_failed = asyncio.Event()
    ways = tuple(preferred)
    waiting = len(ways)
    if not ways:
        preferred_failed.set()

    async def attempt(way: Way, *, is_preferred: bool) -> tuple[Way, SecureChannel] | None:
        nonlocal waiting
        if not is_preferred:
            await _wait(preferred_failed, head_start_seconds)
        try:
            return way, await open_way(way)
        except TransportLostError as error:
            failures.append(f"{way.path}: {error.reason}")
        waiting -= is_preferred
        if not waiting:
            preferred_failed.set()
        return None

    tasks = [asyncio.create_task(attempt(way, is_preferred=True)) for way in ways]
    tasks += [asyncio.create_task(attempt(way, is_preferred=False)) for way in others]
    won: tuple[Way, SecureChannel] | None = None
    try:
        for task in asyncio.as_completed(tasks):
            if (won := await task) is not None:
                return Reached(*won, tuple(failures))
    finally:
        await _dismiss(tasks, won)
    raise TransportLostError("; ".join(failures) or "there is no address to dial")


async def _dismiss(
    tasks: list[asyncio.Task[tuple[Way, SecureChannel] | None]],
    won: tuple[Way, SecureChannel] | None,
) -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, tuple) and result != won:
            await result[1].close()


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
