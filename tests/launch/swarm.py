"""A small cluster on loopback, driven by the commands that a user types."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from linkcpp.common.resources import resource_folder
from linkcpp.engine.records import EngineLocation
from linkcpp.model.inventory import read_inventory
from linkcpp.planning.costs import HOST_PROGRAM_BYTES
from tests.support.ports import free_port

START_SECONDS = 300.0
PROMPT = "The three most useful things in a kitchen are"


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


@dataclass
class Agent:
    """A node agent that runs."""

    name: str
    url: str
    process: "subprocess.Popen[bytes]"

    def children(self) -> list[psutil.Process]:
        """What it has started."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


class Swarm:
    """A coordinator and its nodes, each with folders of its own and all with one token."""

    def __init__(self, folder: Path, engine: EngineLocation) -> None:
        assert engine.llama_server is not None
        self.folder = folder
        self.home = folder / "coordinator"
        self.agents: dict[str, Agent] = {}
        self.has_own_cores = False
        self._engine = engine
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("LINKCPP_")},
            "LINKCPP_HOME": str(self.home),
            "LINKCPP_ENGINE": str(engine.llama_server.parent),
            "COLUMNS": "200",
        }
        self.run("token", "create")

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "linkcpp.cli.main", *words]

    def run(self, *words: str, code: int = 0, **variables: str) -> Done:
        """Run a command to its end and hold it to its exit code."""
        done = subprocess.run(
            self.command(*words),
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            check=False,
            preexec_fn=self._settle if self.has_own_cores else None,
        )
        assert done.returncode == code, f"{words}: {done.stdout}\n{done.stderr}"
        return Done(done.returncode, done.stdout, done.stderr)

    def _settle(self) -> None:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

    def start(self, *words: str) -> "subprocess.Popen[bytes]":
        """Start a command and leave it running."""
        return subprocess.Popen(
            self.command(*words),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def start_agents(self, *names: str, memory: str | None = None) -> None:
        """Start node agents and wait until they answer."""
        for name in names:
            # A node that was there before comes back at its address.
            port = self.agents[name].url.rsplit(":", 1)[1] if name in self.agents else "0"
            self.agents[name] = self._begin_agent(name, memory, port)
        for name in names:
            agent = self.agents[name]
            log = self.folder / f"{name}.log"
            wait_until(lambda log=log: "http://" in log.read_text(), agent.process)  # type: ignore[misc]
            text = log.read_text()
            agent.url = "http://" + text.split("http://")[1].split()[0]

    def _begin_agent(self, name: str, memory: str | None, port: str) -> Agent:
        words = ["node", "--name", name, "--host", "127.0.0.1", "--port", port, "--no-mdns"]
        environment = {
            **self.environment,
            "LINKCPP_HOME": str(self.folder / name),
            "LINKCPP_TOKEN_FILE": str(self.home / "config" / "token"),
        }
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                self.command(*words, *(["--memory", memory] if memory else [])),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        if self.has_own_cores:
            # As on machines of their own: else the threads of one wait for those of another.
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(process.pid, {cores[len(self.agents) % len(cores)]})
        return Agent(name, "", process)

    def node_options(self) -> list[str]:
        return [word for agent in self.agents.values() for word in ("--node", agent.url)]

    def plan(self, model: Path, *options: str, mode: str = "layers") -> Path:
        """Plan a model over all agents; the coordinator takes little, so that the nodes must."""
        path = self.folder / f"plan-{model.stem}-{len(list(self.folder.glob('plan-*')))}.json"
        bare = read_inventory(model).embedding_bytes + HOST_PROGRAM_BYTES
        memory = f"{bare + 64 * 2**20}B"
        words = ["plan", "--model", str(model), "--mode", mode, "--context", "1024", "--no-mdns"]
        if mode == "layers":
            words += ["--memory", memory, "--min-nodes", str(len(self.agents))]
        self.run(*words, *self.node_options(), *options, "-o", str(path))
        return path

    def launch(self, plan: Path, name: str, *options: str, code: int = 0) -> Done:
        return self.run(
            *("launch", str(plan), "--name", name, "--port", "0", "--no-mdns", *options), code=code
        )

    def status(self, name: str) -> dict[str, Any]:
        report: dict[str, Any] = self.run("status", name, "--json").json
        return report

    def url(self, name: str) -> str:
        return str(self.status(name)["state"]["api_url"])

    def open_to_others(self) -> list[Path]:
        """What of the machines' folders another user of the system could get at."""
        homes = [self.home, *(self.folder / name for name in self.agents)]
        return [
            path
            for home in homes
            for path in home.rglob("*")
            if not path.is_symlink() and path.stat().st_mode & 0o077
        ]

    def is_idle(self) -> bool:
        """Whether nothing runs for a deployment, neither here nor on the nodes."""
        return not self.processes() and not any(a.children() for a in self.agents.values())

    def processes(self) -> list[psutil.Process]:
        """Everything that runs for this swarm, except the agents themselves."""
        agents = {agent.process.pid for agent in self.agents.values()}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                home = process.environ().get("LINKCPP_HOME", "")
                mine = home.startswith(str(self.folder))
                if mine and process.pid not in agents and process.status() != "zombie":
                    found.append(process)
        return found

    def close(self) -> None:
        with contextlib.suppress(AssertionError):
            self.run("stop", "--all")
        for agent in self.agents.values():
            agent.process.terminate()
        for agent in self.agents.values():
            agent.process.wait(START_SECONDS)


def wait_until(
    condition: Callable[[], Any], process: "subprocess.Popen[Any] | None" = None
) -> None:
    """Wait until something is true; a process that it depends on must live meanwhile."""
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        assert process is None or process.poll() is None, "the process ended"
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.1)


def single_thread_templates(folder: Path) -> str:
    """Write templates below a folder by which llama-server computes on one thread."""
    name = "llama-server.args.j2"
    templates = folder / "templates"
    templates.mkdir()
    shipped = (resource_folder("templates") / name).read_text()
    (templates / name).write_text(f"{shipped.rstrip()}\n--threads\n1\n")
    return str(templates)


def tokens(url: str, *, count: int = 24, cache_prompt: bool = False) -> list[Any]:
    """Return greedy tokens, each with its eight best log-probabilities."""
    body = greedy_request(count, cache_prompt=cache_prompt)
    answer = httpx.post(f"{url}/completion", json=body, timeout=START_SECONDS)
    answer.raise_for_status()
    found = tokens_of(answer.json())
    assert len(found) == count
    return found


def greedy_request(count: int, *, cache_prompt: bool = False) -> dict[str, Any]:
    """Return the body that asks for greedy tokens."""
    return {
        "prompt": PROMPT,
        "n_predict": count,
        "temperature": 0,
        "n_probs": 8,
        "cache_prompt": cache_prompt,
        "ignore_eos": True,
    }


def tokens_of(answer: dict[str, Any]) -> list[Any]:
    """Return the tokens of an answer, or of a part of it."""
    return [
        [step["id"], [(top["id"], top["logprob"]) for top in step["top_logprobs"]]]
        for step in answer.get("completion_probabilities", ())
    ]


@contextlib.contextmanager
def one_process(engine: EngineLocation, model: Path, log: Path) -> Any:
    """Run the whole model in one stock llama-server; yields its URL."""
    port = free_port()
    libraries = os.pathsep.join(str(folder) for folder in engine.library_folders)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(str(engine.llama_server), "-m", str(model), "--port", str(port)),
                *("-c", "1024", "-np", "1", "-ngl", "0", "--no-repack", "--fit", "off"),
            ],
            env={**os.environ, "LD_LIBRARY_PATH": libraries},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: _is_healthy(url), process)
        yield url
    finally:
        process.terminate()
        process.wait(START_SECONDS)


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
