"""Options of the command line as the settings of a dataset."""

from __future__ import annotations

from typing import Any, Final

import typer
from pydantic import ValidationError

from cli.data.wording import as_options
from dpagent.errors import ConfigurationError
from dpagent.learning.data.settings import DatasetSettings


def names(text: str | None) -> list[str] | None:
    """``a, b`` as a list."""
    return None if text is None else [name.strip() for name in text.split(",")]


def numbers(option: str, text: str | None) -> list[int] | None:
    """``28,28,1`` as a list of whole numbers."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r}: expected whole numbers, such as 28,28,1.", param_hint=option
        ) from error


def size(text: str | None) -> list[int] | None:
    """``32x24`` as width and height; a single number is a square."""
    if text is None:
        return None
    try:
        parts = [int(part) for part in text.lower().replace("×", "x").split("x")]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 2:
        raise typer.BadParameter(
            f"{text!r}: expected WIDTHxHEIGHT, such as 32x32, or one number for a square.",
            param_hint="--size",
        )
    return parts if len(parts) == 2 else [*parts, *parts]


def whole_number(text: str) -> int:
    """What a count of rows is given as."""
    try:
        return int(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: expected a whole number of rows, such as 64.") from error


def constants(option: str, text: str | None) -> float | dict[str, float] | None:
    """``9.81``, or ``x=9.81,y=0`` by the columns' names."""
    if text is None:
        return None
    try:
        if "=" not in text:
            return float(text)
        pairs = [part.rpartition("=") for part in text.split(",")]
        return {name.strip(): float(value) for name, _, value in pairs}
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r}: expected a number, or COLUMN=NUMBER,COLUMN=NUMBER.", param_hint=option
        ) from error


def settings_from(values: dict[str, Any]) -> DatasetSettings:
    """The settings of what was given; what was not given is left to its default.

    Raises:
        ConfigurationError: A value is out of its range; names the option.
    """
    given = _given(values)
    try:
        return DatasetSettings.model_validate(given)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = next((str(part) for part in reversed(problem["loc"]) if part in _OPTIONS), "")
        message = (
            str(problem["msg"]).removeprefix("Value error, ").removeprefix("Input should be ").rstrip(".")
        )
        option = f"--{key}: " if key else ""
        came = "" if isinstance(problem["input"], dict) else f"got {problem['input']!r}; expected "
        raise ConfigurationError(as_options(f"{option}{came}{message}.")) from error


_OPTIONS: Final = (
    "classes", "shape", "size", "label", "features", "offset", "scale", "window", "stride", "group",
    "delimiter",
)  # fmt: skip


def _given(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` without what is None, and without sections that are empty then."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and key in ("images", "csv"):
            value = _given(value)
            if not value:
                continue
        if value is not None:
            result[key] = value
    return result
