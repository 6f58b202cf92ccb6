"""How values are checked against types: lists, maps, sections, and what is one of several."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from dpagent.schema.limits import After, Before, By, Limits
from dpagent.schema.problems import Fault, Problem
from dpagent.schema.values import (
    Check,
    Choice,
    FilePlace,
    Limited,
    Number,
    Own,
    Plain,
    Problems,
    Text,
    problem_by,
)

_MOST_PROBLEMS: Final = 100
"""Of one value, so that a long list of wrong items does not take as many sentences."""


class _Items(Check):
    """A list, or a tuple of any length."""

    words = "a list"
    has_items = True

    def __init__(self, kind: type, item: Check) -> None:
        self._kind, self._item = kind, item
        self._takes = (list, tuple) if kind is tuple else list

    def takes(self, value: object) -> bool:
        return isinstance(value, self._takes)

    def read(self, value: Any, problems: Problems) -> Any:
        if not self.takes(value):
            problems.append(self.wrong(value))
            return value
        made = []
        for place, item in enumerate(value):
            made.append(_below(place, self._item, item, problems))
            if len(problems) >= _MOST_PROBLEMS:
                break
        return self._kind(made)


class _Map(Check):
    words = "keys and values"
    has_items = True

    def __init__(self, key: Check, value: Check) -> None:
        self._key, self._value = key, value

    def takes(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: Any, problems: Problems) -> Any:
        if not self.takes(value):
            problems.append(self.wrong(value))
            return value
        made = {}
        for name, item in value.items():
            known = _below(name, self._key, name, problems)
            made[known] = _below(name, self._value, item, problems)
            if len(problems) >= _MOST_PROBLEMS:
                break
        return made


class _Keys(Check):
    """The values of a schema, or of a dataclass."""

    words = "keys and values"

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        hints = get_type_hints(kind, include_extras=True)
        self._is_schema = not dataclasses.is_dataclass(kind)
        if self._is_schema:
            names, self._defaults = list(kind.names), kind.defaults
        else:
            fields = dataclasses.fields(kind)
            names = [each.name for each in fields]
            self._defaults = {
                each.name: each.default for each in fields if each.default is not dataclasses.MISSING
            }
        self._checks = {name: check_of(hints[name]) for name in names}

    def takes(self, value: object) -> bool:
        return isinstance(value, (Mapping, self._kind))

    def read(self, value: Any, problems: Problems) -> Any:
        if isinstance(value, self._kind):
            return value
        before = len(problems)
        if self._is_schema:
            try:
                value = self._kind.prepared(value)
            except (ValueError, AssertionError) as error:
                problems.append(problem_by(error, value))
                return value
        if not isinstance(value, Mapping):
            problems.append(self.wrong(value))
            return value
        made = {}
        for name, check in self._checks.items():
            if name in value:
                made[name] = _below(name, check, value[name], problems)
            elif name not in self._defaults:
                problems.append(Problem(Fault.MISSING, "a value", location=(name,)))
        for name in value:
            if name not in self._checks:
                problems.append(Problem(Fault.UNKNOWN, "no key of that name", value[name], (name,)))
            if len(problems) >= _MOST_PROBLEMS:
                break
        if len(problems) > before:
            return value
        if not self._is_schema:
            try:
                return self._kind(**made)
            except (ValueError, AssertionError) as error:
                problems.append(problem_by(error, value))
                return value
        instance = self._kind.unchecked(made)
        instance.broken_rules(problems)
        return instance


class _Union(Check):
    """One of several: the first that a value fits, or else whose kind it is of."""

    def __init__(self, parts: Sequence[Check], *, optional: bool) -> None:
        self._parts, self._optional = parts, optional
        self.words = " or ".join(part.words for part in parts)

    def takes(self, value: object) -> bool:
        return (value is None and self._optional) or any(part.takes(value) for part in self._parts)

    def read(self, value: Any, problems: Problems) -> Any:
        if value is None and self._optional:
            return None
        if len(self._parts) == 1:
            return self._parts[0].read(value, problems)
        first: Problems = []
        for part in self._parts:
            if part.takes(value):
                found: Problems = []
                made = part.read(value, found)
                if not found:
                    return made
                first = first or found
        problems += first or [self.wrong(value)]
        return value


class _Tagged(Check):
    """One of several schemas, by the value of a key."""

    words = "keys and values"

    def __init__(self, key: str, kinds: Sequence[Any]) -> None:
        self._key, self._kinds = key, tuple(kinds)
        self._by_tag = {
            tag: check_of(kind)
            for kind in kinds
            for tag in get_args(get_type_hints(kind, include_extras=True)[key])
        }
        self._tag = Choice({tag: tag for tag in self._by_tag})

    def takes(self, value: object) -> bool:
        return isinstance(value, (Mapping, *self._kinds))

    def read(self, value: Any, problems: Problems) -> Any:
        if not self.takes(value):
            problems.append(self.wrong(value))
            return value
        if isinstance(value, self._kinds):
            return value
        if self._key not in value:
            problems.append(Problem(Fault.MISSING, "a value", location=(self._key,)))
            return value
        tag = value[self._key]
        if not self._tag.takes(tag):
            problems.append(self._tag.wrong(tag).below(self._key))
            return value
        return self._by_tag[tag].read(value, problems)


_PLAIN: Final[dict[Any, Callable[[], Check]]] = {
    bool: lambda: Plain(bool, "true or false"), int: lambda: Plain(int, "a whole number"), float: Number,
    str: Text, bytes: lambda: Plain(bytes, "bytes"), Path: FilePlace,
}  # fmt: skip
_OF_CLASSES: Final[dict[type, Check]] = {}
"""The checks of schemas and dataclasses, made at their first use: most programs check none."""


def check_of(annotation: Any) -> Check:
    """The check of a type, or of what is annotated as an attribute of a schema.

    Raises:
        TypeError: no value from outside can be checked against it.
    """
    kind, arguments = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return _annotated(arguments[0], annotation.__metadata__)
    if kind in (Union, UnionType):
        parts = [check_of(part) for part in arguments if part is not NoneType]
        return _Union(parts, optional=NoneType in arguments)
    if kind is Literal:
        return Choice({choice: choice for choice in arguments})
    if kind is list or (kind is tuple and arguments[1:] == (Ellipsis,)):
        return _Items(kind, check_of(arguments[0]))
    if kind is dict:
        return _Map(check_of(arguments[0]), check_of(arguments[1]))
    if annotation in _PLAIN:
        return _PLAIN[annotation]()
    if isinstance(annotation, enum.EnumType):
        members: list[enum.Enum] = list(annotation)
        return Choice({each.value: each for each in members})
    if dataclasses.is_dataclass(annotation) or hasattr(annotation, "broken_rules"):
        if annotation not in _OF_CLASSES:
            _OF_CLASSES[annotation] = _Keys(annotation)
        return _OF_CLASSES[annotation]
    raise TypeError(f"{annotation!r} is no type of values that can be checked")


def _annotated(annotation: Any, rules: Sequence[Any]) -> Check:
    if isinstance(rules[0], By):
        check: Check = _Tagged(rules[0].key, get_args(annotation))
        rules = rules[1:]
    elif annotation is float:
        check = Number(finite=all(rule.finite for rule in rules if isinstance(rule, Limits)))
    else:
        check = check_of(annotation)
    for rule in rules:
        if isinstance(rule, Limits):
            check = Limited(check, rule)
        elif isinstance(rule, After | Before):
            check = Own(check, rule)
        else:
            raise TypeError(f"{rule!r} is no rule that values can be checked by")
    return check


def _below(key: int | str, check: Check, value: object, problems: Problems) -> Any:
    before = len(problems)
    made = check.read(value, problems)
    if len(problems) > before:
        problems[before:] = [each.below(key) for each in problems[before:]]
    return made
