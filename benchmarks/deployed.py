"""What a user runs, beside the same without it: a deployment, bare programs, one llama-server.

    python benchmarks/deployed.py [--rounds 8] [--tokens 64] [--model MODEL.gguf]
        [--only layers|experts|bulk] [--megabytes 1024] [--before FILE] [--json]

A deployment is what `linkcpp node` and `linkcpp launch` start: agents, encrypted links, supervisor,
front. Layers over 1, 2 and 3 nodes stand beside llama-server with the same arguments on bare
rpc-servers; experts over 1 and 2 nodes beside a bare virtual device with its workers on loopback,
and beside a bare rpc-server that has all of them. One llama-server alone stands beside each.

All of a comparison runs at the same time, every program computes on one thread, and the set-ups are
asked in turns. Times are a client's: of a streamed answer, to its first token (prefill, a prompt of
500 tokens) and from there to its end (decode). Ratios and differences are those of one round;
told are the median of all rounds, least and most. Processor time is what the processes
of a set-up used while they decoded, from /proc/PID/stat, a token. Plumbing is all that is
neither a stock program nor virtual device nor worker.

Bulk: see ``bulk.py``. With ``--json`` the tables go to stderr; ``--before`` names such JSON of
another version on this machine. Linux only.
"""

import argparse
import contextlib
import http.client
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import bulk
import psutil
from deployed_report import (
    ALONE,
    BESIDE,
    DEPLOYED,
    DEVICE,
    ENGINE,
    GROUPS,
    OWN,
    PLUMBING,
    PREFILL_TOKENS,
    STOCK,
    show,
)
from processes import cpu_seconds, programs_below

from linkcpp.cluster.records import Cluster, LinkSpeed, NodeRecord
from linkcpp.engine.records import EngineLocation
from linkcpp.model.inventory import read_inventory
from linkcpp.model.slices.segments import Segment
from linkcpp.node.discovery import Discovery
from linkcpp.planning.arguments import server_arguments
from linkcpp.planning.records import Plan, PlanOptions
from linkcpp.planning.shortfall import make_plan
from tests.launch.expert_plans import expert_counts, experts_plan
from tests.launch.swarm import Swarm, single_thread_templates
from tests.support.engines import prebuilt_engine
from tests.support.models import smollm2_mixture, smollm2_path
from tests.support.rpc_servers import rpc_server
from tests.support.swarm import (
    running_device,
    running_llama_server,
    running_worker,
    worker_entry,
)

WORD = 300
MIXTURE_EXPERTS = 8
NODE_COUNTS = {"layers": (1, 2, 3), "experts": (1, 2)}
GROUP_OF = {
    "llama-server": ENGINE,
    "ggml-rpc-server": ENGINE,
    "linkcpp.dispatch": OWN,
    "linkcpp.worker": OWN,
}

_Thing = TypeVar("_Thing")


@dataclass
class Setup:
    """Something that answers at a URL, its processes' home, and what was measured, by rounds."""

    name: str
    url: str
    home: Path
    decode_ms: list[float] = field(default_factory=list)
    prefill_ms: list[float] = field(default_factory=list)
    cpu_seconds: dict[str, float] = field(default_factory=dict)

    def measure(self, tokens: int) -> None:
        """Take one round."""
        before = cpu_seconds(self.home)
        self.decode_ms.append(ask(self.url, 1, tokens)[1])
        for name, seconds in cpu_seconds(self.home).items():
            program = name.partition(": ")[2]
            self.cpu_seconds[program] = self.cpu_seconds.get(program, 0.0) + (
                seconds - before.get(name, 0.0)
            )
        self.prefill_ms.append(ask(self.url, PREFILL_TOKENS, 2)[0])


def ask(url: str, prompt_tokens: int, count: int) -> tuple[float, float]:
    """Return the milliseconds to the first token, and of each one after it."""
    body = {
        "prompt": [WORD] * prompt_tokens,
        "n_predict": count,
        "temperature": 0,
        "cache_prompt": False,
        "ignore_eos": True,
        "stream": True,
    }
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    with contextlib.closing(connection):
        begun = time.perf_counter()
        connection.request(
            "POST", "/completion", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        assert answer.status == http.client.OK, answer.read()
        first, last, line = 0.0, 0.0, b""
        for line in answer:
            if line.startswith(b"data: {"):
                last = time.perf_counter()
                first = first or last
        assert first, line
    return (first - begun) * 1e3, (last - first) / (count - 1) * 1e3


class Bench:
    """Everything that the measurements share."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.rounds: int = options.rounds
        self.tokens: int = options.tokens
        self.total_bytes: int = options.megabytes * 2**20
        self.folder = folder
        self.engine: EngineLocation = prebuilt_engine()
        self.model = smollm2_path()

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _turns(self, what: str, things: Sequence[_Thing]) -> Iterator[_Thing]:
        """Yield all of them in every round, each time another first."""
        for number in range(self.rounds):
            load = os.getloadavg()[0]
            self._say(f"{what}: round {number + 1} of {self.rounds} (load {load:.1f})")
            shift = number % len(things)
            yield from (*things[shift:], *things[:shift])

    def compare(self, mode: str, count: int) -> dict[str, Any]:
        """Measure a mode over so many nodes and what stands beside it."""
        what = f"{mode} over {count} node{'s' * (count > 1)}"
        self._say(f"{what}: starting")
        with contextlib.ExitStack() as stack:
            begin = {"layers": self._layers, "experts": self._experts}[mode]
            setups, layer_count = begin(stack, self.folder / f"{mode}-{count}", count)
            for setup in setups:
                ask(setup.url, PREFILL_TOKENS, 8)
            for setup in self._turns(what, setups):
                setup.measure(self.tokens)
        return {
            "layers": layer_count,
            "setups": self._summary(setups, BESIDE[mode], layer_count),
        }

    def _layers(
        self, stack: contextlib.ExitStack, folder: Path, count: int
    ) -> tuple[list[Setup], int]:
        model = self.model
        swarm = self._swarm(stack, folder / DEPLOYED, count)
        path = swarm.plan(model)
        plan = plan_for_alike(swarm, model, Plan.model_validate_json(path.read_text()).options)
        path.write_text(plan.model_dump_json())
        setups = [self._deployed(swarm, path)]
        setups.append(self._alone(stack, folder, model, swarm))
        home = self._home(folder, STOCK)
        endpoints = {
            index: f"127.0.0.1:{stack.enter_context(rpc_server(self.engine))}"
            for index, stage in enumerate(plan.stages)
            if not stage.is_coordinator
        }
        assert len(endpoints) == count
        arguments = server_arguments(plan, endpoints)
        setups.append(self._bare(stack, STOCK, model, home, arguments))
        return setups, plan.model.layer_count

    def _experts(
        self, stack: contextlib.ExitStack, folder: Path, count: int
    ) -> tuple[list[Setup], int]:
        is_mixture = any(layer.expert_count for layer in read_inventory(self.model).layers)
        model = self.model if is_mixture else smollm2_mixture(MIXTURE_EXPERTS)
        counts = expert_counts(model)
        total = min(counts.values())
        swarm = self._swarm(stack, folder / DEPLOYED, count)
        ranges = {
            name: (total * k // count, total * (k + 1) // count - 1)
            for k, name in enumerate(swarm.agents)
        }
        path = experts_plan(swarm, model, {name: [held] for name, held in ranges.items()})
        plan = Plan.model_validate_json(path.read_text())
        setups = [self._deployed(swarm, path, "--fallback-memory", "0")]
        setups.append(self._alone(stack, folder, model, swarm))

        home = self._home(folder, DEVICE)
        workers = []
        for name, (first, last) in ranges.items():
            held = [Segment(layer=layer, first=first, last=last) for layer in counts]
            worker = running_worker(self.engine, model, held, home, name=name)
            workers.append(worker_entry(name, stack.enter_context(worker)))
        device = stack.enter_context(running_device(self.engine, model, workers, home))
        arguments = server_arguments(plan, {}, experts_at=f"127.0.0.1:{device.port}")
        setups.append(self._bare(stack, DEVICE, model, home, arguments))

        home = self._home(folder, STOCK)
        port = stack.enter_context(rpc_server(self.engine))
        arguments = server_arguments(plan, {}, experts_at=f"127.0.0.1:{port}")
        setups.append(self._bare(stack, STOCK, model, home, arguments))
        return setups, len(counts)

    def _swarm(self, stack: contextlib.ExitStack, home: Path, count: int) -> Swarm:
        swarm = Swarm(home, self.engine)
        # Each machine then counts one core, and its programs get one thread.
        swarm.has_own_cores = True
        stack.callback(swarm.close)
        swarm.start_agents(*(f"node-{number}" for number in range(1, count + 1)))
        return swarm

    def _deployed(self, swarm: Swarm, plan: Path, *options: str) -> Setup:
        templates = single_thread_templates(swarm.folder)
        launched = swarm.launch(plan, DEPLOYED, "--templates", templates, "--json", *options)
        # Where they run from now on is up to the system, as with the bare programs.
        for _, process in programs_below(swarm.folder):
            for thread in process.threads():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, os.sched_getaffinity(0))
        return Setup(DEPLOYED, launched.json["api_url"], swarm.folder)

    def _home(self, folder: Path, name: str) -> Path:
        """Make a home for the programs that are started next; they are found by it."""
        home = folder / name.replace(" ", "-")
        home.mkdir(parents=True)
        os.environ["LINKCPP_HOME"] = str(home)
        return home

    def _alone(self, stack: contextlib.ExitStack, folder: Path, model: Path, swarm: Swarm) -> Setup:
        plan = Plan.model_validate_json(swarm.plan(model, mode="single").read_text())
        home = self._home(folder, ALONE)
        return self._bare(stack, ALONE, model, home, server_arguments(plan, {}))

    def _bare(
        self,
        stack: contextlib.ExitStack,
        name: str,
        model: Path,
        home: Path,
        arguments: Sequence[str],
    ) -> Setup:
        server = running_llama_server(self.engine, model, home, extra=arguments)
        return Setup(name, stack.enter_context(server).url, home)

    def _summary(
        self, setups: list[Setup], beside: str, layer_count: int
    ) -> dict[str, dict[str, Any]]:
        reference = next(setup for setup in setups if setup.name == beside)
        return {
            setup.name: {
                "decode_ms": spread(setup.decode_ms),
                "decode_ratio": spread(setup.decode_ms, reference.decode_ms, lambda a, b: a / b),
                "layer_ms_more": spread(
                    setup.decode_ms, reference.decode_ms, lambda a, b: (a - b) / layer_count
                ),
                "prefill_ms": spread(setup.prefill_ms),
                "prefill_ratio": spread(setup.prefill_ms, reference.prefill_ms, lambda a, b: a / b),
                "cpu_ms": self._cpu_ms(setup),
            }
            for setup in setups
        }

    def _cpu_ms(self, setup: Setup) -> dict[str, dict[str, float]]:
        """Return processor milliseconds a token, by group and program."""
        groups: dict[str, dict[str, float]] = {group: {} for group in GROUPS}
        for name, seconds in sorted(setup.cpu_seconds.items()):
            groups[GROUP_OF.get(name, PLUMBING)][name] = seconds / self.rounds / self.tokens * 1e3
        return groups

    def bulk(self) -> dict[str, Any]:
        """Measure every way for weights, in turns."""
        self._say("bulk: starting")
        found: dict[str, list[float]] = {}
        with bulk.ways(self.engine, self.folder, self.total_bytes) as ways:
            for name, send in self._turns("bulk", list(ways.items())):
                found.setdefault(name, []).append(send())
        return {
            name: {
                "mb_per_second": spread(rates),
                "of_tls": spread(rates, found[bulk.TLS], lambda a, b: a / b),
                "of_tcp": spread(rates, found[bulk.TCP], lambda a, b: a / b),
            }
            for name, rates in found.items()
        }


def plan_for_alike(swarm: Swarm, model: Path, options: PlanOptions) -> Plan:
    """Plan layers over nodes that are all alike, with none on the coordinator.

    What is measured differs from run to run, and by that also what goes over links.
    """

    def at_speed(record: NodeRecord, bytes_per_second: float) -> NodeRecord:
        speed = {"read_bytes_per_second": bytes_per_second}
        devices = tuple(device.model_copy(update=speed) for device in record.devices)
        return record.model_copy(update={"devices": devices})

    found = swarm.run("discover", "--no-mdns", "--json", *swarm.node_options())
    cluster = Discovery.model_validate_json(found.stdout).cluster
    link = LinkSpeed(rtt_ms=1.0, bytes_per_second=1e8)
    nodes = tuple(
        node.model_copy(update={"record": at_speed(node.record, 1e10), "link": link})
        for node in cluster.nodes
        if node.record
    )
    coordinator = at_speed(cluster.coordinator, 1e8)
    return make_plan(read_inventory(model), Cluster(coordinator=coordinator, nodes=nodes), options)


def spread(
    values: Sequence[float],
    others: Sequence[float] | None = None,
    relate: Callable[[float, float], float] = lambda a, _: a,
) -> tuple[float, float, float]:
    """Return median, least and most, of what relates the rounds of one to those of another."""
    related = [relate(a, b) for a, b in zip(values, others or values, strict=True)]
    return statistics.median(related), min(related), max(related)


def end_all(folder: Path) -> None:
    """End whatever is left, wherever the benchmark was interrupted."""
    left = [process for _, process in programs_below(folder)]
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="2 to 500")
    parser.add_argument("--model", type=Path, help="else SmolLM2, and a mixture made from it")
    parser.add_argument("--only", choices=[*NODE_COUNTS, "bulk"])
    parser.add_argument("--megabytes", type=int, default=1024, help="of bulk, a way and round")
    parser.add_argument("--before", type=Path, help="JSON of another version's run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.model:
        os.environ["LINKCPP_TEST_MODEL"] = str(options.model.absolute())
    before = json.loads(options.before.read_text()) if options.before else {}
    results: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "rounds": options.rounds,
        "tokens": options.tokens,
    }
    with tempfile.TemporaryDirectory(prefix="linkcpp-deployed-") as name:
        bench = Bench(options, Path(name))
        try:
            for mode, counts in NODE_COUNTS.items():
                if options.only in (None, mode):
                    results[mode] = {str(count): bench.compare(mode, count) for count in counts}
            if options.only in (None, "bulk"):
                results["bulk"] = bench.bulk()
        except KeyboardInterrupt:
            sys.exit("interrupted")
        finally:
            end_all(Path(name))
    results["load_after"] = os.getloadavg()[0]
    show(results, before, sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
