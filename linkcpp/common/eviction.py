"""Whose connection makes room for a new one. Pure.

Strangers are connections that have shown no token: they must not keep out those who have one, and
the one who comes next may be such. So a new connection is always taken, and another one goes.
"""

import ipaddress
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from linkcpp.common.callers import network_of


class ConnectionInfo(NamedTuple):
    """A connection, by the order in which it came.

    ``is_waiting``: nothing is done for it, since the head of its (next) request is not whole.
    """

    number: int
    host: str
    is_waiting: bool


class ConnectionLimits(NamedTuple):
    """How many strangers there may be, and how many of one address.

    An address that many may share, as behind a proxy, has no bound of its own: what is private.
    """

    strangers: int
    strangers_of_address: int


def connection_to_evict(
    strangers: Iterable[ConnectionInfo], limits: ConnectionLimits
) -> ConnectionInfo | None:
    """Return the stranger whose connection has to go, ``None`` while there is room.

    It is one of the address that has too many, else of the one that has the most; of those the
    oldest that waits, else the oldest. The newest stays: it had no time to show what it has.
    """
    by_age = sorted(strangers)
    addresses = {each.number: network_of(each.host) for each in by_age}
    counts = Counter(addresses.values())
    crowded = {
        addresses[each.number]
        for each in by_age
        if counts[addresses[each.number]] > limits.strangers_of_address
        and not _may_be_shared(each.host)
    }
    if not crowded:
        if len(by_age) <= limits.strangers:
            return None
        most = max(counts.values())
        crowded = {address for address, count in counts.items() if count == most}
    older = by_age[:-1]
    candidates = [each for each in older if addresses[each.number] in crowded] or older
    return min(candidates, key=lambda each: (not each.is_waiting, each.number), default=None)


def _may_be_shared(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_private
    except ValueError:
        return True
