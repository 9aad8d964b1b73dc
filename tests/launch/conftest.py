"""Clusters that the tests of a module share: starting one takes seconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.swarm import Swarm
from tests.support.engines import prebuilt_engine


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Three nodes on the prebuilt engine."""
    swarm = Swarm(tmp_path_factory.mktemp("swarm"), prebuilt_engine())
    swarm.start_agents("attic", "cellar", "garage")
    yield swarm
    swarm.close()


@pytest.fixture
def empty_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder
