"""Fixtures of the tests of weights."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.weights.serving import SmallHub, add
from tests.model.web_server import Server
from tests.support.models import qwen3moe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A catalogue with one model, ``m``."""
    add(tmp_path / "models", qwen3moe())
    return tmp_path / "models"


@pytest.fixture
def hub(folder: Path) -> Iterator[SmallHub]:
    with SmallHub(folder) as running:
        yield running


@pytest.fixture
def web() -> Iterator[Server]:
    """A web server that counts what it sends."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
