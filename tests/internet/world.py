"""A hub on 443, a coordinator, and homes whose machines join: driven by what people type."""

import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from linkcpp.common.resources import resource_folder
from linkcpp.engine.records import EngineLocation
from tests.internet.network import Host, Internet, end, internet
from tests.internet.web import DOMAIN, certificates, nginx
from tests.launch.swarm import wait_until

HUB_URL = f"https://{DOMAIN}"
HUB_PORT = 8720
NAME = "wan"


class World:
    """All machines. Programs that were started end with ``close``."""

    def __init__(self, network: Internet, folder: Path, engine: EngineLocation) -> None:
        assert engine.llama_server is not None
        self.url = HUB_URL
        self.network = network
        self.folder = folder
        self.hub = network.public_host("hub")
        self.coordinator = network.public_host("coordinator")
        self.homes = {name: network.home_host(name) for name in ("attic", "cellar")}
        self.office = network.public_host("office")
        network.name(DOMAIN, self.hub.address)
        authority = certificates(folder / "tls")
        for core, host in enumerate((self.coordinator, *self.homes.values(), self.office)):
            host.core = core
            host.environment |= {
                "SSL_CERT_FILE": str(authority),
                "LINKCPP_ENGINE": str(engine.llama_server.parent),
            }
        self.templates = self._one_thread_templates()
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._closing = contextlib.ExitStack()

    def start(self) -> None:
        """Bring up the hub behind nginx, and let the coordinator join."""
        self.start_hub()
        self._closing.enter_context(nginx(self.hub, self.folder / "tls", hub_port=HUB_PORT))
        self.coordinator.run("join", HUB_URL, "--token", self.token("backbone"))

    def start_hub(self) -> None:
        """Start the hub with its gateway; it was perhaps killed before."""
        words = ("hub", "--gateway", "--port", str(HUB_PORT))
        self._start("hub", self.hub, *words, until="Ctrl-C stops it")

    def kill_hub(self) -> None:
        """Kill the hub, and the gateway with it, without a warning."""
        end(self._running.pop("hub"), signal.SIGKILL)

    def token(self, role: str) -> str:
        """Make a join token, as the hub's operator does."""
        return self.hub.run("hub", "token", "create", "--role", role).strip().splitlines()[0]

    def join(self, name: str) -> None:
        """Let a machine join and serve; a second time it needs no token."""
        home = self.office if name == self.office.name else self.homes[name]
        is_new = not (home.home / "config" / "hubs").exists()
        # Room for some of the small model's experts besides what programs take, not for all.
        words = ["join", HUB_URL, "--name", name, "--memory", "375MB"]
        if is_new:
            words += ["--token", self.token("node")]
        self._start(name, home, *words, until="Ctrl-C stops it")
        wait_until(lambda: name in self.ready_nodes(), self._running[name])

    def way_to(self, name: str) -> str:
        """Open an edge from the coordinator to a node, and return which way it takes."""
        (url,) = self.ready_nodes()[name]["urls"]
        process = self.coordinator.start(sys.executable, "-m", "tests.internet.way", url)
        out, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        return out

    def stranger(self) -> Host:
        """Return the coordinator's machine as somebody else uses it."""
        return dataclasses.replace(self.coordinator, home=self.folder / "stranger")

    @staticmethod
    def let_pass(seconds: float) -> None:
        """Let time pass while something stays broken."""
        time.sleep(seconds)

    def ready_nodes(self) -> dict[str, Any]:
        """Return what the coordinator finds at the hub and can use, by name."""
        out = self.coordinator.run("discover", "--hub", HUB_URL, "--no-mdns", "--json")
        nodes = json.loads(out)["nodes"]
        return {node["name"]: node for node in nodes if node["status"] == "ready"}

    def offers(self, name: str) -> int:
        """Return the memory that a node offers, in bytes, as the hub knows it."""
        node = self.ready_nodes().get(name)
        return sum(d["offered_bytes"] for d in node["record"]["devices"]) if node else 0

    def plan(self, model: str, *options: str) -> Path:
        """Plan a model over the hub's nodes in mode experts."""
        path = self.folder / "plan.json"
        words = ("plan", "--model", model, "--mode", "experts", "--context", "1024", "--no-mdns")
        self.coordinator.run(*words, "--hub", HUB_URL, *options, "-o", str(path))
        return path

    def launch(self, plan: Path, *options: str) -> str:
        """Launch it; returns the API's URL in the coordinator's namespace."""
        words = ("launch", str(plan), "--name", NAME, "--port", "0", "--no-mdns", "--json")
        out = self.coordinator.run(*words, "--templates", self.templates, *options)
        return str(json.loads(out)["api_url"])

    def stop(self) -> None:
        """Stop the deployment."""
        self.coordinator.run("stop", NAME)

    def state(self) -> dict[str, Any]:
        """Return the deployment's state."""
        report = json.loads(self.coordinator.run("status", NAME, "--json"))
        state: dict[str, Any] = report["state"]
        return state

    def tokens(self, url: str, count: int) -> list[Any]:
        """Ask the API for greedy tokens with their log-probabilities."""
        return self.answer_of(self.ask(url, count))

    def ask(self, url: str, count: int) -> "subprocess.Popen[str]":
        """Begin to ask; ``answer_of`` waits for the answer."""
        return self.coordinator.start(sys.executable, "-m", "tests.internet.ask", url, str(count))

    def answer_of(self, asking: "subprocess.Popen[str]") -> list[Any]:
        """Return the tokens that were asked for."""
        out, errors = asking.communicate(timeout=300)
        assert asking.returncode == 0, errors
        answer: list[Any] = json.loads(out)
        return answer

    def while_asking(self, url: str, count: int, what: Callable[[], None]) -> list[Any]:
        """Do something once tokens flow; returns the answer."""
        before = self.state()["experts"]["dispatch"]["call_count"]
        asking = self.ask(url, count)
        wait_until(lambda: self.state()["experts"]["dispatch"]["call_count"] > before)
        what()
        return self.answer_of(asking)

    def close(self) -> None:
        """End everything that runs."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.coordinator.run("stop", "--all")
        for process in reversed(self._running.values()):
            end(process)
        self._closing.close()

    def log(self, name: str) -> str:
        """Return what a machine's program has printed."""
        return (self.folder / f"{name}.log").read_text()

    def _start(self, name: str, host: Host, *words: str, until: str) -> None:
        log = self.folder / f"{name}.log"
        before = log.read_text().count(until) if log.exists() else 0
        process = self._running[name] = host.linkcpp(*words, log=log)
        wait_until(lambda: log.read_text().count(until) > before, process)

    def _one_thread_templates(self) -> str:
        # All machines share the cores of one: threads of one would wait for those of another.
        own = self.folder / "templates"
        own.mkdir()
        shipped = (resource_folder("templates") / "llama-server.args.j2").read_text()
        (own / "llama-server.args.j2").write_text(shipped.rstrip() + "\n--threads\n1\n")
        return str(own)


@contextlib.contextmanager
def world(folder: Path, engine: EngineLocation) -> Iterator[World]:
    """Make the world, its hub and its coordinator."""
    with internet(folder) as network:
        made = World(network, folder, engine)
        try:
            made.start()
            yield made
        finally:
            made.close()
