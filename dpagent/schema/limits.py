"""What a type alone does not say of a value: stands beside the type in ``Annotated``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of a number its range, of a text, bytes or a list the length, of a text its pattern.

    A list is limited itself, not its items. A text has to match as a whole, whether or not the pattern ends
    with ``$``, which in Python allows for a line's end after it.

    Attributes:
        ge, gt, le, lt: bounds of a number: at least, above, at most, below.
        min_length, max_length: of a text in characters, of a list or map in items.
        pattern: regular expression for the whole of a text.
        finite: whether a number must be finite.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    pattern: str | None = None
    finite: bool = True


@dataclass(frozen=True, slots=True)
class After:
    """A function that takes a value of the type, and returns it, or another in its place.

    Its ``ValueError`` says what is wrong.
    """

    function: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Before:
    """A function that takes what came, and returns what is checked in its place; as :class:`After`."""

    function: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class By:
    """Of a union of schemas: the key whose value says which one it is, by a ``Literal`` in each."""

    key: str
