"""The base class of messages and sections of a configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import (
    Any,
    ClassVar,
    Final,
    Self,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from dpagent.schema.checks import check_of
from dpagent.schema.problems import NOTHING, Fault, Problem, SchemaError
from dpagent.schema.values import Check, Problems

RuleT = TypeVar("RuleT", bound=Callable[[Any], None])
SchemaT = TypeVar("SchemaT", bound="Schema")

REQUIRED: Final = NOTHING
"""In place of the default of a key that has none."""


def rule(method: RuleT) -> RuleT:
    """Marks a method that checks what concerns several keys, once each of them is what it should be.

    Its ``ValueError`` says what is wrong; the rules after it are then not asked.
    """
    method.__is_rule__ = True  # type: ignore[attr-defined]
    return method


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Schema:
    """Values under names, each of the type and within the limits that its annotation says.

    The annotated attributes of a subclass are its keys; what is assigned to one is its default, which is not
    checked. A key without one must be given, and no other may be. Instances do not change.

    >>> class Oven(Schema):
    ...     degrees: float
    ...     fan: bool = False
    >>> Oven(degrees=180)
    Oven(degrees=180.0, fan=False)
    >>> Oven.checked({"degrees": "hot", "fam": True})
    Traceback (most recent call last):
    ...
    dpagent.schema.problems.SchemaError: degrees: got 'hot'; expected a number
    fam: got True; expected no key of that name

    Attributes:
        names: of all keys, inherited ones first.
        defaults: of the keys that have one.
    """

    __slots__ = ("__dict__", "__weakref__", "_given")

    names: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[Mapping[str, Any]] = {}
    _rules: ClassVar[tuple[str, ...]] = ()
    _prepares: ClassVar[bool] = False
    _given: frozenset[str]

    def __init_subclass__(cls) -> None:
        names: dict[str, None] = {}
        defaults: dict[str, Any] = {}
        rules: dict[str, None] = {}
        for base in reversed(cls.__mro__[1:]):
            if issubclass(base, Schema):
                names |= dict.fromkeys(base.names)
                defaults |= base.defaults
                rules |= dict.fromkeys(base._rules)
        for name, annotation in vars(cls).get("__annotations__", {}).items():
            if name.startswith("_") or _is_of_the_class(annotation):
                continue
            if hasattr(Schema, name):
                raise TypeError(f"{cls.__name__}.{name}: a key cannot have this name, which each schema has")
            names[name] = None
            defaults.pop(name, None)
            if name in vars(cls):
                defaults[name] = vars(cls)[name]
                if isinstance(defaults[name], list | dict | set):
                    raise TypeError(f"{cls.__name__}.{name}: a default that can change is one for all")
        rules |= {name: None for name, member in vars(cls).items() if hasattr(member, "__is_rule__")}
        cls.names, cls.defaults, cls._rules = tuple(names), defaults, tuple(rules)
        cls._prepares = cls._prepares or "prepared" in vars(cls)

    def __init__(self, **values: Any) -> None:
        """Check the values.

        Raises:
            SchemaError: they are not what they should be.
        """
        if values or self._prepares or len(self.defaults) < len(self.names):
            made = type(self).checked(values)
        else:
            # Programs that import a section, and check none, have no need of the checks of its types.
            made = self.unchecked({})
            problems: list[Problem] = []
            made.broken_rules(problems)
            if problems:
                raise SchemaError(problems)
        vars(self).update(vars(made))
        object.__setattr__(self, "_given", made.given)

    @classmethod
    def checked(cls, values: object) -> Self:
        """The values of a map, or an instance as it is.

        Raises:
            SchemaError: they are not what they should be; names each problem.
        """
        made: Self = checked_as(cls, values)
        return made

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The values of a JSON object.

        Raises:
            SchemaError: it is none, or they are not what they should be.
        """
        made: Self = read_json(cls, text)
        return made

    @classmethod
    def unchecked(cls, values: Mapping[str, Any]) -> Self:
        """An instance of values that are known to be what they should be; of others, the defaults."""
        made = cls.__new__(cls)
        vars(made).update({name: values.get(name, cls.defaults.get(name)) for name in cls.names})
        object.__setattr__(made, "_given", frozenset(values))
        return made

    @classmethod
    def prepared(cls, values: Any) -> Any:
        """What is checked in place of what came: a subclass may say otherwise.

        Raises:
            ValueError: something is wrong with it.
        """
        return values

    def broken_rules(self, problems: Problems) -> None:
        """Ask the rules, and add the first problem, if there is one."""
        for name in self._rules:
            try:
                getattr(self, name)()
            except (ValueError, AssertionError) as error:
                # The value is the whole section: it is not repeated.
                problems.append(Problem(Fault.OTHER, "", error=error))
                return

    @property
    def given(self) -> frozenset[str]:
        """The keys that were given, and are not there by default."""
        return self._given

    def with_values(self, changes: Mapping[str, Any]) -> Self:
        """The same with other values, which are not checked.

        Raises:
            TypeError: there is no such key.
        """
        if strangers := changes.keys() - {*self.names}:
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(strangers))}")
        made = self.unchecked(vars(self) | dict(changes))
        object.__setattr__(made, "_given", self._given | changes.keys())
        return made

    def as_dict(
        self,
        *,
        include: Collection[str] | None = None,
        exclude: Collection[str] = (),
        only_given: bool = False,
        only_set: bool = False,
        only_changed: bool = False,
    ) -> dict[str, Any]:
        """The values by their keys, those of sections as maps too.

        Args:
            include: keys of this one, not of its sections; by default all.
            exclude: likewise.
            only_given: without what is there by default, in sections too.
            only_set: without what is None, in sections too.
            only_changed: without what is as the default.
        """
        made = {}
        for name in self.names:
            value = getattr(self, name)
            if (
                (include is not None and name not in include)
                or name in exclude
                or (only_given and name not in self._given)
                or (only_set and value is None)
                or (only_changed and name in self.defaults and value == self.defaults[name])
            ):
                continue
            made[name] = _as_values(value, only_given, only_set, only_changed)
        return made

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} does not change")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} does not change")

    def _values(self) -> tuple[Any, ...]:
        return tuple([getattr(self, name) for name in self.names])

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash((type(self), self._values()))

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.names)
        return f"{type(self).__name__}({values})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), vars(self), self._given)


def _again(schema: type[SchemaT], values: Mapping[str, Any], given: frozenset[str]) -> SchemaT:
    made = schema.unchecked(values)
    object.__setattr__(made, "_given", given)
    return made


@dataclass(frozen=True, slots=True)
class Field:
    """A key of a schema.

    Attributes:
        annotation: its type, with limits.
        default: or :data:`REQUIRED`.
    """

    annotation: Any
    default: Any


def fields_of(schema: type[Schema]) -> dict[str, Field]:
    """The keys of a schema, in their order."""
    hints = get_type_hints(schema, include_extras=True)
    return {name: Field(hints[name], schema.defaults.get(name, REQUIRED)) for name in schema.names}


def with_fields(schema: type[SchemaT], **fields: tuple[Any, Any]) -> type[SchemaT]:
    """``schema``, under its own name, with more keys: a type and a default each."""
    body = {
        "__module__": schema.__module__, "__qualname__": schema.__qualname__, "__doc__": schema.__doc__,
        "__annotations__": {name: annotation for name, (annotation, _) in fields.items()},
        **{name: default for name, (_, default) in fields.items()},
    }  # fmt: skip
    made: type[SchemaT] = type(schema.__name__, (schema,), body)
    return made


def checked_as(kind: Any, values: object) -> Any:
    """Values as a schema, a dataclass or another type has them.

    Raises:
        SchemaError: they are not what they should be; names each problem.
    """
    check: Check = check_of(kind)
    problems: list[Problem] = []
    made = check.read(values, problems)
    if problems:
        raise SchemaError(problems)
    return made


def read_json(kind: Any, text: str | bytes) -> Any:
    """As :func:`checked_as`, of a text in JSON.

    Raises:
        SchemaError: it is none, or they are not what they should be.
    """
    try:
        # Of bytes, json takes UTF-16 and halves of surrogates, too.
        values = json.loads(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as error:
        raise SchemaError([Problem(Fault.OTHER, f"JSON ({error})")]) from error
    return checked_as(kind, values)


def _as_values(value: Any, only_given: bool, only_set: bool, only_changed: bool) -> Any:
    if isinstance(value, Schema):
        return value.as_dict(only_given=only_given, only_set=only_set, only_changed=only_changed)
    if isinstance(value, list | tuple):
        return type(value)([_as_values(each, only_given, only_set, only_changed) for each in value])
    if isinstance(value, dict):
        return {key: _as_values(each, only_given, only_set, only_changed) for key, each in value.items()}
    return value


def _is_of_the_class(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return annotation.startswith(("ClassVar", "Final"))
    return annotation is ClassVar or get_origin(annotation) is ClassVar or ClassVar in get_args(annotation)
