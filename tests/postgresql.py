"""A PostgreSQL of the tests' own, as a child process on a loopback port."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.figures import Skipped
from benchmarks.postgresql_server import PostgresqlServer as Postgresql
from coordinator.database.settings import PostgresqlAddress

__all__ = ["Postgresql", "new_place", "postgresql_server"]


@contextmanager
def postgresql_server() -> Iterator[Postgresql]:
    """A server for as long as the context lasts. Tests end processes, and no machine."""
    try:
        server = Postgresql(durable=False)
    except Skipped as error:
        pytest.skip(str(error))
    with server:
        yield server


def new_place(server: Postgresql) -> PostgresqlAddress:
    """A place for the state of one coordinator."""
    return server.place(server.new_schema())
