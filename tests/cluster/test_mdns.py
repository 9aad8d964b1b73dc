"""Advertising a node, hearing of others, and what strangers may put into mDNS records."""

import asyncio
import contextlib
import socket
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zeroconf import (  # type: ignore[attr-defined]  # they are there, and not in its __all__
    DNSAddress,
    DNSOutgoing,
    DNSPointer,
    DNSService,
    DNSText,
)

from linkcpp.cluster.addresses import MAX_ADDRESSES, host_of, own_addresses, reachable_hosts
from linkcpp.cluster.mdns import (
    SERVICE_TYPE,
    Advertised,
    Advertisement,
    Advertiser,
    browse,
    instance_label,
    memory_class,
    open_zeroconf,
    read_advertised,
)
from linkcpp.cluster.records import NodeId

pytestmark = pytest.mark.slow

GIB = 2**30


@pytest.mark.parametrize(
    ("size", "told"),
    [(0, "<1G"), (GIB - 1, "<1G"), (GIB, "1G"), (31 * GIB, "16G"), (32 * GIB, "32G")],
)
def test_memory_is_told_in_coarse_classes(size: int, told: str) -> None:
    assert memory_class(size) == told


@given(st.text())
def test_any_name_makes_one_dns_label(name: str) -> None:
    label = instance_label(name, "01234567-89")
    assert len(label.encode()) <= 63
    assert "." not in label
    assert label.endswith(" 0123456789")


@given(
    st.text(),
    st.none() | st.integers(),
    st.lists(st.text() | st.sampled_from(["10.0.0.5", "fe80::1", "::1", "224.0.0.1"])),
    st.dictionaries(
        st.sampled_from([b"id", b"name", b"v"]) | st.binary(), st.none() | st.binary(max_size=9000)
    ),
)
def test_hostile_records_give_bounded_printable_claims_or_nothing(
    instance: str,
    port: int | None,
    addresses: list[str],
    properties: dict[bytes, bytes | None],
) -> None:
    told = read_advertised(instance, port, addresses, properties, ("eth0",))
    if told is None:
        return
    for text in (told.instance, told.name, told.node_id or ""):
        assert text.isprintable() or text == ""
        assert len(text) <= 256
    assert 0 < told.port < 65536
    assert 0 < len(told.hosts) <= MAX_ADDRESSES


def test_a_control_character_in_a_name_is_replaced() -> None:
    told = read_advertised("x", 1, ["10.0.0.5"], {b"name": b"\x1b[2Jevil\xff", b"id": None}, ())
    assert told is not None
    assert told.name == "\N{REPLACEMENT CHARACTER}[2Jevil\N{REPLACEMENT CHARACTER}"
    assert told.node_id is None


def test_a_link_local_address_gets_the_interface_it_was_heard_on_or_every_one() -> None:
    loopback = socket.if_nametoindex("lo") if hasattr(socket, "if_nametoindex") else 1
    assert reachable_hosts([f"fe80::1%{loopback}"], ("a",)) == ("fe80::1%lo",)
    assert reachable_hosts(["fe80::1"], ("a", "b")) == ("fe80::1%a", "fe80::1%b")
    assert reachable_hosts(["0.0.0.0", "224.0.0.251", "ff02::fb", "::", "no"], ("a",)) == ()
    assert len(reachable_hosts([f"10.0.0.{n}" for n in range(99)], ())) == MAX_ADDRESSES


def test_a_socket_address_is_written_so_that_one_can_connect_to_it_again() -> None:
    assert host_of(("10.0.0.5", 1)) == "10.0.0.5"
    assert host_of(("fe80::1", 1, 0, socket.if_nametoindex("lo"))) == "fe80::1%lo"
    assert host_of(("fe80::1%lo", 1, 0, 1)) == "fe80::1%lo"


def test_a_wildcard_stands_for_the_addresses_of_the_machine() -> None:
    assert own_addresses("127.0.0.1") == ("127.0.0.1",)
    assert own_addresses("localhost") == ("127.0.0.1",)
    assert own_addresses("fe80::1%eth0", with_link_local=True) == ("fe80::1",)
    for address in own_addresses("::", with_link_local=True):
        assert "%" not in address
    assert not any(address.startswith("fe80") for address in own_addresses("::"))
    assert not any(":" in address for address in own_addresses("0.0.0.0"))


def advertisement(port: int, node_id: str = "0f0f0f0f-1", free: str = "8G") -> Advertisement:
    return Advertisement(
        node_id=NodeId(node_id), name="attic", port=port, engine_digest="ab" * 8, memory_class=free
    )


async def until_heard(is_wanted: Callable[[Advertised], bool]) -> Advertised:
    async with asyncio.timeout(30), contextlib.aclosing(browse()) as heard:
        async for told in heard:
            if is_wanted(told):
                return told
    raise AssertionError("browsing ended")


async def test_what_is_advertised_on_loopback_is_heard_with_its_address() -> None:
    async with Advertiser(advertisement(4711), bind_host="127.0.0.1"):
        told = await until_heard(lambda told: told.node_id == "0f0f0f0f-1")
    assert (told.name, told.hosts, told.port) == ("attic", ("127.0.0.1",), 4711)


async def test_a_change_is_advertised_again() -> None:
    async with Advertiser(advertisement(4712, "change-1"), bind_host="127.0.0.1") as advertiser:
        await until_heard(lambda told: told.port == 4712)
        await advertiser.update(advertisement(4713, "change-1", "4G"))
        heard = await until_heard(lambda told: told.port == 4713)
    assert heard.port == 4713


async def test_two_nodes_with_one_name_are_both_heard() -> None:
    async with (
        Advertiser(advertisement(4714, "0f0f0f0f-0001-same"), bind_host="127.0.0.1"),
        Advertiser(advertisement(4715, "0f0f0f0f-0002-same"), bind_host="127.0.0.1"),
    ):
        first = await until_heard(lambda told: told.port == 4714)
        second = await until_heard(lambda told: told.port == 4715)
    assert first.instance != second.instance


async def test_no_secret_and_no_exact_memory_is_advertised() -> None:
    advertiser = Advertiser(advertisement(4716), bind_host="127.0.0.1")
    properties = advertiser._service().properties
    assert set(properties) == {b"v", b"id", b"name", b"mem", b"fp"}


def announcement(instance: str, port: int, text: bytes) -> DNSOutgoing:
    """Write an mDNS answer by hand: the library refuses to register what a rogue may send."""
    host = f"rogue-{port}.local."
    out = DNSOutgoing(0x8400)
    for record in (
        DNSPointer(SERVICE_TYPE, 12, 1, 120, instance),
        DNSService(instance, 33, 1, 120, 0, 0, port, host),
        DNSText(instance, 16, 1, 120, text),
        DNSAddress(host, 1, 1, 120, socket.inet_aton("127.0.0.1")),
    ):
        out.add_answer_at_time(record, 0)
    return out


async def test_hostile_services_on_the_network_neither_end_nor_fool_the_browser() -> None:
    opened = open_zeroconf(("127.0.0.1",))
    bad_text = b"\xc8id=" + b"\xff\xfe" * 98 + b"z\x0cname=\x1b[2Jxyz\xff\x00\x05=nope"
    rogues = [
        announcement(f"\x1b]0;evil\x07.{SERVICE_TYPE}", 4720, b""),
        announcement(f"a.b.c..{SERVICE_TYPE}", 4721, b"\xff" * 1000),
        announcement(f"\u202eknil.{SERVICE_TYPE}", 4722, bad_text),
    ]

    async def babble() -> None:
        await opened.zeroconf.async_wait_for_start()
        while True:
            for rogue in rogues:
                opened.zeroconf.async_send(rogue)
            await asyncio.sleep(0.3)

    babbling = asyncio.create_task(babble())
    try:
        told = await until_heard(lambda told: told.port == 4722)
        async with Advertiser(advertisement(4718, "honest-1"), bind_host="127.0.0.1"):
            await until_heard(lambda told: told.port == 4718)
    finally:
        babbling.cancel()
        await opened.async_close()
    assert told.name == "\N{REPLACEMENT CHARACTER}[2Jxyz"
    assert told.instance.isprintable()
    assert told.node_id is not None
    assert told.node_id.isprintable()
    assert len(told.node_id) <= 64
