"""Settings over a configuration file: variables of the environment, and options ``--set KEY=VALUE``.

Each gives one setting: ``DPAGENT_MQTT__URL`` and ``--set mqtt.url=`` are ``mqtt.url`` of the file. Variables
stand over the file, options over variables. The library reads no environment by itself: a program passes it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from dpagent.errors import ConfigurationError, UsageError
from dpagent.former_keys import FORMER_KEYS
from dpagent.schema.base import Schema, fields_of
from dpagent.schema.problems import Location, dotted
from dpagent.yaml_file import read_value

PREFIX: Final = "DPAGENT_"
_OF_KUBERNETES: Final = re.compile(r"_(SERVICE_HOST|SERVICE_PORT|PORT)(_\w+)?$")
"""What it sets in every container for a service whose name begins with ``dpagent-``."""


@dataclass(frozen=True, slots=True)
class Override:
    """A setting over that of the file.

    Attributes:
        source: The variable or option, as a person writes it, without its value.
        key: From the outermost section on.
        text: Its value: of texts and paths as it is, of all else as YAML.
    """

    source: str
    key: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Overridden:
    """Values with overrides over them.

    Attributes:
        values: All of them.
        sources: Of each value that is from an override: lists are one value, maps are one for each key.
        problems: A sentence for each override that cannot be used, and is not in ``values``.
    """

    values: dict[str, Any]
    sources: dict[Location, str]
    problems: list[str]


def overrides_of(environment: Mapping[str, str], options: Sequence[str] = ()) -> tuple[Override, ...]:
    """The overrides of a program, the strongest last.

    Args:
        environment: Of the program, without variables with the prefix that are no settings. Of a section and
            what is in it, the latter is stronger.
        options: ``KEY=VALUE`` in the order of the command line.

    Raises:
        UsageError: An option has no key or no ``=``.

    >>> [each.key for each in overrides_of({"DPAGENT_MQTT__URL": "…"}, ["budget.epsilon=2"])]
    [('mqtt', 'url'), ('budget', 'epsilon')]
    """
    names = [name for name in environment if name.startswith(PREFIX)]
    variables = [Override(name, _key_of(name), environment[name]) for name in names]
    return (*sorted(variables, key=lambda each: (len(each.key), each.key)), *map(_option, options))


def variable_of(key: Sequence[str]) -> str:
    """The variable of a setting.

    >>> variable_of(["mqtt", "password_file"])
    'DPAGENT_MQTT__PASSWORD_FILE'
    """
    return PREFIX + "__".join(key).upper()


def without_overrides(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for a program whose file is to hold as it is."""
    return {name: value for name, value in environment.items() if not name.startswith(PREFIX)}


def overridden(schema: type[Schema], values: Mapping[str, Any], overrides: Sequence[Override]) -> Overridden:
    """Lay overrides over the values of a file.

    Args:
        schema: What the values are to be. It is not applied, but tells texts from YAML and knows the keys.
        values: Those of the file.
        overrides: The strongest last.
    """
    known = keys_of(schema) if overrides else {}
    merged, sources, problems = dict(values), dict[Location, str](), list[str]()
    for each in overrides:
        try:
            value = _value(each, known)
        except ConfigurationError as error:
            problems.append(str(error))
            continue
        nested = value
        for part in reversed(each.key):
            nested = {part: nested}
        merged = overlaid(merged, nested)
        now: Any = merged
        for part in each.key:
            now = now[part]
        for leaf in _leaves(value, now, each.key):
            replaced = [
                other for other in sources if other[: len(leaf)] == leaf or leaf[: len(other)] == other
            ]
            for location in replaced:
                del sources[location]
            sources[leaf] = each.source
    return Overridden(merged, sources, problems)


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


def keys_of(schema: type[Schema], section: tuple[str, ...] = ()) -> dict[tuple[str, ...], list[Any]]:
    """All keys of a schema, sections too, with the types that each may have."""
    found: dict[tuple[str, ...], list[Any]] = {}
    for name, field in fields_of(schema).items():
        kinds = list(_kinds(field.annotation))
        found.setdefault((*section, name), []).extend(kinds)
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, Schema):
                for key, below in keys_of(kind, (*section, name)).items():
                    found.setdefault(key, []).extend(below)
    return found


def _key_of(variable: str) -> tuple[str, ...]:
    name = variable.removeprefix(PREFIX)
    # Small letters would be a second name for one setting. No key is in capitals: such a name stays unknown.
    return tuple((name.lower() if name == name.upper() else name.upper()).split("__"))


def _option(text: str) -> Override:
    key, equals, value = text.partition("=")
    if not key.strip() or not equals:
        raise UsageError(f"`--set {text}`: expected KEY=VALUE, such as mqtt.keepalive_s=60.")
    return Override(f"--set {key}", tuple(key.split(".")), value)


def _value(override: Override, known: Mapping[tuple[str, ...], list[Any]]) -> Any:
    """The value of an override.

    Raises:
        ConfigurationError: There is no such key, or it is not YAML. The sentence has no value in it: what
            is no setting may be a secret.
    """
    kinds = known.get(override.key)
    if kinds is None:
        raise ConfigurationError(f"{override.source}: unknown key.{_hint(override, known)}")
    if not override.text.strip():
        raise ConfigurationError(
            f"{override.source} is empty; expected a value (`null`: none), or nothing of that name."
        )
    if all(_is_text(kind) for kind in kinds) and not (override.text == "null" and NoneType in kinds):
        return override.text
    return read_value(override.text, override.source)


def successor(key: Location, known: Collection[tuple[str, ...]]) -> str | None:
    """The key that took the place of one that a file had before; None if it is not ``known``."""
    now = FORMER_KEYS.get(dotted(key), "")
    return now if tuple(now.split(".")) in known else None


def _hint(override: Override, known: Collection[tuple[str, ...]]) -> str:
    """What may be meant by an unknown key."""
    is_variable = override.source.startswith(PREFIX)
    if now := successor(override.key, known):
        return f" {now} took its place."
    if is_variable and _OF_KUBERNETES.search(override.source):
        return " Kubernetes names services like that: set enableServiceLinks: false."
    import difflib  # A daemon keeps what it imports.

    near = difflib.get_close_matches(
        dotted(override.key).lower(), [dotted(key) for key in known], n=1, cutoff=0.7
    )
    if not near:
        return " `dpagent config schema` prints those that there are."
    meant = variable_of(near[0].split(".")) if is_variable else f"--set {near[0]}"
    return f" Did you mean {meant}?"


def _kinds(annotation: Any) -> Iterator[Any]:
    """The types that an annotation allows, without what limits them."""
    match get_origin(annotation):
        case origin if origin is Annotated:
            yield from _kinds(get_args(annotation)[0])
        case origin if origin in (Union, UnionType):
            for part in get_args(annotation):
                yield from _kinds(part)
        case _:
            yield annotation


def _is_text(kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return all(isinstance(choice, str) for choice in get_args(kind))
    return kind is NoneType or (isinstance(kind, type) and issubclass(kind, (str, Path, Enum)))


def _leaves(value: Any, now: Any, location: Location) -> Iterator[Location]:
    """Where an override sets something, after which ``now`` is there; an empty map changes no section."""
    if isinstance(value, Mapping) and now:
        for key, below in value.items():
            yield from _leaves(below, now[key], (*location, key))
    else:
        yield location
