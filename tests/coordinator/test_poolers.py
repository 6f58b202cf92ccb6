"""PostgreSQL behind a pooler: two coordinators never lead at once, whatever that lends to whom."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from brokers import wait_until
from postgresql import Postgresql

from benchmarks.postgresql_server import PASSWORD, USER
from coordinator.database.opening import open_postgresql
from coordinator.database.settings import PostgresqlAddress
from dpagent.errors import ConfigurationError

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
pytestmark = pytest.mark.skipif(PGBOUNCER is None, reason="needs PgBouncer: apt-get install pgbouncer")


@pytest.fixture
def database(postgresql: Postgresql) -> str:
    """One of its own: a pooler takes no search path."""
    name = f"{postgresql.new_schema()}_pooled"
    with postgresql.connect() as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return name


@contextmanager
def pooler(server: Postgresql, mode: str) -> Iterator[Path]:
    """A PgBouncer, by the directory of its socket."""
    assert PGBOUNCER is not None
    with tempfile.TemporaryDirectory(prefix="dpagent-pooler-") as name:
        place, user = Path(name), "postgres" if os.geteuid() == 0 else None
        (place / "users").write_text(f'"{USER}" "{PASSWORD}"\n')
        (place / "pgbouncer.ini").write_text(
            f"[databases]\n* = host=127.0.0.1 port={server.port}\n[pgbouncer]\nlisten_port=6432\n"
            f"unix_socket_dir={place}\nauth_type=plain\nauth_file={place}/users\npool_mode={mode}\n"
        )
        if os.geteuid() == 0:  # It does not run as root.
            for path in (place, *place.iterdir()):
                shutil.chown(path, "postgres")
        log = (place / "log").open("wb")
        words = [PGBOUNCER, str(place / "pgbouncer.ini")]
        with log, subprocess.Popen(words, user=user, stdout=log, stderr=log) as process:
            try:
                wait_until((place / ".s.PGSQL.6432").exists, "the pooler")
                yield place
            finally:
                process.terminate()


@pytest.mark.parametrize("mode", ["transaction", "statement"])
def test_a_pooler_that_lends_sessions_is_refused(postgresql: Postgresql, database: str, mode: str) -> None:
    """Before, two coordinators led at once, and a `status` made what they write read-only."""
    with pooler(postgresql, mode) as place:
        address = PostgresqlAddress(f"postgresql://{USER}@/{database}?host={place}&port=6432", PASSWORD)
        with pytest.raises(ConfigurationError, match="lends a session to several programs"):
            open_postgresql(address, "coordinator")


def test_behind_a_pooler_with_sessions_of_ones_own_one_leads(postgresql: Postgresql, database: str) -> None:
    with pooler(postgresql, "session") as place:
        address = PostgresqlAddress(f"postgresql://{USER}@/{database}?host={place}&port=6432", PASSWORD)
        with closing(open_postgresql(address, "one")) as one, closing(open_postgresql(address, "two")) as two:
            assert one.lead()
            assert not two.lead()
        with closing(open_postgresql(address, "three")) as three:
            assert three.lead()
