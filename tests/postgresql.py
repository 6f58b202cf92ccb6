"""A PostgreSQL of the tests' own, from Debian's package, as a child process on a loopback port."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from brokers import reserved_port, wait_until
from children import PATIENCE_S

from coordinator.database.settings import PostgresqlAddress

USER: Final = "tester"
PASSWORD: Final = "correct horse"
_PLACES: Final = "/usr/lib/postgresql"


def find_program(name: str) -> str | None:
    """Where a program of the newest PostgreSQL is."""
    versions = sorted(Path(_PLACES).glob(f"*/bin/{name}"), key=lambda path: float(path.parts[4]))
    return str(versions[-1]) if versions else shutil.which(name)


class Postgresql:
    """A server, which can be killed and started again with what it has.

    Args:
        durable: whether its transactions survive a power cut; those of tests need to survive kills alone.
    """

    def __init__(self, *, durable: bool = False) -> None:
        initdb, postgres = find_program("initdb"), find_program("postgres")
        if initdb is None or postgres is None:
            pytest.skip("PostgreSQL is not installed")
        pytest.importorskip("psycopg")
        # It does not run as root; its directory has to be its user's all the way.
        self._user = "postgres" if os.geteuid() == 0 else getpass.getuser()
        self.directory = Path(tempfile.mkdtemp(prefix="dpagent-postgresql-"))
        self.password_file = self.directory / "password"
        self.password_file.write_text(f"{PASSWORD}\n")
        if os.geteuid() == 0:
            for path in (self.directory, self.password_file):
                shutil.chown(path, self._user)
        self._reservation = reserved_port()
        self.port: int = self._reservation.getsockname()[1]
        self._run(
            initdb, "-D", self._data, "-U", USER, "--pwfile", self.password_file, "-A", "scram-sha-256",
            "--no-sync", "-E", "UTF8", "--locale", "C",
        )  # fmt: skip
        self._command = [
            postgres, "-D", str(self._data), "-p", str(self.port), "-c", "listen_addresses=127.0.0.1",
            "-c", f"unix_socket_directories={self.directory}", "-c", "max_connections=60",
            "-c", f"fsync={'on' if durable else 'off'}", "-c", "shared_buffers=64MB",
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        self._schemas = 0

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    def _run(self, *command: str | Path) -> None:
        subprocess.run(
            [str(part) for part in command], check=True, capture_output=True, timeout=60, cwd=self.directory,
            user=self._user if os.geteuid() == 0 else None,
        )  # fmt: skip

    def start(self) -> Postgresql:
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, cwd=self.directory, start_new_session=True,
                user=self._user if os.geteuid() == 0 else None,
            )  # fmt: skip
        wait_until(self._answers, f"PostgreSQL on port {self.port}")
        return self

    def _answers(self) -> bool:
        import psycopg

        with contextlib.suppress(psycopg.OperationalError):
            self.connect().close()
            return True
        return False

    def connect(self, schema: str = "public"):  # type: ignore[no-untyped-def]
        """A connection of a test's own."""
        import psycopg

        return psycopg.connect(
            f"postgresql://{USER}@127.0.0.1:{self.port}/postgres", password=PASSWORD, autocommit=True,
            options=f"-csearch_path={schema}", connect_timeout=10,
        )  # fmt: skip

    def kill(self) -> None:
        """End it and all its sessions as a power cut would, but for the disk."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(PATIENCE_S)
        (self._data / "postmaster.pid").unlink(missing_ok=True)

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)  # It ends its sessions.
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def give_up(self) -> None:
        self.stop()
        self._reservation.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def url(self, schema: str = "public") -> str:
        return f"postgresql://{USER}@127.0.0.1:{self.port}/postgres?options=-csearch_path%3D{schema}"

    def address_with_password(self, schema: str) -> str:
        """For what reads it beside the programs."""
        secret = f"{USER}:{PASSWORD.replace(' ', '%20')}@"
        return self.url(schema).replace(f"{USER}@", secret)

    def new_schema(self) -> str:
        """A schema that no other test has: as good as a database, and made sooner."""
        self._schemas += 1
        name = f"fleet_{self._schemas}"
        with self.connect() as connection:
            connection.execute(f"CREATE SCHEMA {name}")
        return name

    def new_place(self) -> PostgresqlAddress:
        """A place for the state of one coordinator."""
        return PostgresqlAddress(self.url(self.new_schema()), PASSWORD)

    def settings(self, schema: str) -> dict[str, str]:
        """The section ``store`` of ``fleet.yaml``."""
        return {"url": self.url(schema), "password_file": str(self.password_file)}


@contextlib.contextmanager
def postgresql_server(*, durable: bool = False) -> Iterator[Postgresql]:
    """A server for as long as the context lasts."""
    made = Postgresql(durable=durable)
    try:
        yield made.start()
    finally:
        made.give_up()
