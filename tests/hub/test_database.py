"""The database: migrated at every start, equal to the code's tables, and never half written."""

from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, insert, select, text

from linkcpp.common.errors import LinkcppError
from linkcpp.hub.database import open_database
from linkcpp.hub.problems import HubProblem
from linkcpp.hub.schema import GATEWAYS, METADATA
from linkcpp.hub.writer import BatchReport, Writer


def gateway(number: int) -> dict[str, object]:
    return {"gateway_id": str(number), "url": "", "edge_count": 0, "last_seen": 0.0}


def count_gateways(engine: Engine) -> int:
    with engine.connect() as connection:
        return len(connection.execute(select(GATEWAYS)).all())


def test_migrations_make_just_the_tables_that_the_code_uses(
    tmp_path: Path, database_url: str | None
) -> None:
    for _ in range(2):
        engine = open_database(database_url, tmp_path)
        with engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
        engine.dispose()


def test_a_database_of_a_newer_version_is_refused_and_left_as_it_is(
    tmp_path: Path, database_url: str | None
) -> None:
    engine = open_database(database_url, tmp_path)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(LinkcppError, match="another version of linkcpp"):
        open_database(database_url, tmp_path)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://a/b", "kind mysql"),
        ("nonsense", "not the URL"),
        ("postgresql+psycopg://u:geheim@127.0.0.1:1/x", "cannot be used"),
    ],
)
def test_a_database_that_cannot_be_used_is_told_without_its_password(
    tmp_path: Path, url: str, words: str
) -> None:
    with pytest.raises(LinkcppError, match=words) as refused:
        open_database(url, tmp_path)
    assert "geheim" not in str(refused.value)


async def test_a_job_that_fails_undoes_its_own_writes_and_nobody_elses(
    tmp_path: Path, database_url: str | None
) -> None:
    engine = open_database(database_url, tmp_path)
    reports: list[BatchReport] = []
    writer = Writer(engine, reports.append)

    def write_and_fail(connection: object) -> None:
        connection.execute(insert(GATEWAYS).values(gateway(2)))  # type: ignore[attr-defined]
        raise HubProblem(409, "no", "No.")

    await writer.write(lambda connection: connection.execute(insert(GATEWAYS), [gateway(1)]))
    with pytest.raises(HubProblem, match="No"):
        await writer.write(write_and_fail)
    with pytest.raises(HubProblem, match="refuses"):
        await writer.write(lambda connection: connection.execute(insert(GATEWAYS), [gateway(1)]))
    await writer.write(lambda connection: connection.execute(insert(GATEWAYS), [gateway(3)]))
    await writer.aclose()
    assert count_gateways(engine) == 2
    assert len(reports) >= 4
    engine.dispose()


async def test_a_database_that_goes_away_is_a_clear_refusal_and_its_return_is_noticed(
    tmp_path: Path, database_url: str | None
) -> None:
    engine = open_database(database_url, tmp_path)
    writer = Writer(engine, lambda _: None)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE gateways RENAME TO hidden"))
    with pytest.raises(HubProblem) as refused:
        await writer.write(lambda connection: connection.execute(insert(GATEWAYS), [gateway(1)]))
    assert refused.value.status == 503
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE hidden RENAME TO gateways"))
    await writer.write(lambda connection: connection.execute(insert(GATEWAYS), [gateway(1)]))
    await writer.aclose()
    assert count_gateways(engine) == 1
    engine.dispose()
