"""A link between two programs that a coordinator introduced to each other.

The coordinator has a link to each of their machines, and so may tell each the key of the other: the
programs then dial and accept by themselves, and no process lies between the network and the one
that computes. The keys are made for this one link.
"""

import time
from collections.abc import Callable
from typing import Self

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from pydantic import Field

from linkcpp.common.closing import Closing
from linkcpp.common.records import WireRecord
from linkcpp.link.blocking import BlockingStream
from linkcpp.link.choosing import Path, PathKind
from linkcpp.link.dialing import Way, Ways, direct_ways
from linkcpp.link.endpoint import LinkEndpoint
from linkcpp.link.handlers import StreamPort
from linkcpp.link.handshake import KnownPeer, Machine, parse_link_key
from linkcpp.link.records import LinkTimes
from linkcpp.link.shared_loop import SharedLoop
from linkcpp.link.status import LinkStatus
from linkcpp.link.supply import relay_ways
from linkcpp.registry.edges import EdgeOffer
from linkcpp.registry.encoding import decode, encode
from linkcpp.registry.relay import DIRECT_PATH, encode_cluster_hello
from linkcpp.registry.trust import websocket_url

# What the one stream of such a link leads to: the program itself.
PROGRAM_TARGET = "program"

_DIALLER, _ACCEPTOR = Machine("dialler", ""), Machine("acceptor", "")
# A program that its machine does not know has ended, and never comes back as the same one.
_TIMES = LinkTimes(refused=0.0)


class IntroducedEnd(WireRecord):
    """What one of the two programs is told: the link's id (32 hex digits), and keys (base64url).

    ``own_key`` is secret.
    """

    link_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    own_key: str
    peer_key: str

    def introduction(self, *, is_dialler: bool) -> KnownPeer:
        """Return what the handshake needs.

        Raises:
            ValueError: a key is not one.
        """
        own, peer = (_DIALLER, _ACCEPTOR) if is_dialler else (_ACCEPTOR, _DIALLER)
        own_key = X25519PrivateKey.from_private_bytes(decode(self.own_key))
        return KnownPeer(own_key, parse_link_key(self.peer_key), self.link_id, own, peer)


class DialledEnd(IntroducedEnd):
    """What the program is told that dials.

    ``direct_urls`` are those of the peer's agent, ``offer`` an edge of a hub that was made for this
    link; ``relayed_url`` leads there through a port of this machine that the coordinator keeps.
    """

    direct_urls: tuple[str, ...] = ()
    offer: EdgeOffer | None = None
    relayed_url: str | None = None

    def ways(self) -> Ways:
        """Return how the peer may be reached."""
        path, hello = f"{DIRECT_PATH}/{self.link_id}", encode_cluster_hello(self.link_id)
        last: tuple[Way, ...] = ()
        if self.relayed_url is not None:
            last = (Way(Path(PathKind.RELAY), websocket_url(self.relayed_url, path), hello),)
        holds = self.offer is not None and self.offer.expires_at > time.time()
        return Ways(
            direct_ways(self.direct_urls, hello, path),
            relay_ways(self.offer) if self.offer is not None and holds else (),
            last,
        )


def new_key() -> tuple[str, str]:
    """Make a key for an end of a link: the secret one, and the public one for the peer."""
    key = X25519PrivateKey.generate()
    return encode(key.private_bytes_raw()), encode(key.public_key().public_bytes_raw())


class IntroducedSupply:
    """The ways that the coordinator told; see ``linkcpp.link.supply.Supply``.

    Raises:
        ValueError: a key is not one.
    """

    def __init__(self, end: DialledEnd) -> None:
        self.introduction = end.introduction(is_dialler=True)
        self.is_awaited = False
        self.update(end)

    def update(self, end: DialledEnd) -> None:
        """Take other ways to the same peer."""
        self._end = end
        self.direct_urls = end.direct_urls

    async def usable(self) -> Ways:
        """Return the ways."""
        return self._end.ways()

    async def fresh(self) -> Ways:
        """Return the ways that the coordinator told last."""
        return self._end.ways()

    def another(self) -> None:
        """The coordinator asks for edges."""
        return

    def avoid(self, gateway_id: str | None) -> None:
        """Do nothing: there are no gateways."""

    def check(self, machine: Machine, key: X25519PublicKey) -> None:
        """Do nothing: the handshake is with the key that the coordinator told."""

    async def close(self) -> None:
        """Do nothing: the peer learns it over the link."""


class ProgramLink(Closing):
    """The end that dials, for a thread that blocks; ``stream`` is its connection to the peer."""

    stream: BlockingStream

    def __init__(self) -> None:
        self._shared = SharedLoop()
        self._endpoint: LinkEndpoint | None = None
        self._supply: IntroducedSupply | None = None

    @classmethod
    def dial(cls, end: DialledEnd, *, timeout_seconds: float) -> Self:
        """Reach the peer.

        Raises:
            LinkcppError: it was not reached, with the reason.
            ValueError: a key is not one.
        """
        link = cls()
        try:
            link._shared.run(link._open(end, timeout_seconds))
        except BaseException:
            link.close()
            raise
        return link

    def update(self, end: DialledEnd) -> None:
        """Take other ways to the same peer from now on; from any thread."""
        if self._supply is not None:
            self._supply.update(end)

    def status(self) -> LinkStatus | None:
        """Tell what the link does now; from any thread."""
        return self._endpoint.status() if self._endpoint is not None else None

    def close(self) -> None:
        """End the link; the peer is told."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            self._shared.run(endpoint.aclose())
        self._shared.close()

    async def _open(self, end: DialledEnd, timeout_seconds: float) -> None:
        self._supply = IntroducedSupply(end)
        self._endpoint = LinkEndpoint(self._supply, times=_TIMES)
        await self._endpoint.open(timeout_seconds=timeout_seconds)
        stream = self._endpoint.start_stream(PROGRAM_TARGET, _blocking(self._shared))
        assert isinstance(stream, BlockingStream)  # noqa: S101 - made below
        self.stream = stream


def _blocking(shared: SharedLoop) -> Callable[[StreamPort], BlockingStream]:
    return lambda port: BlockingStream(shared, port)
