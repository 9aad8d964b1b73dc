"""Two hosts on one machine: network namespaces joined by a virtual cable."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

_IP = shutil.which("ip") or "/sbin/ip"


class Host(NamedTuple):
    """A network namespace with a home of its own; ``address`` is its end of the cable."""

    namespace: str
    address: str
    home: Path
    token_file: Path

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        """Start Python with these arguments on this host."""
        return subprocess.Popen(
            [_IP, "netns", "exec", self.namespace, sys.executable, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ
            | {
                "LINKCPP_HOME": str(self.home),
                "LINKCPP_TOKEN_FILE": str(self.token_file),
                "PYTHONUNBUFFERED": "1",
            }
            | environment,
        )

    @contextlib.contextmanager
    def running(
        self, *words: str, until: str, **environment: str
    ) -> Iterator[subprocess.Popen[str]]:
        """Run Python on this host, ready as soon as it has printed ``until``."""
        process = self.start(*words, **environment)
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            if not any(until in line for line in process.stdout):
                pytest.fail(f"{words} ended: {process.stderr.read()}")
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=15)
            process.kill()
            process.communicate()

    @contextlib.contextmanager
    def agent(self, *options: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
        """Run a real node agent on this host."""
        words = ("-m", "linkcpp.cli.main", "node", *options)
        with self.running(*words, until="Ctrl-C stops it", **environment) as process:
            yield process

    def discover(self, *options: str) -> list[dict[str, Any]]:
        """Run ``linkcpp discover --json`` on this host; returns the nodes."""
        process = self.start("-m", "linkcpp.cli.main", "discover", "--json", *options)
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        nodes: list[dict[str, Any]] = json.loads(out)["nodes"]
        return nodes

    def discover_until(
        self, are_there: Callable[[list[dict[str, Any]]], object]
    ) -> list[dict[str, Any]]:
        """Discover until nodes are as wanted: a busy machine may be late for one search."""
        for _ in range(20):
            if are_there(nodes := self.discover()):
                break
        return nodes


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Make two hosts that share a network, each with a ``docker0`` at the same private address."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if not Path(_IP).exists():
        pytest.skip("the program `ip` (iproute2) is not installed")
    names = [f"linkcpp-{os.getpid()}-{end}" for end in ("a", "b")]
    addresses = ["10.77.0.1", "10.77.0.2"]
    try:
        for name in names:
            _ip("netns", "add", name)
            # No detection of duplicates: a link-local address is then usable at once.
            _in(name, "sysctl", "-qw", "net.ipv6.conf.default.accept_dad=0")
        cable = ("link", "add", "cable", "netns", names[0], "type", "veth")
        _ip(*cable, "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, addresses, strict=True):
            _ip("-n", name, "link", "add", "docker0", "type", "bridge")
            # With a container's cable in it, as an empty bridge is down.
            _ip("-n", name, "link", "add", "inside", "type", "veth", "peer", "name", "outside")
            _ip("-n", name, "link", "set", "outside", "master", "docker0")
            _ip("-n", name, "address", "add", "172.17.0.1/16", "dev", "docker0")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for interface in ("lo", "inside", "outside", "docker0", "cable"):
                _ip("-n", name, "link", "set", interface, "up")
        one, two = (
            Host(name, address, folder / name, folder / "token")
            for name, address in zip(names, addresses, strict=True)
        )
        yield one, two
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not to be had here: {error.stderr.strip()}")
    finally:
        for name in names:
            subprocess.run([_IP, "netns", "delete", name], capture_output=True, check=False)


def _in(name: str, *words: str) -> None:
    _ip("netns", "exec", name, *words)


def _ip(*words: str) -> None:
    subprocess.run([_IP, *words], capture_output=True, text=True, check=True)
