"""Ports that are kept for servers to come."""

import errno
import socket
import subprocess
import sys

import pytest

from linkcpp.common import sockets
from linkcpp.common.sockets import free_port, hold_port, listen

only_linux = pytest.mark.skipif(sys.platform != "linux", reason="ports are kept on Linux only")


def _connects(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@only_linux
def test_a_kept_port_is_given_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with hold_port() as held:
        monkeypatch.setattr(sockets, "_PORTS", range(held.number, held.number + 1))
        with pytest.raises(OSError, match="no port was found"):
            free_port()
        with pytest.raises(OSError, match="no port was found"):
            hold_port()
    assert free_port() == held.number


def test_a_server_listens_on_a_kept_port_again_and_again() -> None:
    with hold_port() as held:
        for _ in range(2):
            assert not _connects(held.number)
            (server,) = listen("127.0.0.1", held.number)
            with server:
                assert _connects(held.number)


def test_a_port_on_which_somebody_listens_cannot_be_kept() -> None:
    (server,) = listen("127.0.0.1", 0)
    with server, pytest.raises(OSError) as raised:
        hold_port("127.0.0.1", server.getsockname()[1])
    assert raised.value.errno == errno.EADDRINUSE


@only_linux
def test_a_process_that_inherits_a_port_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    held = hold_port()
    monkeypatch.setattr(sockets, "_PORTS", range(held.number, held.number + 1))
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=held.descriptors()) as child:
        held.close()
        with pytest.raises(OSError, match="no port was found"):
            hold_port()
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
    hold_port().close()


def test_an_address_of_another_machine_is_told_at_once() -> None:
    with pytest.raises(OSError) as raised:
        hold_port("192.0.2.1")
    assert raised.value.errno == errno.EADDRNOTAVAIL
