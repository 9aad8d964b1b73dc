"""A deployment in mode experts over a swarm on loopback, for the tests that share one."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from linkcpp.engine.records import EngineLocation
from tests.launch.swarm import (
    Swarm,
    one_process,
    single_thread_templates,
    tokens,
    wait_until,
)
from tests.support import models

NAME = "mix"
COUNT = 64


class Experts:
    """A swarm whose llama-server has one thread, as every node has."""

    def __init__(self, folder: Path, engine: EngineLocation) -> None:
        self.swarm = Swarm(folder, engine)
        self.swarm.has_own_cores = True
        self.templates = single_thread_templates(folder)
        self.model = models.qwen3moe()
        with one_process(engine, self.model, folder / "one.log") as url:
            self.reference = tokens(url, count=COUNT)

    def launch(self, plan: Path, *options: str, code: int = 0, name: str = NAME) -> Any:
        return self.swarm.launch(
            plan, name, "--templates", self.templates, "--json", *options, code=code
        )

    def state(self, name: str = NAME) -> dict[str, Any]:
        found: dict[str, Any] = self.swarm.status(name)["state"]
        return found

    def worker(self, node: str, name: str = NAME) -> dict[str, Any]:
        workers = self.state(name)["experts"]["workers"]
        return next(w for w in workers if w["node_name"] == node)

    def notices(self, name: str = NAME) -> list[str]:
        return [notice["text"] for notice in self.state(name)["notices"]]

    def complete_while(self, url: str, what: Callable[[], None]) -> Any:
        """Do something while tokens flow; return the answer.

        The same is asked again and again until one answer has begun after it was done.
        """
        is_done = threading.Event()

        def ask() -> list[Any]:
            answers: list[Any] = []
            is_last = False
            while not is_last:
                is_last = is_done.is_set()
                answers.append(tokens(url, count=COUNT))
            return answers

        before = self.state()["experts"]["dispatch"]["call_count"]
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask)
            try:
                wait_until(lambda: self.state()["experts"]["dispatch"]["call_count"] > before)
                what()
            finally:
                is_done.set()
            answers = asking.result()
        assert all(answer == answers[0] for answer in answers)
        return answers[0]

    def kill(self, node: str) -> None:
        agent = self.swarm.agents[node]
        children = agent.children()
        agent.process.kill()
        agent.process.wait()
        psutil.wait_procs(children, 30)

    def revive(self, node: str) -> None:
        """Start a killed node again, with the identity and the slices that it had."""
        self.swarm.start_agents(node)


@contextlib.contextmanager
def launched(experts: Experts, plan: Path, *options: str) -> Iterator[str]:
    yield str(experts.launch(plan, *options).json["api_url"])
    experts.swarm.run("stop", NAME)
    wait_until(experts.swarm.is_idle)
