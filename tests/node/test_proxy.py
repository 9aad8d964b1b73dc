"""A machine whose only way out is an HTTP proxy: it joins a hub, and is used through it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.internet.web import certificates
from tests.launch.hub_process import HubProcess, hub_process
from tests.node import proxy as proxy_program
from tests.support.ports import free_port

pytestmark = pytest.mark.slow

HUB = "https://hub.invalid"


class Machine:
    """The folders of one machine that has no other way out than a proxy."""

    def __init__(self, home: Path, authority: Path | None, proxy: str) -> None:
        self._environment = {
            key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")
        } | {
            "LINKCPP_HOME": str(home),
            "HTTPS_PROXY": proxy,
        }
        if authority is not None:
            self._environment["SSL_CERT_FILE"] = str(authority)

    def start(self, *words: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "linkcpp.cli.main", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._environment | {"COLUMNS": "200"},
        )

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        process = self.start(*words)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(words, process.returncode, out, err)


@contextlib.contextmanager
def running_proxy(hub: HubProcess, folder: Path) -> Iterator["subprocess.Popen[str]"]:
    port = hub.url.rpartition(":")[2]
    command = [sys.executable, str(proxy_program.__file__), port, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    with hub_process(tmp_path) as running:
        yield running


def join_token(hub: HubProcess, role: str) -> str:
    return hub._run("token", "create", "--role", role, "--data", str(hub.data)).strip()


def test_a_node_behind_a_proxy_joins_and_a_coordinator_behind_it_finds_the_node(
    hub: HubProcess, tmp_path: Path
) -> None:
    authority = certificates(tmp_path / "tls", ["hub.invalid"])
    with running_proxy(hub, tmp_path / "tls") as proxy:
        assert proxy.stdout is not None
        url = f"http://127.0.0.1:{proxy.stdout.readline().strip()}"
        desk = Machine(tmp_path / "desk", authority, url)
        attic = Machine(tmp_path / "attic", authority, url)
        joined = desk.run("join", HUB, "--token", join_token(hub, "backbone"))
        assert joined.returncode == 0, joined.stderr
        words = ("join", HUB, "--token", join_token(hub, "node"), "--no-listen", "--memory", "1GB")
        node = attic.start(*words)
        try:
            assert node.stdout is not None
            assert any("joined" in line or "hub" in line for line in node.stdout)
            found = desk.run("discover", "--hub", HUB, "--no-mdns", "--json")
            assert found.returncode == 0, found.stderr
            (one,) = json.loads(found.stdout)["nodes"]
            assert one["record"] is not None, one
            assert proxy.stdout.readline() == "hub.invalid:443\n"
        finally:
            node.send_signal(signal.SIGINT)
            node.communicate(timeout=60)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("http://127.0.0.1:{port}", "through the proxy http://127.0.0.1:{port} of HTTPS_PROXY"),
        ("socks5://127.0.0.1:{port}", "HTTPS_PROXY names a SOCKS proxy"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_named_with_its_variable(
    tmp_path: Path, value: str, words: str
) -> None:
    port = free_port()
    desk = Machine(tmp_path, None, value.format(port=port))
    for verb in (
        ("join", HUB, "--token", "lcj_" + "x" * 43),
        ("inspect", "https://models.invalid/model.gguf"),
        ("engine", "install", "archive", "https://a.invalid/x.tgz", "--sha256", "0" * 64),
    ):
        ended = desk.run(*verb)
        told = " ".join(ended.stderr.split())
        assert words.format(port=port) in told, told
        assert "defect" not in told
