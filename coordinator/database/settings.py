"""The section ``store`` of ``fleet.yaml``: where the coordinator keeps its state."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import parse_qsl, urlsplit

from dpagent.configuration import read_password, resolve
from dpagent.schema.limits import After
from dpagent.schema.problems import WithheldError
from dpagent.settings import FilePath, Settings

_FORM: Final = "postgresql://USER@HOST[:PORT]/DATABASE"
_SECRETS: Final = frozenset({"password", "passfile", "sslpassword"})


def database_url(url: str) -> str:
    """The URL, or a ValueError with what was expected.

    >>> database_url("postgresql://fleet@db.example/meadow?sslmode=verify-full")
    'postgresql://fleet@db.example/meadow?sslmode=verify-full'
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:  # Where a password has brackets, it is one of these.
        raise WithheldError(f"expected {_FORM}; this is no URL") from error
    if parts.password is not None or any(key in _SECRETS for key, _ in parse_qsl(parts.query)):
        raise WithheldError("a password does not belong in the URL; use `password_file`")
    if parts.scheme not in ("postgresql", "postgres"):
        expected = f"expected {_FORM}, or nothing for SQLite in state_dir"
        # Without a scheme that it knows, nobody can tell where a password would be.
        raise WithheldError(f"{expected}; this begins otherwise") if "@" in url else ValueError(expected)
    if not parts.path.strip("/"):
        raise ValueError(f"expected {_FORM}, with the name of a database")
    return url


class StoreSettings(Settings):
    """Where the coordinator keeps its state: in ``state_dir``, or in PostgreSQL, so that several programs on
    several machines share it (``docs/scale.md``)."""

    url: Annotated[str, After(database_url)] | None = None
    """``postgresql://user@host[:port]/database``, with libpq's parameters such as ``?sslmode=verify-full``;
    it needs the extra ``postgresql``. By default SQLite in ``state_dir``."""
    password_file: FilePath | None = None
    """A file whose first line is the database's password, relative to the configuration file."""
    shares_sealing_key: bool = False
    """Whether the coordinator puts its sealing key into the database, for workers that have no file of it.
    Whoever reads the database then opens every fragment."""

    def resolved(self, file: Path) -> StoreSettings:
        """The same settings with paths resolved relative to the configuration ``file``."""
        if self.password_file is None:
            return self
        return self.with_values({"password_file": resolve(self.password_file, file)})

    def address(self) -> PostgresqlAddress | None:
        """Where PostgreSQL is; None for SQLite.

        Raises:
            ConfigurationError: The password cannot be read.
        """
        return None if self.url is None else PostgresqlAddress(self.url, self._password())

    def _password(self) -> str | None:
        if self.password_file is None:
            return None
        return read_password(self.password_file, "store.password_file")


@dataclass(frozen=True, slots=True)
class PostgresqlAddress:
    """A database of PostgreSQL."""

    url: str
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """Without parameters and without a password."""
        return self.url.partition("?")[0]


StorePlace = Path | PostgresqlAddress
"""Where a coordinator's state is: the state directory with SQLite in it, or PostgreSQL."""
