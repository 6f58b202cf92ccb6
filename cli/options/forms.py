"""How the values of settings are written on a command line, and read back.

A command line has no lists and no maps: sizes are ``32x24``, lists ``a,b,c``, constants ``x=9.81,y=0``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from dpagent.errors import UsageError


@dataclass(frozen=True, slots=True)
class Form:
    """One way to write values.

    Attributes:
        type: What typer reads, and completes.
        parse: From that to the setting's value; raises ValueError with what was expected.
        write: From the setting's value to text that ``parse`` reads back.
        metavar: What stands for a value in the help text.
        words: Returns all values, where there are a few.
    """

    type: Any
    parse: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], str] = str
    metavar: str | None = None
    words: Callable[[], Sequence[str]] | None = None

    def read(self, value: Any, option: str) -> Any:
        """``parse``, with the option named in the error.

        Raises:
            UsageError: The value cannot be read.
        """
        try:
            return self.parse(value)
        except ValueError as error:
            raise UsageError(f"`{option}`: got {value!r}; {error}.") from error


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _names_or_count(text: str) -> list[str] | int:
    return int(text) if text.isascii() and text.isdigit() else _names(text)


def _names_or_count_as_text(value: Sequence[object] | int) -> str:
    return str(value) if isinstance(value, int) else _joined(value)


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("expected a whole number, such as 64") from None


def _whole_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError("expected whole numbers, such as 28,28,1") from None


def _size(text: str) -> list[int]:
    parts = text.lower().replace("×", "x").split("x")
    if not 1 <= len(parts) <= 2 or not all(part.isdecimal() for part in parts):
        raise ValueError("expected WIDTHxHEIGHT, such as 32x32, or one number for a square")
    return [int(parts[0]), int(parts[-1])]


def _constants(text: str) -> float | dict[str, float]:
    try:
        if "=" not in text:
            return float(text)
        pairs = [part.rsplit("=", 1) for part in text.split(",")]
        return {name.strip(): float(value) for name, value in pairs}
    except ValueError:
        raise ValueError("expected a number, or COLUMN=NUMBER,COLUMN=NUMBER") from None


def _constants_as_text(value: float | Mapping[str, float]) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}={number:.15g}" for name, number in value.items())
    return f"{value:.15g}"


def _joined(values: Sequence[object]) -> str:
    return ",".join(map(str, values))


def _is_off(given: bool) -> bool:
    return not given


TEXT: Final = Form(str)
FILE: Final = Form(Path, metavar="PATH")
NUMBER: Final = Form(float)
COUNT: Final = Form(int)
ROWS: Final = Form(str, _whole_number, metavar="ROWS")
NAMES: Final = Form(str, _names, _joined, "A,B,C")
CLASSES: Final = Form(str, _names_or_count, _names_or_count_as_text, "A,B,C or N")
SHAPE: Final = Form(str, _whole_numbers, _joined, "N,N,N")
SIZE: Final = Form(str, _size, lambda value: "x".join(map(str, value)), "WxH")
CONSTANTS: Final = Form(str, _constants, _constants_as_text, "X or A=X,B=Y")
DELIMITER: Final = Form(str, write=lambda value: "tab" if value == "\t" else str(value))
WEIGHTS: Final = Form(str, metavar="WEIGHTS")
SWITCH: Final = Form(bool)
SWITCH_OFF: Final = Form(bool, _is_off)
"""A flag that turns a setting off which is on by default."""


def choice(*words: str) -> Form:
    """One of some words."""
    return Form(Literal[words], words=lambda: words)


def registered(words: Callable[[], Sequence[str]], metavar: str) -> Form:
    """One of the names in a registry, which is imported when a value is read or completed, not for help."""

    def parse(text: str) -> str:
        if text not in words():
            raise ValueError(f"expected one of {', '.join(words())}")
        return text

    return Form(str, parse, metavar=metavar, words=words)
