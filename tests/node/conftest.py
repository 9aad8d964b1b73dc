"""What tests of the node agent share."""

import threading
from collections.abc import Iterator

import pytest

from tests.model.web_server import Server


@pytest.fixture(autouse=True)
def memory_speed_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare every test a third of a second for a number that it ignores."""
    monkeypatch.setattr("linkcpp.cluster.measure.cpu_read_rate", lambda: 1e10)


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
