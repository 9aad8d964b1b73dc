"""The database: migrated at every start, equal to the code's tables, and never half written."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, event, insert, select, text

from linkcpp.common.errors import EXIT_ERROR, EXIT_NOT_NOW, LinkcppError
from linkcpp.hub.database import open_database
from linkcpp.hub.errors import ApiError
from linkcpp.hub.schema import GATEWAYS, MACHINES, METADATA
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


def test_a_database_of_the_first_version_is_brought_up_and_keeps_its_machines(
    tmp_path: Path, database_url: str | None
) -> None:
    machine: dict[str, object] = {
        "node_id": "n", "name": "attic", "role": "node", "signing_key": "", "edge_key": "",
        "token_id": "t", "joined_at": 1.0,
    }  # fmt: skip
    engine = open_database(database_url, tmp_path)
    with engine.begin() as connection:
        connection.execute(insert(MACHINES).values(machine))
        connection.execute(text("ALTER TABLE machines DROP COLUMN left_at"))
        connection.execute(text("ALTER TABLE machines ADD COLUMN sequence BIGINT"))
        connection.execute(text("UPDATE alembic_version SET version_num = '0001'"))
    engine.dispose()
    engine = open_database(database_url, tmp_path)
    with engine.connect() as connection:
        (found,) = connection.execute(select(MACHINES)).mappings().all()
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
    engine.dispose()
    assert {key: found[key] for key in machine} == machine
    assert found["left_at"] is None


@pytest.mark.parametrize(
    ("url", "words", "code"),
    [
        ("mysql://a/b", "kind mysql", EXIT_ERROR),
        ("nonsense", "not the URL", EXIT_ERROR),
        # It may only have booted later than the hub.
        ("postgresql+psycopg://u:geheim@127.0.0.1:1/x", "cannot be used", EXIT_NOT_NOW),
    ],
)
def test_a_database_that_cannot_be_used_is_told_without_its_password(
    tmp_path: Path, url: str, words: str, code: int
) -> None:
    with pytest.raises(LinkcppError, match=words) as refused:
        open_database(url, tmp_path)
    assert "geheim" not in str(refused.value)
    assert refused.value.exit_code == code


async def test_a_job_that_fails_undoes_its_own_writes_and_nobody_elses(
    tmp_path: Path, database_url: str | None
) -> None:
    engine = open_database(database_url, tmp_path)
    reports: list[BatchReport] = []
    writer = Writer(engine, reports.append)

    def write_and_fail(connection: object) -> None:
        connection.execute(insert(GATEWAYS).values(gateway(2)))  # type: ignore[attr-defined]
        raise ApiError(409, "no", "No.")

    await writer.write(lambda connection: connection.execute(insert(GATEWAYS), [gateway(1)]))
    with pytest.raises(ApiError, match="No"):
        await writer.write(write_and_fail)
    with pytest.raises(ApiError, match="refuses"):
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
    with pytest.raises(ApiError) as refused:
        await writer.write(lambda connection: connection.execute(insert(GATEWAYS), [gateway(1)]))
    assert refused.value.status == 503
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE hidden RENAME TO gateways"))
    await writer.write(lambda connection: connection.execute(insert(GATEWAYS), [gateway(1)]))
    await writer.aclose()
    assert count_gateways(engine) == 1
    engine.dispose()


async def test_a_full_disk_is_named_and_what_was_acknowledged_is_kept(tmp_path: Path) -> None:
    engine = open_database(None, tmp_path)

    @event.listens_for(engine, "checkout")
    def fill(connection: Any, *_: object) -> None:
        connection.execute(f"PRAGMA max_page_count = {max_pages}")

    def fill_up(connection: Any) -> None:
        connection.execute(insert(GATEWAYS), [gateway(number) for number in range(2, 5000)])

    max_pages = 10_000
    writer = Writer(engine, lambda _: None)
    await writer.write(lambda connection: connection.execute(insert(GATEWAYS), [gateway(1)]))
    max_pages = 1  # SQLite takes it as: no larger than it is
    with pytest.raises(ApiError, match="disk of the hub's data folder is full") as refused:
        await writer.write(fill_up)
    assert (refused.value.status, refused.value.code) == (503, "disk_full")
    assert refused.value.hint
    max_pages = 10_000
    await writer.write(fill_up)
    await writer.aclose()
    assert count_gateways(engine) == 4999
    engine.dispose()


_OPEN_WITHOUT_ROOM = """
import pathlib, resource, sys
from linkcpp.hub.database import open_database
from linkcpp.common.errors import LinkcppError
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
try:
    open_database(None, pathlib.Path(sys.argv[1]))
except LinkcppError as error:
    print(error.message, error.hint)
"""


def test_a_database_that_has_no_room_is_not_said_to_be_down(tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", _OPEN_WITHOUT_ROOM, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "disk of the hub's data folder is full" in told
    assert "make room" in told
    assert "server" not in told
