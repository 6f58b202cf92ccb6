"""How a value is checked against its type.

Types are strict: no text is a number, no number a truth value, and a number that is to be a whole one is
given as one. A whole number is a number, a list may be given where a tuple is meant, and a member of an
enumeration by its value, for files have neither; a path is given as text.
"""

from __future__ import annotations

import enum
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from dpagent.schema.limits import After, Before, Limits
from dpagent.schema.problems import NOTHING, Fault, Problem
from dpagent.wording import counted

Problems = list[Problem]


class Check(ABC):
    """Whether a value is what is expected.

    Attributes:
        words: what is expected.
        has_items: whether that is a list or a map, whose length can be limited before its items are read.
    """

    words: str
    has_items: ClassVar[bool] = False

    @abstractmethod
    def takes(self, value: object) -> bool:
        """Whether a value is of the kind that this is for, so that what else is wrong with it is said in its
        words."""

    @abstractmethod
    def read(self, value: Any, problems: Problems) -> Any:
        """The value as the program has it. What is wrong with it is added to ``problems``, and what is
        returned then means nothing."""

    def wrong(self, value: object) -> Problem:
        """The problem that a value is nothing like what is expected."""
        return Problem(Fault.OTHER, self.words, value)


class Plain(Check):
    """A type of Python's own."""

    def __init__(self, kind: type, words: str) -> None:
        self._kind, self.words = kind, words
        # A truth value is a whole number to Python.
        self._is_number = kind is int

    def takes(self, value: object) -> bool:
        return isinstance(value, self._kind) and not (self._is_number and isinstance(value, bool))

    def read(self, value: Any, problems: Problems) -> Any:
        if not self.takes(value):
            problems.append(self.wrong(value))
        return value


class Text(Plain):
    """Characters that UTF-8 can hold."""

    def __init__(self) -> None:
        super().__init__(str, "text")

    def read(self, value: Any, problems: Problems) -> Any:
        super().read(value, problems)
        if isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:  # Half a pair of surrogates, which JSON can name.
                problems.append(Problem(Fault.OTHER, "text that UTF-8 can hold", value))
        return value


class Number(Plain):
    """A number in floating point, by default a finite one."""

    def __init__(self, *, finite: bool = True) -> None:
        super().__init__(float, "a number")
        self._finite = finite

    def takes(self, value: object) -> bool:
        return isinstance(value, float | int) and not isinstance(value, bool)

    def read(self, value: Any, problems: Problems) -> Any:
        if not self.takes(value):
            problems.append(self.wrong(value))
            return value
        try:
            number = float(value)
        except OverflowError:  # A whole number that is beyond the greatest, and yet not infinity.
            number = None
        if number is None or (self._finite and not math.isfinite(number)):
            problems.append(Problem(Fault.RANGE, "a finite number", value))
        return number


class FilePlace(Check):
    """A path, or its text."""

    words = "a path"

    def takes(self, value: object) -> bool:
        return isinstance(value, str | Path)

    def read(self, value: Any, problems: Problems) -> Any:
        if not self.takes(value):
            problems.append(self.wrong(value))
            return value
        return Path(value)


class Choice(Check):
    """One of some values: of a ``Literal``, or of an enumeration."""

    def __init__(self, choices: Mapping[Any, Any]) -> None:
        self._choices = choices
        shown = [repr(each) for each in choices]
        self.words = " or ".join(part for part in (", ".join(shown[:-1]), shown[-1]) if part)

    def _found(self, value: object) -> Any:
        if isinstance(value, enum.Enum) and value in self._choices.values():
            return value
        for choice, meant in self._choices.items():
            # True is 1 to Python, and so is 1.0.
            is_alike = isinstance(value, type(choice)) and isinstance(value, bool) is isinstance(choice, bool)
            if is_alike and choice == value:
                return meant
        return NOTHING

    def takes(self, value: object) -> bool:
        return self._found(value) is not NOTHING

    def read(self, value: Any, problems: Problems) -> Any:
        found = self._found(value)
        if found is NOTHING:
            problems.append(self.wrong(value))
        return found


class Limited(Check):
    """What :class:`Limits` say."""

    def __init__(self, inner: Check, limits: Limits) -> None:
        self._inner, self._limits, self.words = inner, limits, inner.words
        self._pattern = None if limits.pattern is None else re.compile(limits.pattern)
        self._has_range = any(each is not None for each in (limits.ge, limits.gt, limits.le, limits.lt))
        self._has_length = limits.min_length is not None or limits.max_length is not None

    def takes(self, value: object) -> bool:
        return self._inner.takes(value)

    def read(self, value: Any, problems: Problems) -> Any:
        before = len(problems)
        if self._inner.has_items and self._inner.takes(value) and (expected := self._of_length(value)):
            problems.append(Problem(Fault.OTHER, expected, value))
            return value
        made = self._inner.read(value, problems)
        if len(problems) > before or made is None:
            return made
        if self._has_range and (expected := self._of_range(made)):
            problems.append(Problem(Fault.RANGE, expected, value))
        elif self._has_length and (expected := self._of_length(made)):
            problems.append(Problem(Fault.OTHER, expected, value))
        elif self._pattern is not None and self._pattern.fullmatch(made) is None:
            problems.append(Problem(Fault.OTHER, f"text of the pattern {self._limits.pattern}", value))
        return made

    def _of_range(self, number: float) -> str:
        limits = self._limits
        # In this form, what is no number at all (NaN) is within no range.
        if limits.ge is not None and not number >= limits.ge:
            return f"a number of at least {_shown(limits.ge)}"
        if limits.gt is not None and not number > limits.gt:
            return f"a number above {_shown(limits.gt)}"
        if limits.le is not None and not number <= limits.le:
            return f"a number of at most {_shown(limits.le)}"
        if limits.lt is not None and not number < limits.lt:
            return f"a number below {_shown(limits.lt)}"
        return ""

    def _of_length(self, value: Any) -> str:
        least, most = self._limits.min_length, self._limits.max_length
        if least is not None and len(value) < least:
            return f"{_long(value)} of at least {_many(value, least)}"
        if most is not None and len(value) > most:
            return f"{_long(value)} of at most {_many(value, most)}"
        return ""


class Own(Check):
    """A check of the schema's own, after that of the type or before it."""

    def __init__(self, inner: Check, rule: After | Before) -> None:
        self._inner, self._rule, self.words = inner, rule, inner.words

    def takes(self, value: object) -> bool:
        return isinstance(self._rule, Before) or self._inner.takes(value)

    def read(self, value: Any, problems: Problems) -> Any:
        before = len(problems)
        try:
            if isinstance(self._rule, Before):
                return self._inner.read(self._rule.function(value), problems)
            made = self._inner.read(value, problems)
            return made if len(problems) > before else self._rule.function(made)
        except (ValueError, AssertionError) as error:
            problems.append(problem_by(error, value))
            return value


def problem_by(error: Exception, value: object) -> Problem:
    """The problem that a check of the schema's own found."""
    return Problem(Fault.OTHER, "", value, error=error)


def _shown(bound: float) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def _long(value: object) -> str:
    return "text" if isinstance(value, str) else "bytes" if isinstance(value, bytes) else "a list"


def _many(value: object, number: int) -> str:
    if isinstance(value, str):
        return counted(number, "character")
    return str(number)
