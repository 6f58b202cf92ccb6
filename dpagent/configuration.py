"""YAML files checked against a schema, with errors that name file, line and key.

The schema is a pydantic model, which also generates the reference page. A file is first
parsed to nodes, so that every error can name the line of its value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from dpagent.errors import ConfigurationError, ParameterError
from dpagent.wording import counted, named

_Location = tuple[int | str, ...]


_MOST_CHARACTERS = 1_000_000


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads ``1e-5`` as a number, as YAML 1.2 does."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:float"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


class Settings(BaseModel):
    """Base of every configuration section: unknown keys and loose types are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=False
    )


def _not_empty(path: Path) -> Path:
    if not str(path).strip() or str(path) == ".":
        raise ValueError("a path is expected")
    return path


FilePath = Annotated[Path, Field(strict=False), AfterValidator(_not_empty)]
"""A path, written as text."""

SettingsT = TypeVar("SettingsT", bound=Settings)


def load_settings(path: Path, schema: type[SettingsT], *, base: Mapping[str, Any] | None = None) -> SettingsT:
    """Read a YAML file as ``schema``.

    Relative paths inside the file are unchanged; :func:`resolve` makes them relative
    to the file.

    Args:
        path: The file.
        schema: What it must be.
        base: Values that hold where the file has none (:func:`overlaid`).

    Raises:
        ConfigurationError: The file is missing or not YAML, a key is unknown or missing, or
            a value has the wrong type or range. The text has one line per problem, with file,
            line, key, actual value and expectation.
    """
    node, values = _read(path, example=f"{_first_key(schema)}: …")
    lines, _ = _line_numbers(node)
    try:
        return schema.model_validate(overlaid(base or {}, values))
    except ValidationError as error:
        raise ConfigurationError(
            "\n".join(_sentence(path, lines, problem, schema) for problem in error.errors(include_url=False))
        ) from error


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
        text = str(problem["ctx"]["error"]).rstrip(".")
        return text if repr(value) in text else came + text
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


def lines_of(path: Path) -> dict[str, int]:
    """The line of every key in a YAML file, by its dotted name.

    Raises:
        ConfigurationError: The file is missing or not YAML.
    """
    lines, _ = _line_numbers(_read(path, example="fleet: meadow")[0])
    return {_dotted(location): line for location, line in lines.items() if location}


def overlaid(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``values`` over it: sections key by key, all else (lists too) as a whole.

    >>> overlaid({"a": {"b": 1, "c": [2]}, "d": 3}, {"a": {"c": []}, "e": 4})
    {'a': {'b': 1, 'c': []}, 'd': 3, 'e': 4}
    """
    both = dict(base)
    for key, value in values.items():
        below = both.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            both[key] = overlaid(below, value)
        else:
            both[key] = value
    return both


def load_yaml(path: Path, *, example: str) -> dict[Any, Any]:
    """The keys and values of a YAML file without a schema check.

    Args:
        path: The file.
        example: A possible first line, for the error message.

    Raises:
        ConfigurationError: The file is missing or not YAML, or has a duplicate key.
    """
    _, values = _read(path, example=example)
    return values


def _read(path: Path, *, example: str) -> tuple[yaml.MappingNode, dict[Any, Any]]:
    """The file as nodes with line numbers, and as plain values."""
    try:
        with path.open(encoding="utf-8") as stream:
            text = stream.read(_MOST_CHARACTERS + 1)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}. Give the path of a YAML file.") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start})."
        ) from error
    if len(text) > _MOST_CHARACTERS:
        raise ConfigurationError(
            f"{path} has more than {_MOST_CHARACTERS:,} characters; expected a short YAML file."
        )
    try:
        node = yaml.compose(text, Loader=_Loader)
        if (number := _line_of_itself(node, (), set())) is not None:
            raise ConfigurationError(f"{path}:{number}: a value contains itself.")
        if _size(node, {}) > _MOST_CHARACTERS:
            raise ConfigurationError(f"{path}: aliases expand to too many values; write them out.")
        values = yaml.load(text, Loader=_Loader)  # a SafeLoader: plain values only
    except RecursionError as error:
        raise ConfigurationError(f"{path}: maps or lists are nested too deeply.") from error
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigurationError(f"{line}: not valid YAML: {problem}.") from error
    if not isinstance(node, yaml.MappingNode) or not isinstance(values, dict):
        raise ConfigurationError(f"{path}:1: expected keys and values, such as `{example}`.")
    _, repeated = _line_numbers(node)
    if repeated:
        raise ConfigurationError(
            "\n".join(f"{path}:{line}: {_dotted(key)}: duplicate key." for key, line in repeated)
        )
    return node, values


def _first_key(schema: type[BaseModel]) -> str:
    return next(iter(schema.model_fields))


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [value for _, value in node.value]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _line_of_itself(node: yaml.Node | None, ancestors: tuple[int, ...], seen: set[int]) -> int | None:
    """The line of a value that contains itself through an alias, if there is one."""
    if node is None or id(node) in ancestors:
        return None if node is None else int(node.start_mark.line) + 1
    if id(node) in seen:
        return None
    found = (_line_of_itself(child, (*ancestors, id(node)), seen) for child in _children(node))
    line = next((line for line in found if line is not None), None)
    seen.add(id(node))
    return line


def _size(node: yaml.Node | None, known: dict[int, int]) -> int:
    """The number of values in a node with all aliases expanded."""
    if node is None:
        return 0
    if id(node) not in known:
        known[id(node)] = 1 + sum(_size(child, known) for child in _children(node))
    return known[id(node)]


def _line_numbers(root: yaml.MappingNode) -> tuple[dict[_Location, int], list[tuple[_Location, int]]]:
    """The line of every key and list item by its location, and the duplicate keys."""
    lines: dict[_Location, int] = {(): 1}
    repeated: list[tuple[_Location, int]] = []

    def walk(node: yaml.Node, location: _Location) -> None:
        children: Iterable[tuple[int | str, yaml.Node, yaml.Node]] = ()
        if isinstance(node, yaml.MappingNode):
            children = [(str(key.value), key, value) for key, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            children = [(index, value, value) for index, value in enumerate(node.value)]
        for name, place, value in children:
            key = (*location, name)
            line = place.start_mark.line + 1
            if key in lines:
                repeated.append((key, line))
            lines[key] = line
            walk(value, key)

    walk(root, ())
    return lines, repeated


def _dotted(location: _Location) -> str:
    return ".".join(str(part) for part in location)


def _known_keys(schema: type[BaseModel], location: _Location) -> list[str]:
    """The allowed keys of the section at ``location``, if plain nesting determines them."""
    for part in location:
        annotation: Any = (
            schema.model_fields[str(part)].annotation if str(part) in schema.model_fields else None
        )
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        schema = annotation
    return list(schema.model_fields)


def _sentence(path: Path, lines: dict[_Location, int], problem: Any, schema: type[BaseModel]) -> str:
    location: _Location = tuple(problem["loc"])
    # Tags of a discriminated union appear in the location but not in the file: skip them.
    known: _Location = ()
    for part in location:
        if (*known, part) in lines:
            known = (*known, part)
    where = f"{path}:{lines[known]}: "
    match problem["type"]:
        case "extra_forbidden":
            choices = ", ".join(_known_keys(schema, known[:-1]))
            return f"{where}{_dotted(known)}: unknown key." + (
                f" Expected one of: {choices}." if choices else ""
            )
        case "missing":
            return f"{where}{_dotted((*known, location[-1]))}: this key is missing."
        case _:
            key = f"{_dotted(known)}: " if known else ""
            return f"{where}{key}{complaint(problem)}."
