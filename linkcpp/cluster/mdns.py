"""Advertise a node on the local network and hear of others: DNS-SD over mDNS (RFC 6762, 6763).

What mDNS says is a hint and never a proof: anybody on the network may advertise anything. So
nothing of it is believed before the host at the address has proved itself
(``linkcpp.node.probe``), names are made printable, and every count and length is bounded.
"""

import asyncio
import ipaddress
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, Self

import zeroconf
from zeroconf import InterfaceChoice, IPVersion, ServiceStateChange
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from linkcpp.cluster.addresses import link_local_zones, own_addresses, reachable_hosts
from linkcpp.cluster.records import NodeId
from linkcpp.common.errors import LinkcppError
from linkcpp.common.records import Record
from linkcpp.common.text import MAX_NAME_CHARACTERS, printable

SERVICE_TYPE = "_linkcpp._tcp.local."

_PROTOCOL_VERSION = "1"
_MAX_LABEL_BYTES = 63
_MAX_VALUE_BYTES = 128
_RESOLVE_MS = 1500
_MAX_INSTANCES = 1024


class Advertisement(Record):
    """What a node tells everybody: enough to choose whom to ask, and no secret."""

    node_id: NodeId
    name: str
    port: int
    engine_digest: str | None
    memory_class: str


class Advertised(Record):
    """What somebody advertises: claims, cleaned and cut, but not checked.

    ``instance`` tells apart services, ``hosts`` are addresses ready to connect to.
    """

    instance: str
    node_id: NodeId | None
    name: str
    hosts: tuple[str, ...]
    port: int


def memory_class(free_bytes: int) -> str:
    """Round memory down to a power of two of GiB: exact numbers would be news every second."""
    gibibytes = free_bytes // 2**30
    return f"{1 << (gibibytes.bit_length() - 1)}G" if gibibytes else "<1G"


class Advertiser:
    """Keeps one node advertised, as an asynchronous context manager.

    ``bind_host`` is what the agent listens on; a wildcard is advertised with the addresses of all
    interfaces, loopback only on the loopback interface. Leaving the context says goodbye.
    """

    def __init__(self, advertisement: Advertisement, *, bind_host: str) -> None:
        self._advertisement = advertisement
        self._bind_host = bind_host
        self._addresses: tuple[str, ...] = ()
        self._instance: str | None = None
        self._zeroconf: AsyncZeroconf | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Announce the node.

        Raises:
            LinkcppError: the network does not let us (no interface, or UDP port 5353 is held by
                somebody who does not share it).
        """
        try:
            self._addresses = await asyncio.to_thread(_advertised_addresses, self._bind_host)
            self._zeroconf = open_zeroconf(self._addresses)
            service = self._service()
            sent = await self._zeroconf.async_register_service(
                service, allow_name_change=True, strict=False
            )
            # Another name than was asked for, where a copy of this node is on the network.
            self._instance = service.name
            await sent
        except (OSError, zeroconf.Error) as error:
            await self.aclose()
            raise _unavailable(error) from error

    async def update(self, advertisement: Advertisement) -> None:
        """Announce what changed; also finds out whether this machine's addresses have."""
        is_same = advertisement == self._advertisement
        self._advertisement = advertisement
        try:
            addresses = await asyncio.to_thread(_advertised_addresses, self._bind_host)
        except OSError as error:
            raise _unavailable(error) from error
        if self._zeroconf is None or addresses != self._addresses:
            # The sockets belong to interfaces that may be gone: begin anew.
            await self.aclose()
            await self.start()
        elif not is_same:
            await (await self._zeroconf.async_update_service(self._service()))

    async def aclose(self) -> None:
        """Say goodbye and close the sockets; fine when never started."""
        opened, self._zeroconf, self._instance = self._zeroconf, None, None
        if opened is not None:
            await opened.async_close()

    def _service(self) -> AsyncServiceInfo:
        told = self._advertisement
        properties = {
            "v": _PROTOCOL_VERSION,
            "id": told.node_id,
            "name": _cut(printable(told.name), _MAX_VALUE_BYTES),
            "mem": told.memory_class,
        }
        if told.engine_digest:
            properties["fp"] = told.engine_digest
        return AsyncServiceInfo(
            SERVICE_TYPE,
            self._instance or f"{instance_label(told.name, told.node_id)}.{SERVICE_TYPE}",
            port=told.port,
            properties=properties,
            # A host name of our own: the machine's belongs to its own mDNS responder.
            server=f"linkcpp-{told.node_id}.local.",
            parsed_addresses=list(self._addresses),
        )


def _advertised_addresses(bind_host: str) -> tuple[str, ...]:
    return own_addresses(bind_host, with_link_local=True)


def instance_label(name: str, node_id: str) -> str:
    """Make the DNS label of a node: its name and 64 bits of its id, within 63 bytes."""
    suffix = f" {node_id.replace('-', '')[:16]}"
    # A dot would begin another label.
    plain = printable(name).replace(".", "-").replace("\N{REPLACEMENT CHARACTER}", "-")
    return _cut(plain, _MAX_LABEL_BYTES - len(suffix.encode())) + suffix


def _cut(text: str, size_bytes: int) -> str:
    return text.encode()[:size_bytes].decode(errors="ignore")


async def browse() -> AsyncGenerator[Advertised]:
    """Yield each advertised service when it appears and again when it changes; never ends.

    Raises:
        LinkcppError: the network does not let us listen.
    """
    opened = open_zeroconf(())
    heard: asyncio.Queue[Advertised] = asyncio.Queue()
    seen: set[str] = set()
    resolving: set[asyncio.Task[None]] = set()

    async def resolve(name: str) -> None:
        advertised = await _resolve(opened, name)
        if advertised is not None:
            heard.put_nowait(advertised)

    def on_change(name: str, state_change: ServiceStateChange, **_: Any) -> None:
        if state_change is ServiceStateChange.Removed:
            return
        if name not in seen and len(seen) >= _MAX_INSTANCES:
            return
        seen.add(name)
        task = asyncio.get_running_loop().create_task(resolve(name))
        resolving.add(task)
        task.add_done_callback(resolving.discard)

    browser = AsyncServiceBrowser(opened.zeroconf, SERVICE_TYPE, handlers=[on_change])
    try:
        while True:
            yield await heard.get()
    finally:
        await browser.async_cancel()
        for task in resolving:
            task.cancel()
        await asyncio.gather(*resolving, return_exceptions=True)
        await opened.async_close()


async def _resolve(opened: AsyncZeroconf, name: str) -> Advertised | None:
    try:
        info = AsyncServiceInfo(SERVICE_TYPE, name)
        if not await info.async_request(opened.zeroconf, _RESOLVE_MS):
            return None
        addresses = info.parsed_scoped_addresses(IPVersion.All)
        zones = await asyncio.to_thread(link_local_zones)
        return read_advertised(name, info.port, addresses, info.properties, zones)
    except (zeroconf.Error, ValueError, OSError):
        return None  # a name or record that is not what the standard allows


def read_advertised(
    instance: str,
    port: int | None,
    addresses: Iterable[str],
    properties: Mapping[bytes, bytes | None],
    zones: tuple[str, ...],
) -> Advertised | None:
    """Take from a service's records what discovery needs; ``None`` if it cannot be asked."""
    hosts = reachable_hosts(list(addresses), zones)
    if not hosts or not port or not 0 < port < 2**16:
        return None
    label = instance.removesuffix(f".{SERVICE_TYPE}")
    return Advertised(
        instance=printable(instance, 4 * MAX_NAME_CHARACTERS),
        node_id=NodeId(_text(properties, b"id")) or None,
        name=_text(properties, b"name") or printable(label),
        hosts=hosts,
        port=port,
    )


def _text(properties: Mapping[bytes, bytes | None], key: bytes) -> str:
    value = properties.get(key) or b""
    return printable(value[:_MAX_VALUE_BYTES].decode(errors="replace"))


def open_zeroconf(addresses: tuple[str, ...]) -> AsyncZeroconf:
    """Open mDNS sockets: on the loopback interface if all addresses are its, else on all.

    Raises:
        LinkcppError: no interface can be used.
    """
    if addresses and all(ipaddress.ip_address(address).is_loopback for address in addresses):
        attempts: list[dict[str, Any]] = [{"interfaces": ["127.0.0.1"]}]
    else:
        # A system with IPv6 switched off refuses the first.
        attempts = [
            {"interfaces": InterfaceChoice.All, "ip_version": version}
            for version in (IPVersion.All, IPVersion.V4Only)
        ]
    problem: Exception | None = None
    for attempt in attempts:
        try:
            return AsyncZeroconf(**attempt)
        except (OSError, RuntimeError, zeroconf.Error) as error:
            problem = error
    raise _unavailable(problem)


def _unavailable(error: Exception | None) -> LinkcppError:
    return LinkcppError(
        f"mDNS cannot be used on this network: {error}.",
        hint="Name the nodes by address instead (`--node URL`, or `nodes` in config.toml); if "
        "avahi runs here, `disallow-other-stacks` must be `no`.",
    )
