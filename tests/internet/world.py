"""A hub and gateways on 443, a coordinator, and homes whose machines join: driven by what people
type.
"""

import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from linkcpp.common.resources import resource_folder
from linkcpp.engine.records import EngineLocation
from linkcpp.launch.experts.records import ExpertsState
from linkcpp.launch.folder import DeploymentFolder
from tests.internet import line
from tests.internet.asking import Answer, Asking
from tests.internet.network import Host, Internet, end, internet
from tests.internet.web import certificates, nginx
from tests.launch.swarm import wait_until

HUB_DOMAIN = "hub.example"
HUB_URL = f"https://{HUB_DOMAIN}"
HUB_PORT = 8720
GATEWAY_PORT = 8721
LINE_PORT = 8722
NAME = "wan"
# When so many tokens have come, an answer is under way.
_FEW_TOKENS = 20
_SERVES = "Ctrl-C stops it"
_GET = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
_UP = 'linkcpp_dispatch_worker_up{worker="'


class World:
    """All machines. Programs that were started end with ``close``.

    There are two gateways, north and south; what comes to the southern one's passes a line that can
    be bad.
    """

    def __init__(self, network: Internet, folder: Path, engine: EngineLocation) -> None:
        assert engine.llama_server is not None
        self.url = HUB_URL
        self.network = network
        self.folder = folder
        self.hub = network.public_host("hub")
        self.gateways = {name: network.public_host(name) for name in ("north", "south")}
        self.coordinator = network.public_host("coordinator")
        self.homes = {name: network.home_host(name) for name in ("attic", "cellar")}
        self.office = network.public_host("office")
        addresses = {_domain(name): host.address for name, host in self.gateways.items()}
        addresses[HUB_DOMAIN] = self.hub.address
        network.name(addresses)
        authority = str(certificates(folder / "tls", list(addresses)))
        for host in self.gateways.values():
            host.environment["SSL_CERT_FILE"] = authority
        for core, host in enumerate((self.coordinator, *self.homes.values(), self.office)):
            host.core = core
            host.environment |= {
                "SSL_CERT_FILE": authority,
                "LINKCPP_ENGINE": str(engine.llama_server.parent),
            }
        self.templates = self._one_thread_templates()
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._tokens: dict[str, str] = {}
        self._asked = 0
        self._closing = contextlib.ExitStack()

    def start(self, model: Path, model_name: str) -> None:
        """Bring up a hub that has the model, the northern gateway, the coordinator and the homes.

        The hub does not relay by itself.
        """
        self._serve_tls(self.hub, HUB_DOMAIN, HUB_PORT)
        self.start_hub()
        tokens = {"backbone": 1, "node": len(self.homes) + 1, "gateway": len(self.gateways)}
        self._tokens = dict(zip(tokens, _at_once(self._token, tokens.items()), strict=True))
        self.start_gateway("north")
        token = self._tokens["backbone"]
        commands = (
            lambda: self.hub.run("hub", "models", "add", str(model), "--name", model_name),
            lambda: self.coordinator.run("join", HUB_URL, "--token", token),
            *(lambda name=name: self._start_node(name) for name in self.homes),
        )
        _at_once(lambda command: command(), commands)
        wait_until(lambda: self.ready_nodes().keys() >= self.homes.keys())

    def start_hub(self, *options: str) -> None:
        """Start the hub; it was perhaps killed before."""
        self._start("hub", self.hub, "hub", "--port", str(HUB_PORT), *options, until=_SERVES)

    def kill_hub(self) -> None:
        """Kill the hub, and the gateway in its process with it, without a warning."""
        end(self._running.pop("hub"), signal.SIGKILL)

    def start_gateway(self, name: str) -> None:
        """Start a gateway, which was perhaps killed before, and wait until the hub knows of it."""
        host = self.gateways[name]
        words = ["gateway", "--hub", HUB_URL, "--name", name, "--port", str(GATEWAY_PORT)]
        words += ["--url", f"https://{_domain(name)}"]
        if not host.home.exists():
            words += ["--token", self._tokens["gateway"]]
            self._connect_gateway(name, host)
        self._start(name, host, *words, until="the hub knows of this gateway")

    def kill_gateway(self, name: str) -> None:
        """Kill a gateway without a warning."""
        end(self._running.pop(name), signal.SIGKILL)

    def gateway_id(self, name: str) -> str:
        """Return the id of a gateway."""
        return (self.gateways[name].home / "state" / "node-id").read_text().strip()

    def hub_id(self) -> str:
        """Return the id of the hub, which that of the gateway in its process is too."""
        identity = json.loads((self.hub.home / "data" / "hub" / "identity.json").read_text())
        return str(identity["hub_id"])

    @contextlib.contextmanager
    def bad_line(self) -> Iterator[None]:
        """Let the southern gateway's line lose pieces and cut connections meanwhile."""
        carrying = self._running["line"]
        carrying.send_signal(signal.SIGUSR1)
        try:
            yield
        finally:
            carrying.send_signal(signal.SIGUSR2)

    def cut_count(self) -> int:
        """How often connections were cut by the southern gateway's line."""
        return self.log("line").count(line.CUT)

    def join(self, name: str) -> None:
        """Let a machine join and serve, unless it does."""
        if name not in self._running:
            self._start_node(name)
            wait_until(lambda: name in self.ready_nodes(), self._running[name])

    def way_to(self, name: str) -> str:
        """Open an edge from the coordinator to a node, and return which way it takes."""
        (url,) = self.ready_nodes()[name]["urls"]
        process = self.coordinator.start(sys.executable, "-m", "tests.internet.way", url)
        out, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        return out

    def stranger(self) -> Host:
        """Return the coordinator's machine as somebody else uses it."""
        return dataclasses.replace(self.coordinator, home=self.folder / "stranger")

    @contextlib.contextmanager
    def cut(self, name: str, seconds: float) -> Iterator[None]:
        """Cut a home off for so long at least, or until the block has ended."""
        began = time.monotonic()
        with self.network.cut(self.homes[name]):
            yield
            time.sleep(max(0.0, began + seconds - time.monotonic()))

    def ready_nodes(self) -> dict[str, Any]:
        """Return what the coordinator finds at the hub and can use, by name."""
        process = self.coordinator.linkcpp("discover", "--hub", HUB_URL, "--no-mdns", "--json")
        out, errors = process.communicate(timeout=300)
        # 1: the hub does not answer now, as where a test has just killed it.
        assert process.returncode in (0, 1), errors
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
        """Stop what was launched."""
        self.coordinator.run("stop", "--all")

    def status(self) -> str:
        """Return what ``linkcpp status`` shows of the deployment."""
        return self.coordinator.run("status", NAME)

    def experts(self) -> ExpertsState:
        """Return the state of the deployment's experts, which ``linkcpp status`` reads."""
        path = self.coordinator.home / "state" / "deployments" / NAME
        experts = DeploymentFolder(path).read_state().experts
        assert experts is not None
        return experts

    def is_used(self, url: str, name: str) -> bool:
        """Tell whether the deployment's virtual device uses a home's worker at this moment."""
        process = self.coordinator.start(sys.executable, "-c", _GET, f"{url}/linkcpp/metrics")
        told, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        ups = [words for words in told.splitlines() if words.startswith(f"{_UP}{name}.")]
        return any(float(words.split()[-1]) == 1 for words in ups)

    def ask(self, url: str, count: int) -> Asking:
        """Begin to ask the API for greedy tokens with their log-probabilities."""
        self._asked += 1
        output = self.folder / f"answer-{self._asked}"
        words = (sys.executable, "-m", "tests.internet.ask", url, str(count))
        return Asking(self.coordinator.start(*words, log=output), output)

    def answer(self, url: str, count: int) -> Answer:
        """Ask, and wait for the answer."""
        return self.ask(url, count).answer()

    def while_asking(self, url: str, count: int, what: Callable[[], None]) -> Answer:
        """Do something in the middle of an answer, and return the answer."""
        for _ in range(5):
            asking = self.ask(url, count)
            wait_until(lambda asking=asking: asking.token_count() >= _FEW_TOKENS)  # type: ignore[misc]
            if is_under_way := asking.token_count() < count:
                break
        assert is_under_way
        what()
        return asking.answer()

    def close(self) -> None:
        """End everything that runs."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.stop()
        _at_once(end, self._running.values())
        self._closing.close()

    def log(self, name: str) -> str:
        """Return what a machine's program has printed."""
        return (self.folder / f"{name}.log").read_text()

    def _token(self, role_and_uses: tuple[str, int]) -> str:
        role, uses = role_and_uses
        told = self.hub.run("hub", "token", "create", "--role", role, "--uses", str(uses))
        return told.strip().splitlines()[0]

    def _start_node(self, name: str) -> None:
        host = self.office if name == self.office.name else self.homes[name]
        # Room for some of the small model's experts besides what programs take, not for all.
        words = ["join", HUB_URL, "--name", name, "--memory", "476MB"]
        self._start(name, host, *words, "--token", self._tokens["node"], until=_SERVES)

    def _connect_gateway(self, name: str, host: Host) -> None:
        port = GATEWAY_PORT
        if name == "south":
            port = LINE_PORT
            words = (sys.executable, "-m", "tests.internet.line", str(port), str(GATEWAY_PORT))
            self._start_program("line", lambda log: host.start(*words, log=log), line.LISTENS)
        self._serve_tls(host, _domain(name), port)

    def _serve_tls(self, host: Host, domain: str, port: int) -> None:
        self._closing.enter_context(nginx(host, self.folder / "tls", domain, target_port=port))

    def _start(self, name: str, host: Host, *words: str, until: str) -> None:
        self._start_program(name, lambda log: host.linkcpp(*words, log=log), until)

    def _start_program(
        self, name: str, start: Callable[[Path], "subprocess.Popen[str]"], until: str
    ) -> None:
        log = self.folder / f"{name}.log"
        before = log.read_text().count(until) if log.exists() else 0
        process = self._running[name] = start(log)
        wait_until(lambda: log.read_text().count(until) > before, process)

    def _one_thread_templates(self) -> str:
        # All machines share the cores of one: threads of one would wait for those of another.
        own = self.folder / "templates"
        own.mkdir()
        shipped = (resource_folder("templates") / "llama-server.args.j2").read_text()
        (own / "llama-server.args.j2").write_text(shipped.rstrip() + "\n--threads\n1\n")
        return str(own)


@contextlib.contextmanager
def world(folder: Path, engine: EngineLocation, model: Path, model_name: str) -> Iterator[World]:
    """Make the world, with a model that its hub has."""
    with internet(folder) as network:
        made = World(network, folder, engine)
        try:
            made.start(model, model_name)
            yield made
        finally:
            made.close()


def _domain(gateway: str) -> str:
    return f"{gateway}.example"


def _at_once(do: Callable[[Any], Any], things: Iterable[Any]) -> list[Any]:
    with ThreadPoolExecutor() as pool:
        return list(pool.map(do, things))
