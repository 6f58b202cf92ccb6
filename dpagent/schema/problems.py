"""What is wrong with values, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, TypeAlias

from dpagent.errors import ParameterError

Location: TypeAlias = tuple[int | str, ...]
"""Keys and list indices, from the outermost on."""


class _Nothing(Enum):
    NOTHING = "nothing"


NOTHING: Final = _Nothing.NOTHING
"""In place of a value where there is none. The same object in every process."""
_MOST_SHOWN: Final = 80


class WithheldError(ValueError):
    """What is wrong with a value that may hold a secret, so that it is not shown."""


class Fault(Enum):
    """What kind of problem it is."""

    MISSING = "missing"
    """A key that must be there is not."""
    UNKNOWN = "unknown"
    """A key is there that none knows."""
    RANGE = "range"
    """A number is too small, too large or not finite."""
    OTHER = "other"
    """All else: another type, a text or a list of another length, a check of the schema's own."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one value.

    Attributes:
        fault: of what kind it is.
        expected: in place of the value, in words.
        value: that came.
        location: of the value; of a missing key, where it should be.
        error: of a check of the schema's own, which has its own words.
    """

    fault: Fault
    expected: str
    value: object = NOTHING
    location: Location = ()
    error: Exception | None = None

    def below(self, key: int | str) -> Problem:
        """The same, of a value that stands under a key, or in a list."""
        return replace(self, location=(key, *self.location))

    @property
    def key(self) -> str:
        """Where it is, as ``privacy.epsilon``; empty for the whole."""
        return dotted(self.location)

    @property
    def is_out_of_range(self) -> bool:
        """Whether it is a number that is too small, too large or not finite."""
        return self.fault is Fault.RANGE or isinstance(self.error, ParameterError)

    def complaint(self, *, shows_value: bool = True) -> str:
        """What came and what was expected, without a full stop: ``got 0; expected a number of at least 1``.

        Args:
            shows_value: whether what came may be shown. A whole section is not: it may hold anything.
        """
        said = f"expected {self.expected}" if self.error is None else str(self.error).rstrip(".")
        if (
            not shows_value
            or self.value is NOTHING
            or isinstance(self.value, dict)
            or isinstance(self.error, WithheldError)
        ):
            return said
        came = _written(self.value)
        return said if self.error is not None and came in said else f"got {_beginning(came)}; {said}"

    def sentence(self, *, shows_value: bool = True) -> str:
        """The same after the place: ``privacy.epsilon: got 0; expected …``."""
        complaint = self.complaint(shows_value=shows_value)
        return f"{self.key}: {complaint}" if self.location else complaint


class SchemaError(ValueError):
    """Values are not what a schema says.

    Attributes:
        problems: what is wrong with them, in the order of the schema; at least one.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        # Made when it is asked for: who refuses a message says the first at the most.
        return "\n".join(each.sentence() for each in self.problems)

    @property
    def first(self) -> Problem:
        """The first of them."""
        return self.problems[0]


def dotted(location: Location) -> str:
    """A location as it is written. Whoever wrote the keys, it is short, and fit for a terminal.

    >>> dotted(("limits", "methods", 0)), dotted(("\\x1b[2J", "\\ud800"))
    ('limits.methods.0', '\\\\x1b[2J.\\\\ud800')
    """
    return ".".join(map(_part, location))


def _part(key: object) -> str:
    text = key if isinstance(key, str) else _written(key)
    return _beginning(text if text.isprintable() else repr(text)[1:-1])


def _written(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # A number of thousands of digits, lists in lists.
        return f"a value of type {type(value).__name__} that is too long to be shown"


def _beginning(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
