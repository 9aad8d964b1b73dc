"""A deployment on a LAN whose cable is pulled and whose addresses change answers on, exactly."""

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from linkcpp.launch.folder import DeploymentFolder
from linkcpp.link.handshake import cluster_psk
from linkcpp.model.inventory import read_inventory
from linkcpp.planning.costs import HOST_PROGRAM_BYTES
from tests.cluster.hosts import Host, two_hosts
from tests.cluster.peers import TOKEN
from tests.launch.swarm import PROMPT, START_SECONDS, wait_until
from tests.support import models
from tests.support.engines import prebuilt_engine

pytestmark = pytest.mark.slow

_IP = shutil.which("ip") or "/sbin/ip"
NAME = "lan"
COUNT = 300
# When so many tokens have come, an answer is under way.
FEW = 20
TRANSLATION = """
table ip router {
  chain out {
    type nat hook output priority -100
    ip daddr 192.0.2.7 tcp dport 9000 dnat to 10.77.0.32:8716
  }
}
"""
# Everything that passes a network interface, as it is on the wire.
CAPTURE = """
import socket, sys
raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
raw.bind((sys.argv[1], 0))
print("captures", flush=True)
with open(sys.argv[2], "wb", buffering=0) as file:
    while True:
        file.write(raw.recv(1 << 17))
"""


class Lan:
    """A node (far) and a coordinator (near) whose deployment keeps layers on the node."""

    def __init__(self, far: Host, near: Host, folder: Path) -> None:
        self.far = far
        self.near = near
        self.folder = folder
        engine = prebuilt_engine()
        assert engine.llama_server is not None
        self.environment = {"LINKCPP_ENGINE": str(engine.llama_server.parent)}
        self.url = ""

    def run(self, *words: str) -> str:
        """Run ``linkcpp`` on the coordinator; returns what it printed."""
        process = self.near.start("-m", "linkcpp.cli.main", *words, **self.environment)
        out, errors = process.communicate(timeout=START_SECONDS)
        assert process.returncode == 0, errors
        return out

    def launch(self, model: Path) -> None:
        """Plan, so that the node must hold layers, and launch."""
        plan = str(self.folder / "plan.json")
        bare = read_inventory(model).embedding_bytes + HOST_PROGRAM_BYTES
        words = ("plan", "--model", str(model), "--mode", "layers", "--context", "1024")
        self.run(*words, "--memory", f"{bare + 64 * 2**20}B", "--min-nodes", "1", "-o", plan)
        self.run("launch", plan, "--name", NAME, "--port", "0")
        self.url = json.loads(self.run("status", NAME, "--json"))["state"]["api_url"]

    def answer(self, what: Callable[[], None] | None = None) -> list[Any]:
        """Ask for greedy tokens, do something once some have come, and return all of them."""
        words = ("-m", "tests.internet.ask", self.url, str(COUNT))
        process = self.near.start(*words, **self.environment)
        assert process.stdout is not None
        assert process.stderr is not None
        lines = [process.stdout.readline() for _ in range(FEW)]
        if what is not None:
            what()
        # Not by communicate, which knows nothing of what readline has read ahead.
        rest, errors = process.stdout.read(), process.stderr.read()
        assert process.wait(START_SECONDS) == 0, errors
        *tokens, _ = map(json.loads, "".join((*lines, rest)).splitlines())
        return tokens

    def pull_cable(self, seconds: float) -> None:
        """Take the coordinator off the network for a while."""
        self.ip(self.near, "link", "set", "cable", "down")
        time.sleep(seconds)
        self.ip(self.near, "link", "set", "cable", "up")

    def readdress(self, host: Host, address: str) -> None:
        """Give a host another address in place of all that it had."""
        self.ip(host, "-4", "address", "flush", "dev", "cable")
        self.ip(host, "address", "add", f"{address}/24", "dev", "cable")

    def ip(self, host: Host, *words: str) -> None:
        subprocess.run(
            [_IP, "-n", host.namespace, *words], capture_output=True, text=True, check=True
        )

    def state(self) -> Any:
        """What the deployment's supervisor wrote of it last."""
        return DeploymentFolder(self.near.home / "state" / "deployments" / NAME).read_state()


@pytest.fixture(scope="module")
def lan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lan]:
    folder = tmp_path_factory.mktemp("lan")
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    with two_hosts(folder) as (far, near):
        made = Lan(far, near, folder)
        with far.agent("--name", "far", **made.environment):
            wait_until(lambda: '"ready"' in made.run("discover", "--json"))
            made.launch(models.qwen3moe())
            try:
                yield made
            finally:
                made.run("stop", "--all")


@pytest.fixture(scope="module")
def reference(lan: Lan) -> list[Any]:
    tokens = lan.answer()
    assert len(tokens) == COUNT
    return tokens


def test_neither_token_nor_prompt_nor_weights_are_to_be_read_on_the_wire(
    lan: Lan, reference: list[Any]
) -> None:
    captured = lan.folder / "captured"
    with lan.far.running("-c", CAPTURE, "cable", str(captured), until="captures"):
        lan.run("discover", "--json")
        assert lan.answer() == reference
    seen = captured.read_bytes()
    assert len(seen) > 100_000
    for secret in (TOKEN.encode(), cluster_psk(TOKEN), PROMPT.encode(), b"uthorization"):
        assert secret not in seen


@pytest.mark.parametrize("seconds", [1.0, 10.0, pytest.param(60.0, marks=pytest.mark.long)])
def test_the_answer_is_the_same_when_the_cable_is_pulled_for_a_while(
    lan: Lan, reference: list[Any], seconds: float
) -> None:
    assert lan.answer(lambda: lan.pull_cable(seconds)) == reference
    assert lan.state().restart_count == 0


def test_the_answer_is_the_same_when_the_coordinator_gets_another_address(
    lan: Lan, reference: list[Any]
) -> None:
    assert lan.answer(lambda: lan.readdress(lan.near, "10.77.0.31")) == reference
    assert lan.state().restart_count == 0


def test_the_answer_is_the_same_when_the_node_gets_another_address(
    lan: Lan, reference: list[Any]
) -> None:
    assert lan.answer(lambda: lan.readdress(lan.far, "10.77.0.32")) == reference
    assert lan.state().restart_count == 0


def test_a_node_behind_an_address_translation_is_used_at_the_translated_address(
    lan: Lan,
) -> None:
    lan.ip(lan.near, "route", "add", "192.0.2.0/24", "dev", "cable")
    netns = (_IP, "netns", "exec", lan.near.namespace)
    subprocess.run([*netns, "nft", "-f", "-"], input=TRANSLATION, text=True, check=True)
    told = json.loads(lan.run("discover", "--json", "--no-mdns", "--node", "http://192.0.2.7:9000"))
    (node,) = [node for node in told["nodes"] if node["name"] == "far"]
    assert node["status"] == "ready"
    assert node["urls"] == ["http://192.0.2.7:9000"]
