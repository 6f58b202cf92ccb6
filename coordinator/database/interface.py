"""What SQLite and PostgreSQL do alike for the coordinator, so that each statement is written once.

Statements are in the SQL that both understand, with ``?`` for values. What they cannot say alike is a method
here: adding rows of which some may be there, and telling whether somebody else has written.

A *transaction* excludes all others that are not *shared*, as SQLite has it anyway. Shared ones run beside
each other, and see nothing of each other before they end: workers count fragments in them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol


class Row(Protocol):
    """A row of an answer, by the place or the name of a column; ``**row`` gives all by name."""

    def __getitem__(self, key: Any, /) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...

    def keys(self) -> list[str]:
        """The columns' names."""
        ...


class Result(Protocol):
    """The answer to a statement."""

    @property
    def rowcount(self) -> int:
        """Rows that it changed."""
        ...

    def fetchone(self) -> Any:
        """The next row, or None."""
        ...

    def fetchall(self) -> list[Any]:
        """All rows that are left."""
        ...

    def __iter__(self) -> Iterator[Any]: ...


class Reader(ABC):
    """A database that is open for reading.

    Attributes:
        name: By which a person knows it, for texts: a file, or an address without its password.
    """

    name: str

    @abstractmethod
    def execute(self, statement: str, values: Sequence[object] = ()) -> Result:
        """Run one statement."""

    @abstractmethod
    def now(self) -> float:
        """Unix time, by one clock for all programs that share the database."""

    @abstractmethod
    def mark(self) -> str:
        """What changes whenever another program has written."""

    @abstractmethod
    def errors(self) -> AbstractContextManager[None]:
        """Turn the library's errors into ours, with a sentence.

        Raises:
            StorageError: The database cannot be read or written.
            DatabaseAwayError: It is not there at the moment.
        """

    @abstractmethod
    def close(self) -> None:
        """Close it."""

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Database(Reader):
    """A database that is open for reading and writing."""

    @abstractmethod
    def execute_many(self, statement: str, rows: Sequence[Sequence[object]]) -> None:
        """Run a statement for each row of values."""

    @abstractmethod
    def stream(self, statement: str, values: Sequence[object] = ()) -> Iterator[Row]:
        """The rows of an answer one after the other: never all of them in memory."""

    @abstractmethod
    def add_absent(
        self, table: str, columns: Mapping[str, str], rows: Sequence[Sequence[object]]
    ) -> set[Any]:
        """Add rows, except those whose first column is there already.

        Args:
            table: its name.
            columns: by name, the type of each as :mod:`coordinator.database.schema` calls it; the first is
                the table's key.
            rows: of values, with keys that differ.

        Returns:
            The keys of the rows that were added.
        """

    @abstractmethod
    def transaction(self, *, shared: bool = False) -> AbstractContextManager[None]:
        """All statements inside take effect and are durable, or none of them does; see :meth:`errors`.

        Args:
            shared: whether others that are shared may run at the same time.
        """

    @abstractmethod
    def version(self) -> int:
        """A number that changes whenever another program has changed the queue of jobs."""

    @abstractmethod
    def erase_what_is_deleted(self) -> None:
        """From now on leave as little of a closed round's values behind as the database can: no noise hides
        them."""

    @abstractmethod
    def fold_log(self) -> None:
        """Let go of what was deleted, if it is to be erased."""
