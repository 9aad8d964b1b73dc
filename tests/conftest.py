"""Fixtures that several rooms' tests share."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from linkcpp.engine.records import EngineLocation
from tests.model.web_server import Server
from tests.support.engines import ENGINES, prebuilt_engine


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what makes a run long."""
    parser.addoption(
        "--full-matrix",
        action="store_true",
        help="Every architecture with every number of workers and every length of prompt.",
    )


@pytest.fixture(autouse=True)
def linkcpp_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give every test folders of its own, so that none reads or writes the user's."""
    home = tmp_path / "linkcpp-home"
    monkeypatch.setenv("LINKCPP_HOME", str(home))
    yield home


@pytest.fixture(params=sorted(ENGINES))
def engine(request: pytest.FixtureRequest) -> EngineLocation:
    """Each engine build in turn; the source build only where it is installed."""
    return ENGINES[request.param]()


@pytest.fixture
def stock_engine() -> EngineLocation:
    """The prebuilt engine, for tests in which the build does not matter."""
    return prebuilt_engine()


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
