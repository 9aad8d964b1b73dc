"""The internet of the tests is what it says: otherwise the tests above it would prove nothing."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.internet.network import Host, Internet, ending, internet

pytestmark = pytest.mark.slow

_LISTEN = """
import socket, sys
s = socket.create_server(("0.0.0.0", int(sys.argv[1])))
print("listens", flush=True)
while True:
    s.accept()[0].sendall(b"here")
"""
_CONNECT = """
import socket, sys
try:
    print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 1).recv(4).decode())
except OSError as error:
    print("nobody")
"""


def reaches(one: Host, address: str, port: int) -> bool:
    out, _ = one.start("python3", "-c", _CONNECT, address, str(port)).communicate(timeout=20)
    return out.strip() == "here"


def listening(host: Host, port: int) -> AbstractContextManager[object]:
    process = host.start("python3", "-c", _LISTEN, str(port))
    assert process.stdout is not None
    assert process.stdout.readline() == "listens\n"
    return ending(process)


def router_address(network: Internet, home: Host) -> str:
    process = network.router(home).start("ip", "-4", "-o", "address", "show", "dev", "wan")
    return process.communicate(timeout=20)[0].split()[3].partition("/")[0]


def test_a_home_reaches_port_443_only_and_nobody_reaches_into_it(tmp_path: Path) -> None:
    with internet(tmp_path) as network:
        server, home = network.public_host("hub"), network.home_host("home")
        with listening(server, 443), listening(server, 8443), listening(home, 443):
            assert reaches(home, server.address, 443)
            assert not reaches(home, server.address, 8443)
            assert not reaches(server, router_address(network, home), 443)
            with network.cut(home):
                assert not reaches(home, server.address, 443)
            assert reaches(home, server.address, 443)
            before = router_address(network, home)
            network.readdress(home)
            assert router_address(network, home) != before
            assert reaches(home, server.address, 443)
