"""YAML as plain values, with the line of each: whole files, and values that stand somewhere else."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dpagent.errors import ConfigurationError
from dpagent.schema.problems import Location, dotted

_MOST_CHARACTERS = 1_000_000
_SHORT = 4_000
"""Characters of a text that cannot nest so deeply that libyaml, which has no limit, runs out of stack: it has
half as many levels at most."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads ``1e-5`` as a number, as YAML 1.2 does."""


class _QuickLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The same with the parser of libyaml, where PyYAML has it: a tenth of the time."""


for _loader in (_Loader, _QuickLoader):
    _loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:float"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(
            r"^[-+]?(?:(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$"
        ),
        list("-+0123456789."),
    )


@dataclass(frozen=True, slots=True)
class Document:
    """A file that was read.

    Attributes:
        path: of the file.
        values: its keys and values.
        lines: of each key and list item.
    """

    path: Path
    values: dict[Any, Any]
    lines: Mapping[Location, int]

    def place(self, location: Location) -> str:
        """File and line of a value, or of the innermost section around it that the file has."""
        known = next(end for end in range(len(location), -1, -1) if location[:end] in self.lines)
        return f"{self.path}:{self.lines[location[:known]]}"


def read_document(path: Path, *, example: str, text: str | None = None) -> Document:
    """Read a YAML file of keys and values.

    Args:
        path: The file.
        example: A possible first line, for the error message.
        text: What it would hold; it is not read then, and need not be there.

    Raises:
        ConfigurationError: The file is missing or not YAML, or has a duplicate key.
    """
    if text is None:
        text = _text_in(path)
    node, values, lines = _parsed(text, str(path), at="{}:{}".format)
    if not isinstance(node, yaml.MappingNode) or not isinstance(values, dict):
        raise ConfigurationError(f"{path}:1: expected keys and values, such as `{example}`.")
    return Document(path, values, lines)


def _text_in(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as stream:
            return stream.read(_MOST_CHARACTERS + 1)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}. Give the path of a YAML file.") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start})."
        ) from error


def load_yaml(path: Path, *, example: str) -> dict[Any, Any]:
    """The keys and values of a YAML file without a schema check.

    Raises:
        ConfigurationError: as of :func:`read_document`.
    """
    return read_document(path, example=example).values


def read_value(text: str, source: str) -> Any:
    """A value that stands elsewhere than in a file.

    Args:
        text: The value as YAML.
        source: Where it stands, for the error message.

    Raises:
        ConfigurationError: It is not YAML, or has a duplicate key.
    """
    at = "{}:{}" if "\n" in text else "{}"
    return _parsed(text, source, at=at.format)[1]


def _parsed(
    text: str, source: str, *, at: Callable[[str, int], str]
) -> tuple[yaml.Node | None, Any, dict[Location, int]]:
    """Text as nodes, as plain values, and the line of each key and list item.

    ``at`` writes the source with a line.
    """
    if len(text) > _MOST_CHARACTERS:
        raise ConfigurationError(
            f"{source} has more than {_MOST_CHARACTERS:,} characters; expected a short YAML file."
        )
    try:
        loader, node = _node_in(text)
        if (number := _line_of_itself(node, (), set())) is not None:
            raise ConfigurationError(f"{at(source, number)}: a value contains itself.")
        if _size(node, {}) > _MOST_CHARACTERS:
            raise ConfigurationError(f"{source}: aliases expand to too many values; write them out.")
        values = None if node is None else loader.construct_document(node)  # of a SafeLoader: plain values
    except RecursionError as error:
        raise ConfigurationError(f"{source}: maps or lists are nested too deeply.") from error
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = at(source, mark.line + 1) if mark is not None else source
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise ConfigurationError(f"{line}: not valid YAML: {problem}.") from error
    lines, repeated = _line_numbers(node)
    if repeated:
        raise ConfigurationError(
            "\n".join(f"{at(source, line)}: {dotted(key)}: duplicate key." for key, line in repeated)
        )
    return node, values, lines


def _node_in(text: str) -> tuple[yaml.SafeLoader, yaml.Node | None]:
    """The one node of a text, and the loader that makes values of it."""
    if len(text) <= _SHORT:
        with contextlib.suppress(yaml.YAMLError, ValueError):  # Which it says in fewer words.
            quick = _QuickLoader(text)
            return quick, quick.get_single_node()
    loader = _Loader(text)
    return loader, loader.get_single_node()


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


def _line_numbers(root: yaml.Node | None) -> tuple[dict[Location, int], list[tuple[Location, int]]]:
    """The line of every key and list item by its location, and the duplicate keys."""
    lines: dict[Location, int] = {(): 1}
    repeated: list[tuple[Location, int]] = []

    def walk(node: yaml.Node, location: Location) -> None:
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

    if root is not None:
        walk(root, ())
    return lines, repeated
