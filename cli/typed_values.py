"""What is wrong with an option's value, in the words of configurations: typer has pydantic's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import typer

from dpagent.schema.problems import Fault, Problem

_RANGES: Final = {
    "greater_than": "a number above {gt}", "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}", "less_than_equal": "a number of at most {le}",
    "finite_number": "a finite number",
}  # fmt: skip
_KINDS: Final = {"bool": "true or false", "float": "a number", "int": "a whole number", "string": "text"}


def problem_of(error: typer.BadParameter) -> Problem | None:
    """What typer found wrong with a value; None of another mistake, such as an option without one."""
    found = getattr(error.__cause__, "errors", None)
    if found is None:
        return None
    first = found(include_url=False)[0]
    kind, value = first["type"], first["input"]
    limits = first.get("ctx", {})
    if "error" in limits:  # Of a check of typer's, or of ours.
        return Problem(Fault.OTHER, "", value, error=limits["error"])
    if kind in _RANGES:
        return Problem(Fault.RANGE, _RANGES[kind].format(**_words(limits)), value)
    # int_type, int_parsing, int_from_float, … all come from the same expectation.
    expected = _KINDS.get(kind.partition("_")[0]) or str(first["msg"]).removeprefix("Input should be ")
    return Problem(Fault.OTHER, expected, value)


def _words(limits: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in limits.items()}
