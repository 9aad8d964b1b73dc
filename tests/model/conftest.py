"""Fixtures of this room's tests."""

import threading
from collections.abc import Iterator

import pytest

from tests.model.web_server import Server


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
