"""A private PostgreSQL server from the system's package, for as long as it is needed."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

_USER = "linkcpp"
_START_SECONDS = 300


class PostgresqlServer(NamedTuple):
    """A running server; it listens on a Unix socket in ``folder`` only."""

    folder: Path

    def create_database(self, name: str) -> str:
        """Make an empty database; return its URL for SQLAlchemy."""
        with self.connect("postgres") as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        return f"postgresql+psycopg://{_USER}@/{name}?host={self.folder}"

    def connect(self, name: str) -> "psycopg.Connection":
        return psycopg.connect(f"host={self.folder} user={_USER} dbname={name}", autocommit=True)


def postgresql_programs() -> Path:
    """Find the folder of the server's programs, which Debian does not put on the path."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if on_path := shutil.which("initdb"):
        folders.append(Path(on_path).parent)
    for folder in folders:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    raise RuntimeError(
        "PostgreSQL's server is not installed, and the hub is tested on it as well: "
        "`apt-get install postgresql`."
    )


@contextmanager
def private_postgresql(*options: str) -> Iterator[PostgresqlServer]:
    """Run a server as an unprivileged user; ``options`` are settings, like ``fsync=off``."""
    programs = postgresql_programs()
    account: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="linkcpp-pg-") as name:
        folder = Path(name)
        if os.geteuid() == 0:  # the server refuses to run as root
            user = pwd.getpwnam("postgres")
            os.chown(folder, user.pw_uid, user.pw_gid)
            account = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        data = folder / "data"
        subprocess.run(
            [
                programs / "initdb",
                "-D",
                data,
                "-U",
                _USER,
                "--auth=trust",
                "--no-sync",
                "-E",
                "UTF8",
            ],
            check=True,
            capture_output=True,
            cwd=folder,
            **account,
        )
        settings = ["listen_addresses=", f"unix_socket_directories={folder}", *options]
        arguments = [part for setting in settings for part in ("-c", setting)]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [programs / "postgres", "-D", data, *arguments],
                stdout=log,
                stderr=log,
                cwd=folder,
                **account,
            )
        try:
            server = PostgresqlServer(folder)
            _wait_until_ready(server, process)
            yield server
        finally:
            # Its data is thrown away: it need not write all of it to the disk first.
            process.send_signal(signal.SIGQUIT)
            process.wait(timeout=60)


def _wait_until_ready(server: PostgresqlServer, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            server.connect("postgres").close()
        except psycopg.OperationalError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((server.folder / "log").read_text()) from None
            time.sleep(0.05)
        else:
            return
