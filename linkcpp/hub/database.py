"""The hub's SQL database: opened, brought to the newest schema, and written to by one thread."""

import logging
import re
import sqlite3
from pathlib import Path
from typing import Any

import alembic.command
import alembic.config
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, create_engine, event, inspect
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from linkcpp.common.errors import LinkcppError, NotNowError
from linkcpp.common.installation import install_command
from linkcpp.common.text import printable
from linkcpp.hub.data_folder import make_data_folder
from linkcpp.hub.errors import ApiError
from linkcpp.hub.identity import IDENTITY_FILE, is_hub_folder

_MIGRATIONS = Path(__file__).with_name("migrations")
_BUSY_SECONDS = 10
_CONNECT_SECONDS = 10
_STATEMENT_MS = 30_000
# One migrates at a time; a number that no other program's advisory lock has by chance.
_MIGRATION_LOCK = 0x6C696E6B637070
_PASSWORD = re.compile(r"password=\S+|://[^\s/]*@")


def open_database(url: str | None, data: Path) -> Engine:
    """Open the database at ``url``, or ``hub.sqlite3`` in the data folder, and migrate it.

    Raises:
        LinkcppError: it cannot be reached, its kind is not supported, a newer linkcpp wrote it, or
            it is empty though this hub has served before.
    """
    make_data_folder(data)
    path = None if url else data / "hub.sqlite3"
    engine = _postgresql(url) if url else _sqlite(data / "hub.sqlite3")
    try:
        with engine.begin() as connection:
            _check_not_lost(connection, data, path)
            _migrate(connection)
    except LinkcppError:
        engine.dispose()
        raise
    except CommandError as error:
        engine.dispose()
        raise LinkcppError(
            f"The database was written by another version of linkcpp: {error}.",
            hint="Install the version that wrote it, or a newer one.",
        ) from error
    except SQLAlchemyError as error:
        engine.dispose()
        if full := disk_full(error):
            raise full from error
        kind = NotNowError if isinstance(error, OperationalError) else LinkcppError
        raise kind(
            f"The hub's database cannot be used: {describe_error(error)}.",
            hint=f"Restore {path} from a backup if it is damaged."
            if path
            else "See that the database server runs and that --database is its address.",
        ) from error
    return engine


def describe_error(error: SQLAlchemyError) -> str:
    """Say what a database complained of, in one line and without a password."""
    first = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
    return printable(_PASSWORD.sub("…", first), 200).rstrip(".")


def disk_full(error: SQLAlchemyError) -> ApiError | None:
    """Return what to tell where SQLite had no room to write; ``None`` for every other error."""
    found: BaseException | None = error
    # SQLite undoes the transaction then, so that undoing it once more fails and is raised instead.
    while found is not None and not _has_no_room(found):
        found = found.__context__
    if found is None:
        return None
    return ApiError(
        503,
        "disk_full",
        f"The disk of the hub's data folder is full or fails: {printable(str(found), 200)}.",
        hint="The hub's owner can make room on it; what was acknowledged is kept.",
    )


def _has_no_room(error: BaseException) -> bool:
    # An extended code has the kind of error in its lowest byte. Where there is no room for what
    # SQLite keeps besides its tables, it is told as an error of input and output.
    # What the driver refuses by itself has none.
    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


def _sqlite(path: Path) -> Engine:
    engine = create_engine(
        f"sqlite+pysqlite:///{path}", poolclass=QueuePool, connect_args={"timeout": _BUSY_SECONDS}
    )

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _: Any) -> None:
        # Transactions begin where SQLAlchemy says so, not where the driver guesses.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        # Synced at every commit: what is acknowledged survives also the loss of power.
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


def _postgresql(text: str) -> Engine:
    try:
        url = make_url(text)
    except ArgumentError:
        raise LinkcppError(
            "--database is not the URL of a database.",  # not echoed: it may have a password in it
            hint="Write it like postgresql+psycopg://user@host/name.",
        ) from None
    if url.drivername in ("postgres", "postgresql"):
        url = url.set(drivername="postgresql+psycopg")
    if url.drivername != "postgresql+psycopg":
        raise LinkcppError(
            f"A hub cannot use a database of the kind {printable(url.drivername)}.",
            hint="Without --database it uses SQLite; for PostgreSQL write "
            "postgresql+psycopg://user@host/name.",
        )
    settings = {
        "connect_timeout": _CONNECT_SECONDS,
        "options": f"-c statement_timeout={_STATEMENT_MS}",
    }
    try:
        return create_engine(url, pool_pre_ping=True, connect_args=settings)
    except ImportError as error:  # psycopg is here, PostgreSQL's own library may not be
        raise LinkcppError(
            "PostgreSQL's client library is not installed here.",
            hint=f"`{install_command('hub')}`, or `apt-get install libpq5`.",
        ) from error


def _check_not_lost(connection: Connection, data: Path, path: Path | None) -> None:
    """Refuse an empty database of a hub that had one: it would forget everybody in silence.

    A hub's identity is made after its first tables.
    """
    if not is_hub_folder(data) or inspect(connection).get_table_names():
        return
    where = f"{path} is" if path else "The database is"
    raise LinkcppError(
        f"{where} empty, but the hub of {data} has served before: its machines, tokens and "
        "revocations are lost.",
        hint=f"Restore {path.name if path else 'the database'} from a backup. To begin again "
        f"without them, move {data / IDENTITY_FILE} away: every machine then has to join again.",
    )


def _migrate(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})")
    config = alembic.config.Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    logging.getLogger("alembic").setLevel(logging.WARNING)
    alembic.command.upgrade(config, "head")
