"""YAML files checked against a schema, with errors that name file, line and key.

The schema (:mod:`dpagent.schema`) also generates the reference page. Variables of the environment and
options stand over the file (:mod:`dpagent.overrides`); an error in one of their values names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpagent.errors import ConfigurationError
from dpagent.overrides import Overridden, Override, keys_of, overlaid, overridden, successor
from dpagent.schema.base import Schema
from dpagent.schema.problems import Fault, Location, Problem, SchemaError
from dpagent.settings import SettingsT
from dpagent.wording import named
from dpagent.yaml_file import Document, read_document


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
        settings = schema.checked(made.values)
    except SchemaError as error:
        problems += [_sentence(document, made, problem, schema) for problem in error.problems]
    if problems:
        raise ConfigurationError("\n".join(problems))
    return settings


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


def _first_key(schema: type[Schema]) -> str:
    return schema.names[0]


def _sentence(document: Document, made: Overridden, problem: Problem, schema: type[Schema]) -> str:
    location, key = problem.location, problem.key
    is_missing = problem.fault is Fault.MISSING
    where = f"{_place(document, made, location[:-1] if is_missing else location, is_missing=is_missing)}: "
    match problem.fault:
        case Fault.UNKNOWN:
            keys = keys_of(schema)
            if now := successor(location, keys):
                return f"{where}{key}: unknown key. {now} took its place."
            choices = ", ".join(each[-1] for each in keys if each[:-1] == location[:-1])
            return f"{where}{key}: unknown key." + (f" Expected one of: {choices}." if choices else "")
        case Fault.MISSING:
            return f"{where}{key}: this key is missing."
        case _:
            return f"{where}{f'{key}: ' if key else ''}{problem.complaint()}."


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
