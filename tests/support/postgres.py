"""A PostgreSQL server of the tests' own: once per process, on a Unix socket, with a database for each test."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psycopg

_PLACES = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
_USER = "postgres"


def _program(name: str) -> str:
    found = shutil.which(name, path=os.pathsep.join([*map(str, _PLACES), os.environ.get("PATH", "")]))
    if found is None:
        raise FileNotFoundError(f"{name} is not installed: apt-get install postgresql")
    return str(Path(found).resolve())


class PostgresServer:
    """A running server; it can be ended hard and started again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = count(1)
        # The server refuses to run as root.
        self._as_user = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}
        if self._as_user:
            shutil.chown(directory, "nobody", "nogroup")
        self._run("initdb", "-D", str(directory / "data"), "-U", _USER, "-A", "trust", "-E", "UTF8", "--no-sync")
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        # What tests kill is processes, never the machine: the system's cache stays.
        options = (
            f"-k {self._directory} -h '' -c max_connections=200 -c shared_buffers=64MB -c jit=off"
            " -c fsync=off -c full_page_writes=off"
        )
        self._run("pg_ctl", "-D", str(self._directory / "data"), "-w", "-o", options, "-l", self._log, "start")

    def stop(self, mode: str = "fast") -> None:
        """Stop it; "immediate" is a crash that needs recovery."""
        self._run("pg_ctl", "-D", str(self._directory / "data"), "-w", "-m", mode, "stop")

    def pause(self) -> None:
        """Let no new connection in, as a machine that hangs."""
        os.kill(self._pid(), signal.SIGSTOP)

    def go_on(self) -> None:
        """End a pause."""
        os.kill(self._pid(), signal.SIGCONT)

    def url(self, database: str) -> str:
        """Return a database's URL."""
        return f"postgresql:///{database}?host={self._directory}&user={_USER}"

    def make_database(self) -> str:
        """Make an empty database and return its URL."""
        name = f"test_{next(self._numbers)}"
        with self.connect() as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        return self.url(name)

    def make_schema(self) -> str:
        """Make an empty schema in one database and return its URL: much quicker than a database."""
        name = f"test_{next(self._numbers)}"
        with self.connect() as connection:
            connection.execute(f'CREATE SCHEMA "{name}"'.encode())
        return f"{self.url('postgres')}&options=-csearch_path%3D{name}"

    def empty(self, url: str) -> None:
        """Remove every row of a schema but the store's own: quicker still than another schema."""
        with psycopg.connect(url, autocommit=True) as connection:
            found = connection.execute(
                b"SELECT string_agg(tablename, ', ') FROM pg_tables"
                b" WHERE schemaname = current_schema() AND tablename <> 'store'"
            ).fetchone()
            if found is not None and found[0]:
                connection.execute(f"TRUNCATE {found[0]}".encode())

    def connect(self, database: str = "postgres") -> psycopg.Connection:
        """Open a connection for what a test does behind a store's back."""
        return psycopg.connect(self.url(database), autocommit=True)

    @property
    def _log(self) -> str:
        return str(self._directory / "log")

    def _pid(self) -> int:
        return int((self._directory / "data" / "postmaster.pid").read_text().splitlines()[0])

    def _run(self, name: str, *arguments: str) -> None:
        done = subprocess.run(
            [_program(name), *arguments],
            cwd=self._directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C"},
            check=False,
            **self._as_user,  # type: ignore[call-overload]  # keywords of subprocess.run as one mapping
        )
        if done.returncode:
            raise RuntimeError(f"{name} failed: {done.stderr.decode(errors='replace')}")


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Run a server for the life of the context; nothing of it is left behind."""
    # A socket's path must be short.
    directory = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
    try:
        server = PostgresServer(directory)
        try:
            yield server
        finally:
            server.stop("immediate")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
