"""Every test of a hub runs on SQLite and on PostgreSQL."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.hub.hubs import RunningHub, new_database_name, running_hub
from tests.support.postgresql import PostgresqlServer, private_postgresql


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    """One server for all tests; what survives a kill of the hub does not depend on its fsync."""
    with private_postgresql("fsync=off") as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def database_url(request: pytest.FixtureRequest) -> str | None:
    """An empty database of each kind in turn; ``None`` stands for SQLite in the data folder."""
    if request.param == "sqlite":
        return None
    server: PostgresqlServer = request.getfixturevalue("postgresql")
    return server.create_database(new_database_name())


@pytest.fixture
async def hub(tmp_path: Path, database_url: str | None) -> AsyncIterator[RunningHub]:
    """A hub that serves on loopback."""
    async with running_hub(tmp_path / "hub", database_url) as running:
        yield running
