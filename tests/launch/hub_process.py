"""``linkcpp hub`` as a process, for tests of what a coordinator takes from it."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from linkcpp.cluster.identity import load_identity
from linkcpp.engine.records import EngineLocation
from linkcpp.registry.client import join_hub
from linkcpp.registry.keys import load_keys
from tests.launch.swarm import wait_until


class HubProcess:
    """A hub with a data folder; it can be killed, and started again at its address."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "hub"
        self.log = folder / "hub.log"
        self._port = 0
        self._token = ""
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command("--port", str(self._port)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "COLUMNS": "200"},
            )
        wait_until(lambda: "http://" in self.log.read_text(), self._process)
        self._port = int(self.log.read_text().split("http://127.0.0.1:")[1].split()[0])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def add(self, model: Path | str, name: str) -> None:
        self._run("models", "add", str(model), "--name", name, "--data", str(self.data))

    def join(self) -> None:
        """Let the machine of this process's folders join as a coordinator."""
        if not self._token:
            self._token = self._join_token("backbone")
        identity, keys = load_identity(), load_keys()
        joining = join_hub(self.url, self._token, identity=identity, keys=keys, allow_plain=True)
        asyncio.run(joining)

    @contextlib.contextmanager
    def node(self, home: Path, engine: EngineLocation) -> "Iterator[subprocess.Popen[bytes]]":
        """Run ``linkcpp join`` with folders of its own, until it is killed or the block ends."""
        assert engine.rpc_server is not None
        home.mkdir()
        log = home / "log"
        environment = {
            **os.environ,
            "LINKCPP_HOME": str(home),
            "LINKCPP_ENGINE": str(engine.rpc_server.parent),
            "LINKCPP_JOIN_TOKEN": self._join_token("node"),
        }
        words = ("join", self.url, "--no-listen", "--name", home.name, "--memory", "1GB")
        command = [sys.executable, "-m", "linkcpp.cli.main", *words]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            wait_until(lambda: "Ctrl-C stops it" in log.read_text(), process)
            yield process
        finally:
            process.kill()
            process.wait()

    def _join_token(self, role: str) -> str:
        words = ("token", "create", "--role", role, "--uses", "1000", "--data", str(self.data))
        return self._run(*words).strip()

    def _command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "linkcpp.cli.main", "hub", "--data", str(self.data), *words]

    def _run(self, *words: str) -> str:
        command = [sys.executable, "-m", "linkcpp.cli.main", "hub", *words]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextlib.contextmanager
def hub_process(folder: Path) -> Iterator[HubProcess]:
    hub = HubProcess(folder)
    try:
        yield hub
    finally:
        hub.kill()
