"""YAML files checked against a schema, with errors that name file, line and key.

The schema is a pydantic model, which also generates the reference page. Variables of the environment and
options stand over the file (:mod:`dpagent.overrides`); an error in one of their values names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from dpagent.errors import ConfigurationError, ParameterError
from dpagent.overrides import Overridden, Override, keys_of, overlaid, overridden, successor
from dpagent.settings import SettingsT, WithheldError
from dpagent.wording import counted, named
from dpagent.yaml_file import Document, Location, dotted, read_document


def load_settings(
    path: Path,
    schema: type[SettingsT],
    *,
    base: Mapping[str, Any] | None = None,
    overrides: Sequence[Override] = (),
    text: str | None = None,
) -> SettingsT:
    """Read a YAML file as ``schema``.

    Relative paths inside the file are unchanged; :func:`resolve` makes them relative
    to the file. So it does with those of overrides.

    Args:
        path: The file.
        schema: What it must be.
        base: Values that hold where the file has none (:func:`~dpagent.overrides.overlaid`).
        overrides: What holds in place of the file's values, the strongest last.
        text: What the file would hold; it is not read then, and need not be there.

    Raises:
        ConfigurationError: The file is missing or not YAML, a key is unknown or missing, or
            a value has the wrong type or range. The text has one line per problem, with file and
            line, or the override, key, actual value and expectation.
    """
    document = read_document(path, example=f"{_first_key(schema)}: …", text=text)
    made = overridden(schema, overlaid(base or {}, document.values), overrides)
    problems = made.problems
    try:
        settings = schema.model_validate(made.values)
    except ValidationError as error:
        problems += [
            _sentence(document, made, problem, schema) for problem in error.errors(include_url=False)
        ]
    if problems:
        raise ConfigurationError("\n".join(problems))
    return settings


_EXPECTED: Final = {
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "finite_number": "a finite number",
    "literal_error": "{expected}",
    "missing": "a value",
    "path_type": "a path",
    "string_pattern_mismatch": "text of the pattern {pattern}",
    "string_too_long": "text of at most {most_characters}",
    "string_too_short": "text of at least {least_characters}",
    "too_long": "a list of at most {max_length}",
    "too_short": "a list of at least {min_length}",
}
_KINDS: Final = {
    "bool": "true or false",
    "dict": "keys and values",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "model": "keys and values",
    "string": "text",
    "tuple": "a list",
}
_RANGES: Final = frozenset(
    {"greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number"}
)
_MOST_SHOWN: Final = 80


def is_out_of_range(problem: Mapping[str, Any]) -> bool:
    """Whether a problem that pydantic found is a number that is too small, too large or not finite."""
    return problem["type"] in _RANGES or isinstance(problem.get("ctx", {}).get("error"), ParameterError)


def complaint(problem: Mapping[str, Any]) -> str:
    """A problem that pydantic found with a value, in words that need no knowledge of pydantic.

    The one place that turns the library's error types into sentences, for files, options and databases.

    Args:
        problem: One of ``ValidationError.errors()``, with or without its input.

    Returns:
        For example ``got 0; expected a number of at least 1``, without a full stop. A check of our own has
        its own words.
    """
    value = problem.get("input")
    shown = repr(value)
    if len(shown) > _MOST_SHOWN:
        shown = f"{shown[:_MOST_SHOWN]}…"
    # The input of a check across keys is the whole section: do not repeat it.
    came = "" if "input" not in problem or isinstance(value, dict) else f"got {shown}; "
    if problem["type"] in ("value_error", "assertion_error"):
        error = problem["ctx"]["error"]
        text = str(error).rstrip(".")
        return text if repr(value) in text or isinstance(error, WithheldError) else came + text
    return f"{came}expected {_expected(problem['type'], problem.get('ctx', {}), str(problem['msg']))}"


def _expected(kind: str, limits: Mapping[str, Any], message: str) -> str:
    if kind in _EXPECTED:
        words = {name: f"{value:g}" for name, value in limits.items() if isinstance(value, float)}
        words["least_characters"] = counted(limits.get("min_length", 0), "character")
        words["most_characters"] = counted(limits.get("max_length", 0), "character")
        return _EXPECTED[kind].format(**{**limits, **words})
    # int_type, int_parsing, int_from_float, … all come from the same expectation.
    return _KINDS.get(kind.partition("_")[0]) or message.removeprefix("Input should be ").rstrip(".")


def resolve(path: Path, file: Path) -> Path:
    """``path`` relative to the directory of the configuration ``file``."""
    return path if path.is_absolute() else file.parent / path


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that is not as it was. Its text names both values."""

    key: str
    """Dotted, as ``privacy.epsilon``."""
    before: object
    now: object

    def __str__(self) -> str:
        return f"{named(self.key)} was {self.before!r} and is {self.now!r}"


def read_password(file: Path, setting: str) -> str:
    """The password in a file's first line.

    Args:
        file: that the setting names.
        setting: its key, for errors.

    Raises:
        ConfigurationError: The file cannot be read, or is empty.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{setting} {file} cannot be read "
            f"({getattr(error, 'strerror', None) or 'not UTF-8'}). Its first line is the password."
        ) from error
    if not lines or not lines[0]:
        raise ConfigurationError(f"{setting} {file} is empty; its first line is the password.")
    return lines[0]


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any], section: str = "") -> list[Change]:
    """All settings that differ, in their order; one that is missing counts as None.

    >>> [str(each) for each in changed_settings({"a": {"b": 1, "c": 2}}, {"a": {"b": 3, "c": 2}, "d": 4})]
    ['`a.b` was 1 and is 3', '`d` was None and is 4']
    """
    changes = []
    for key in {**now, **before}:
        old, new = before.get(key), now.get(key)
        if isinstance(old or new, Mapping) and isinstance(new or {}, Mapping):
            changes += changed_settings(old or {}, new or {}, f"{section}{key}.")
        elif old != new:
            changes.append(Change(f"{section}{key}", old, new))
    return changes


def _first_key(schema: type[BaseModel]) -> str:
    return next(iter(schema.model_fields))


def _sentence(document: Document, made: Overridden, problem: Any, schema: type[BaseModel]) -> str:
    known = _in_values(tuple(problem["loc"]), made.values)
    kind = problem["type"]
    where = f"{_place(document, made, known, is_missing=kind == 'missing')}: "
    match kind:
        case "extra_forbidden":
            keys = keys_of(schema)
            if now := successor(known, keys):
                return f"{where}{dotted(known)}: unknown key. {now} took its place."
            choices = ", ".join(key[-1] for key in keys if key[:-1] == known[:-1])
            return f"{where}{dotted(known)}: unknown key." + (
                f" Expected one of: {choices}." if choices else ""
            )
        case "missing":
            return f"{where}{dotted((*known, problem['loc'][-1]))}: this key is missing."
        case _:
            key = f"{dotted(known)}: " if known else ""
            return f"{where}{key}{complaint(problem)}."


def _in_values(location: Location, values: Mapping[str, Any]) -> Location:
    """A location of pydantic's as it is in the values, which have no tags of discriminated unions."""
    known: Location = ()
    place: Any = values
    for part in location:
        if (isinstance(place, Mapping) and part in place) or (
            isinstance(place, Sequence)
            and not isinstance(place, str)
            and isinstance(part, int)
            and part < len(place)
        ):
            known, place = (*known, part), place[part]  # type: ignore[index]
    return known


def _place(document: Document, made: Overridden, known: Location, *, is_missing: bool) -> str:
    """Where a value stands; of what does not fit together, all places."""
    for end in range(len(known), 0, -1):
        if (source := made.sources.get(known[:end])) is not None:
            return source
    where = document.place(known)
    # A key that is missing in a section of the file is no override's fault.
    if is_missing and known in document.lines:
        return where
    sources = [source for location, source in made.sources.items() if location[: len(known)] == known]
    return f"{where}, with {', '.join(dict.fromkeys(sources))}" if sources else where
