"""How the end of a link that dials opens paths: one, or all that there are at the same time."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from linkcpp.link.channel import SecureChannel
from linkcpp.link.choosing import Path, PathKind
from linkcpp.link.core import Resume
from linkcpp.link.handshake import HANDSHAKE_SECONDS, Introduction, initiate
from linkcpp.link.records import LinkTimes
from linkcpp.link.transport import Transport, TransportLostError, WebSocketTransport
from linkcpp.registry.relay import DIRECT_PATH, PAIRED
from linkcpp.registry.trust import websocket_url

_LATER = 8


class Way(NamedTuple):
    """An address to dial, what path that is, and the first message there."""

    path: Path
    url: str
    hello: bytes


class Ways(NamedTuple):
    """How the peer may be reached now: the best first, and ``last`` what else is left.

    The gateway is named also where there is no way to it that may be used.
    """

    direct: tuple[Way, ...]
    relay: tuple[Way, ...] = ()
    last: tuple[Way, ...] = ()
    gateway_id: str | None = None
    gateway_name: str | None = None


def direct_ways(urls: Iterable[str], hello: bytes, path: str = DIRECT_PATH) -> tuple[Way, ...]:
    """Return the ways to the addresses of the peer itself (HTTP or WebSocket ones)."""
    kind = Path(PathKind.DIRECT)
    dialled = (websocket_url(url.removesuffix(DIRECT_PATH), path) for url in urls)
    return tuple(Way(kind, url, hello) for url in dialled)


async def open_channel(
    way: Way, introduction: Introduction, resume: Resume, times: LinkTimes
) -> SecureChannel:
    """Open one path, up to the end of the handshake.

    Raises:
        TransportLostError: it does not work, with the reason.
    """
    is_relay = way.path.kind is PathKind.RELAY
    transport = await dial_paired(
        way.url,
        way.hello,
        dial_seconds=times.dial,
        pairing_seconds=times.pairing if is_relay else HANDSHAKE_SECONDS,
    )
    try:
        return SecureChannel(
            transport, await initiate(transport, introduction, resume), path=str(way.path)
        )
    except BaseException:
        await transport.close()
        raise


async def dial_paired(
    url: str, hello: bytes, *, dial_seconds: float, pairing_seconds: float
) -> Transport:
    """Dial a relay or the peer, and wait until the other side is there.

    Raises:
        TransportLostError: it cannot be reached, refuses, or the other side did not come.
    """
    transport = await WebSocketTransport.dial(url, timeout_seconds=dial_seconds)
    try:
        transport.send(hello)
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
    is_only_way: bool


async def reach_first(
    groups: Sequence[Sequence[Way]],
    open_way: Callable[[Way], Awaitable[SecureChannel]],
    *,
    head_start_seconds: float,
) -> Reached:
    """Open ways at the same time and keep the first that works; each group has a start to the next.

    Raises:
        TransportLostError: none works; the reason names each.
    """
    failures: list[tuple[Way, TransportLostError]] = []
    waiting = [len(ways) for ways in groups]
    have_failed = [asyncio.Event() for _ in groups]

    def note_failed() -> None:
        for rank, event in enumerate(have_failed):
            if not any(waiting[: rank + 1]):
                event.set()

    note_failed()

    async def attempt(way: Way, rank: int) -> tuple[Way, SecureChannel] | None:
        if rank:
            # What comes last may take the place of a relay, which has to wait for two.
            await _wait(have_failed[rank - 1], head_start_seconds * _LATER ** (rank - 1))
        try:
            return way, await open_way(way)
        except TransportLostError as error:
            failures.append((way, error))
        waiting[rank] -= 1
        note_failed()
        return None

    tasks = [
        asyncio.create_task(attempt(way, rank)) for rank, ways in enumerate(groups) for way in ways
    ]
    won: tuple[Way, SecureChannel] | None = None
    try:
        for task in asyncio.as_completed(tasks):
            if (won := await task) is not None:
                return Reached(*won, _in_words(failures), len(tasks) == 1)
    finally:
        await _dismiss(tasks, won)
    codes = {error.code for _, error in failures}
    raise TransportLostError(
        "; ".join(_in_words(failures)) or "there is no address to dial",
        codes.pop() if len(codes) == 1 else None,
        is_refused=bool(failures) and all(error.is_refused for _, error in failures),
    )


def _in_words(failures: list[tuple[Way, TransportLostError]]) -> tuple[str, ...]:
    return tuple(f"{way.path}: {error.reason}" for way, error in failures)


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
