"""Fixtures that several rooms' tests share."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from linkcpp.engine.records import EngineLocation
from tests.model.web_server import Server
from tests.support import lengths
from tests.support.engines import ENGINES, prebuilt_engine

# Who uses one starts programs or makes networks, which takes seconds.
_SLOW_FIXTURES = {"engine", "stock_engine", "hosts", "swarm"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what makes a run long."""
    parser.addoption(
        "--long",
        action="store_true",
        help="Tests marked `long`, whole matrices, and many times the examples of fuzz tests.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Say how long the run is before test modules ask."""
    lengths.is_long = config.getoption("--long")
    # A busy machine makes no result wrong.
    settings.register_profile("linkcpp", deadline=None)
    settings.load_profile("linkcpp")


# First, so that `-m "not slow"` knows the marks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests with programs as slow, and leave long ones out of a run that is not long."""
    for item in items:
        if _SLOW_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
    if not lengths.is_long:
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


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
