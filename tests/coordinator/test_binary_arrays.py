"""Columns as PostgreSQL's binary arrays: the server reads what was written, of each type."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Any

import pytest
from postgresql import Postgresql, new_place

from coordinator.database.binary_arrays import array_of
from coordinator.database.opening import open_postgresql


@pytest.mark.parametrize(
    ("kind", "own", "values"),
    [
        ("BLOB", "BYTEA", [os.urandom(16) for _ in range(600)]),
        ("BLOB", "BYTEA", [b"", b"a", b"\0\xff", b"x" * 70_000]),
        ("BLOB", "BYTEA", [b"", b""]),
        ("INTEGER", "BIGINT", [0, 1, -1, (1 << 63) - 1, -(1 << 63)]),
        ("REAL", "DOUBLE PRECISION", [0.0, -1.5, 1.7e9 + 0.123456, 5e-324, 1.7976931348623157e308]),
    ],
)
def test_the_server_reads_every_element(
    postgresql: Postgresql, kind: str, own: str, values: list[Any]
) -> None:
    with closing(open_postgresql(new_place(postgresql), "test")) as database, database.errors():
        rows = database.connection.execute(
            f"SELECT unnest(%b::{own}[]) AS value",  # type: ignore[arg-type]
            [array_of(kind, values)],
            binary=True,
        )
        assert [row["value"] for row in rows] == values
