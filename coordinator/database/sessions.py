"""A connection to PostgreSQL, of which each is a session of its own at the server.

Who leads is a lock of a session (:mod:`coordinator.database.postgresql`). A pooler that lends the sessions of
the server to its clients for a transaction at a time, such as PgBouncer with ``pool_mode = transaction``,
would let two coordinators lead at once, since both have the session that has the lock.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Final, TypeVar

import psycopg
from psycopg.rows import RowFactory, tuple_row

from coordinator.database.settings import PostgresqlAddress
from dpagent.errors import ConfigurationError, DatabaseAwayError

RowT = TypeVar("RowT")

_CONNECT_S: Final = 10
_LOOKS: Final = 5
"""Where two clients have one session, each of them shows it, unless others come in between all the time."""
_MARK: Final = "dpagent.session"
_SETTINGS_WRONG: Final = re.compile(
    "authentication failed|no password supplied|does not exist|no pg_hba.conf entry|SSL|could not translate|"
    "invalid connection option|certificate|not permitted to log in|invalid sslmode",
    re.IGNORECASE,
)
"""What no waiting mends, in messages of a server that speaks English."""


def connected(
    address: PostgresqlAddress, purpose: str, row_factory: RowFactory[RowT]
) -> psycopg.Connection[RowT]:
    """A connection.

    Args:
        address: of the database.
        purpose: what the server shows of it.
        row_factory: of the library.

    Raises:
        ConfigurationError: The address or the password is wrong.
        DatabaseAwayError: The server is not there.
    """
    try:
        return psycopg.connect(
            address.url, password=address.password, autocommit=True, row_factory=row_factory,
            client_encoding="utf8", connect_timeout=_CONNECT_S, application_name=f"dpagent {purpose}",
            keepalives_idle=10, keepalives_interval=5, keepalives_count=3, tcp_user_timeout=25_000,
        )  # fmt: skip
    except psycopg.OperationalError as error:
        raise _refusal(str(address), error) from error
    except psycopg.Error as error:  # of the URL
        raise ConfigurationError(f"store.url {address} cannot be used ({line_of(error)}).") from error


def require_own_session(connection: psycopg.Connection[Any], address: PostgresqlAddress) -> None:
    """See that no other client has the session of this connection.

    Args:
        connection: that was made.
        address: by which.

    Raises:
        ConfigurationError: A pooler lends it to others.
    """
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    # A pooler has told the client a number of its own.
    if row is None or row[0] == connection.info.backend_pid:
        return
    with closing(connected(address, "look for a pooler", tuple_row)) as other:
        pair: Sequence[psycopg.Connection[Any]] = (connection, other)
        for number, each in enumerate(pair):
            each.execute("SELECT set_config(%s, %s, false)", (_MARK, str(number)))
        for number, each in [*enumerate(pair)] * _LOOKS:
            found = each.execute("SELECT current_setting(%s, true)", (_MARK,)).fetchone()
            if found is None or found[0] != str(number):
                raise ConfigurationError(
                    f"A pooler at {address} lends a session to several programs in turn. Which coordinator"
                    " leads is a lock of its session: two would lead. Name PostgreSQL itself in store.url, or"
                    " set pool_mode = session."
                )


def _refusal(name: str, error: psycopg.OperationalError) -> Exception:
    said = line_of(error)
    if _SETTINGS_WRONG.search(said):
        return ConfigurationError(
            f"PostgreSQL at {name} refuses the connection ({said}). Check store.url and store.password_file, "
            "and that the database exists."
        )
    return DatabaseAwayError(f"No PostgreSQL answers at {name} ({said}).")


def line_of(error: BaseException) -> str:
    """What the library says, in one line."""
    return " ".join(str(error).split()).removeprefix("connection failed: ") or type(error).__name__
