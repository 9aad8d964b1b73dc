"""An internet on one machine: hosts with public addresses, and homes behind routers.

Every host is a network namespace. A home's router translates addresses, lets nothing in that was
not asked for, and lets nothing out but TCP to port 443. All homes use the same private addresses.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_IP = shutil.which("ip") or "/sbin/ip"
_NFT = shutil.which("nft") or "/usr/sbin/nft"
_STOP_SECONDS = 20.0
PUBLIC = "203.0.113."
LAPTOP = "192.168.1.2"

_ROUTER_RULES = """
table ip home {
  chain nat {
    type nat hook postrouting priority 100;
    oifname "wan" masquerade
  }
  chain through {
    type filter hook forward priority 0; policy drop;
    ct state established,related accept
    iifname "lan" oifname "wan" tcp dport 443 accept
  }
  chain in {
    type filter hook input priority 0; policy accept;
    iifname "wan" ct state new drop
  }
}
"""


@dataclass
class Host:
    """A machine: a network namespace, a home folder of its own, and perhaps one core."""

    name: str
    namespace: str
    address: str
    home: Path
    environment: dict[str, str] = field(default_factory=dict)
    core: int | None = None

    def start(self, *command: str, log: Path | None = None) -> "subprocess.Popen[str]":
        """Start a program here; its output goes to ``log``, or else to pipes."""
        with contextlib.ExitStack() as stack:
            target = subprocess.PIPE if log is None else stack.enter_context(log.open("a"))
            return subprocess.Popen(
                [_IP, "netns", "exec", self.namespace, *self._on_its_core(), *command],
                stdin=subprocess.DEVNULL,
                stdout=target,
                stderr=target,
                text=True,
                env=self._environment(),
            )

    def _on_its_core(self) -> list[str]:
        # As on a machine of its own: else the threads of one host wait for those of another.
        if self.core is None:
            return []
        cores = sorted(os.sched_getaffinity(0))
        return ["taskset", "-c", str(cores[self.core % len(cores)])]

    def linkcpp(self, *words: str, log: Path | None = None) -> "subprocess.Popen[str]":
        """Start ``linkcpp`` here."""
        return self.start(sys.executable, "-m", "linkcpp.cli.main", *words, log=log)

    def run(self, *words: str, code: int = 0, seconds: float = 300.0) -> str:
        """Run ``linkcpp`` here to its end; returns what it printed."""
        process = self.linkcpp(*words)
        out, errors = process.communicate(timeout=seconds)
        assert process.returncode == code, f"{words}: {out}\n{errors}"
        return out if code == 0 else out + errors

    def _environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("LINKCPP_")}
        own = {"LINKCPP_HOME": str(self.home), "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
        return kept | own | self.environment


class Internet:
    """Makes hosts, and takes them away again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._prefix = f"lc{os.getpid()}"
        self._namespaces: list[str] = []
        self._etc: list[Path] = []
        self._next_public = 10
        self._backbone = self._namespace("core")
        _ip("-n", self._backbone, "link", "add", "core", "type", "bridge")
        _ip("-n", self._backbone, "link", "set", "core", "up")

    def public_host(self, name: str) -> Host:
        """Make a host with a public address and no router."""
        namespace = self._namespace(name)
        address = self._connect(namespace, "wan")
        return Host(name, namespace, address, self.folder / name)

    def home_host(self, name: str) -> Host:
        """Make a host in a home of its own: behind a router that only lets 443 out."""
        router, laptop = self._namespace(f"{name}-r"), self._namespace(name)
        self._connect(router, "wan")
        _ip(
            "link",
            "add",
            "lan",
            "netns",
            router,
            "type",
            "veth",
            "peer",
            "name",
            "lan",
            "netns",
            laptop,
        )
        for namespace, address in ((router, "192.168.1.1"), (laptop, LAPTOP)):
            _ip("-n", namespace, "address", "add", f"{address}/24", "dev", "lan")
            _ip("-n", namespace, "link", "set", "lan", "up")
        _ip("-n", laptop, "route", "add", "default", "via", "192.168.1.1")
        _in(router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        _in(router, _NFT, "-f", "-", stdin=_ROUTER_RULES)
        return Host(name, laptop, LAPTOP, self.folder / name)

    def router(self, home: Host) -> Host:
        """Return the router of a home."""
        return Host(f"{home.name}-r", f"{home.namespace}-r", "", self.folder / f"{home.name}-r")

    def name(self, addresses: Mapping[str, str]) -> None:
        """Let every host find these domains at their addresses."""
        lines = [f"{address} {domain}\n" for domain, address in addresses.items()]
        for namespace in self._namespaces:
            etc = Path("/etc/netns") / namespace
            etc.mkdir(parents=True, exist_ok=True)
            self._etc.append(etc)
            (etc / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))

    def readdress(self, host: Host) -> None:
        """Give a home's router another public address, as providers do at night."""
        router = f"{host.namespace}-r"
        _ip("-n", router, "address", "flush", "dev", "wan")
        self._give_address(router, "wan")
        # What the router knew of its connections goes with the address.
        _in(router, _NFT, "flush", "ruleset")
        _in(router, _NFT, "-f", "-", stdin=_ROUTER_RULES)

    @contextlib.contextmanager
    def cut(self, host: Host) -> Iterator[None]:
        """Lose every packet between a home and the internet while the block runs."""
        router = f"{host.namespace}-r"
        _in(router, _NFT, "insert rule ip home through drop")
        try:
            yield
        finally:
            _in(router, _NFT, "flush", "ruleset")
            _in(router, _NFT, "-f", "-", stdin=_ROUTER_RULES)

    def close(self) -> None:
        """Take all hosts away; whatever runs there must have been ended."""
        for namespace in self._namespaces:
            subprocess.run([_IP, "netns", "delete", namespace], capture_output=True, check=False)
        for etc in self._etc:
            shutil.rmtree(etc, ignore_errors=True)

    def _namespace(self, name: str) -> str:
        namespace = f"{self._prefix}-{name}"
        _ip("netns", "add", namespace)
        self._namespaces.append(namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")
        return namespace

    def _connect(self, namespace: str, interface: str) -> str:
        # An interface's name has at most 15 characters.
        port = f"port{self._next_public}"
        cable = ("link", "add", port, "netns", self._backbone, "type", "veth")
        _ip(*cable, "peer", "name", interface, "netns", namespace)
        _ip("-n", self._backbone, "link", "set", port, "master", "core")
        _ip("-n", self._backbone, "link", "set", port, "up")
        return self._give_address(namespace, interface)

    def _give_address(self, namespace: str, interface: str) -> str:
        address = f"{PUBLIC}{self._next_public}"
        self._next_public += 1
        _ip("-n", namespace, "address", "add", f"{address}/24", "dev", interface)
        _ip("-n", namespace, "link", "set", interface, "up")
        return address


@contextlib.contextmanager
def internet(folder: Path) -> Iterator[Internet]:
    """Make an internet, or skip the test with the reason why this machine cannot have one."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for program in (_IP, _NFT):
        if not Path(program).exists():
            pytest.skip(f"{program} is not installed (iproute2, nftables)")
    made: Internet | None = None
    try:
        try:
            made = Internet(folder)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not to be had here: {error.stderr.strip()}")
        yield made
    finally:
        if made is not None:
            made.close()


@contextlib.contextmanager
def ending(process: "subprocess.Popen[str]") -> Iterator["subprocess.Popen[str]"]:
    """End a program with the block: kindly first."""
    try:
        yield process
    finally:
        end(process)


def end(process: "subprocess.Popen[str]", number: int = signal.SIGINT) -> None:
    """End a program and wait for it."""
    if process.poll() is None:
        process.send_signal(number)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_SECONDS)


def _in(namespace: str, *words: str, stdin: str | None = None) -> None:
    subprocess.run(
        [_IP, "netns", "exec", namespace, *words],
        input=stdin,
        capture_output=True,
        text=True,
        check=True,
    )


def _ip(*words: str) -> None:
    subprocess.run([_IP, *words], capture_output=True, text=True, check=True)
