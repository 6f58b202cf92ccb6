"""A PostgreSQL of one's own, from Debian's package, on a loopback port: for benchmarks and tests."""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from benchmarks.figures import BenchmarkError, Skipped
from coordinator.database.settings import PostgresqlAddress

USER: Final = "tester"
PASSWORD: Final = "correct horse"
_PLACES: Final = Path("/usr/lib/postgresql")
_PATIENCE_S: Final = 30.0
_PR_SET_PDEATHSIG: Final = 1
_PAUSE_S: Final = 0.05


def find_program(name: str) -> str | None:
    """Where a program of the newest PostgreSQL is."""
    versions = sorted(_PLACES.glob(f"*/bin/{name}"), key=lambda path: float(path.parts[4]))
    return str(versions[-1]) if versions else shutil.which(name)


def _end_with_parent() -> None:
    """Have the kernel end this process when its parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


class PostgresqlServer:
    """A server, which can be killed and started again with what it has. A context manager.

    Args:
        durable: whether its transactions survive a power cut. Without, they survive kills alone.
        options: further settings, ``NAME=VALUE``.

    Raises:
        Skipped: PostgreSQL or its library is not installed.
    """

    def __init__(self, *, durable: bool, options: Sequence[str] = ()) -> None:
        initdb, postgres = find_program("initdb"), find_program("postgres")
        if initdb is None or postgres is None:
            raise Skipped("PostgreSQL is not installed: apt-get install postgresql.")
        try:
            import psycopg  # noqa: F401
        except ImportError as error:
            raise Skipped("psycopg is not installed: pip install '.[postgresql]'.") from error
        # It does not run as root; its directory has to be its user's all the way.
        self._user = "postgres" if os.geteuid() == 0 else getpass.getuser()
        self.directory = Path(tempfile.mkdtemp(prefix="dpagent-postgresql-"))
        self.password_file = self.directory / "password"
        self.password_file.write_text(f"{PASSWORD}\n")
        if os.geteuid() == 0:
            for path in (self.directory, self.password_file):
                shutil.chown(path, self._user)
        # Bound and not listening, so that nobody else is given it.
        self._reservation = socket.socket()
        self._reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reservation.bind(("127.0.0.1", 0))
        self.port: int = self._reservation.getsockname()[1]
        self._data = self.directory / "data"
        with (self.directory / "initdb.log").open("wb") as log:
            subprocess.run(
                [
                    initdb, "-D", str(self._data), "-U", USER, "--pwfile", str(self.password_file),
                    "-A", "scram-sha-256", "--no-sync", "-E", "UTF8", "--locale", "C",
                ],
                check=True, stdout=log, stderr=log, timeout=120, **self._as_user,
            )  # fmt: skip
        settings = [
            "listen_addresses=127.0.0.1", f"unix_socket_directories={self.directory}", "max_connections=60",
            f"fsync={'on' if durable else 'off'}", "shared_buffers=64MB", *options,
        ]  # fmt: skip
        self._command = [postgres, "-D", str(self._data), "-p", str(self.port)]
        self._command += [part for setting in settings for part in ("-c", setting)]
        self._process: subprocess.Popen[bytes] | None = None
        self._schemas = 0

    @property
    def _as_user(self) -> dict[str, Any]:
        return {"cwd": self.directory, "user": self._user if os.geteuid() == 0 else None}

    @property
    def pid(self) -> int:
        """Of the server's first process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, and wait until it answers.

        Raises:
            BenchmarkError: It does not.
        """
        import psycopg

        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, start_new_session=True, preexec_fn=_end_with_parent,
                **self._as_user,
            )  # fmt: skip
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until:
            with contextlib.suppress(psycopg.OperationalError):
                self.connect().close()
                return
            time.sleep(_PAUSE_S)
        raise BenchmarkError(f"PostgreSQL does not start: {(self.directory / 'log').read_text()[-2_000:]}")

    def connect(self) -> Any:
        """A connection of one's own."""
        import psycopg

        return psycopg.connect(self.address("public"), autocommit=True, connect_timeout=10)

    def kill(self) -> None:
        """End it and all its sessions as a power cut would, but for the disk."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        assert self._process is not None
        self._process.wait(_PATIENCE_S)
        (self._data / "postmaster.pid").unlink(missing_ok=True)

    def stop(self) -> None:
        """End it, with its sessions."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def __enter__(self) -> PostgresqlServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        self._reservation.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def new_schema(self) -> str:
        """A schema that nobody else has: as good as a database, and made sooner."""
        self._schemas += 1
        name = f"fleet_{self._schemas}"
        with self.connect() as connection:
            connection.execute(f"CREATE SCHEMA {name}")
        return name

    def url(self, schema: str) -> str:
        """As in ``store.url``."""
        return f"postgresql://{USER}@127.0.0.1:{self.port}/postgres?options=-csearch_path%3D{schema}"

    def address(self, schema: str) -> str:
        """With the password, for what reads it beside the programs."""
        return self.url(schema).replace(f"{USER}@", f"{USER}:{PASSWORD.replace(' ', '%20')}@")

    def place(self, schema: str) -> PostgresqlAddress:
        """For the state of one coordinator."""
        return PostgresqlAddress(self.url(schema), PASSWORD)

    def settings(self, schema: str) -> dict[str, str]:
        """The section ``store`` of ``fleet.yaml``."""
        return {"url": self.url(schema), "password_file": str(self.password_file)}
