"""Ports for servers that tests start."""

from linkcpp.common.sockets import HeldPort, hold_port

_held: list[HeldPort] = []


def free_port() -> int:
    """Return a port of the loopback interface, kept from others until this process ends."""
    _held.append(hold_port())
    return _held[-1].number
