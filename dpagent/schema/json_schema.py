"""JSON schemas (draft 2020-12) of schemas, for editors of YAML and JSON files."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from dpagent.schema.base import REQUIRED, Schema, fields_of
from dpagent.schema.json_values import json_values
from dpagent.schema.limits import Limits

_TYPES: Final[dict[Any, str]] = {
    bool: "boolean", int: "integer", float: "number", str: "string", Path: "string", NoneType: "null",
}  # fmt: skip
_RANGE: Final = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def json_schema(schema: type[Schema]) -> dict[str, Any]:
    """The JSON schema of a file, with its sections in it.

    >>> from dpagent.settings import Settings
    >>> class Oven(Settings):
    ...     fan: bool = False
    >>> json_schema(Oven)["properties"]
    {'fan': {'type': 'boolean', 'default': False}}
    """
    fields = fields_of(schema)
    made: dict[str, Any] = {"type": "object", "additionalProperties": False}
    if schema.__doc__:
        made["description"] = " ".join(schema.__doc__.split("\n\n")[0].split())
    made["properties"] = {
        name: _of(field.annotation)
        | ({} if field.default is REQUIRED else {"default": json_values(field.default)})
        for name, field in fields.items()
    }
    if required := [name for name, field in fields.items() if field.default is REQUIRED]:
        made["required"] = required
    return made


def _of(annotation: Any) -> dict[str, Any]:
    kind, arguments = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return _limited(arguments[0], annotation.__metadata__)
    if kind in (Union, UnionType):
        return {"anyOf": [_of(part) for part in arguments]}
    if kind is Literal:
        return {"enum": list(arguments)}
    if kind in (list, tuple):
        return {"type": "array", "items": _of(arguments[0])}
    if kind is dict:
        return {"type": "object", "additionalProperties": _of(arguments[1])}
    if isinstance(annotation, enum.EnumType):
        members: list[enum.Enum] = list(annotation)
        return {"enum": [each.value for each in members]}
    if isinstance(annotation, type) and issubclass(annotation, Schema):
        return json_schema(annotation)
    return {"type": _TYPES[annotation]}


def _limited(annotation: Any, rules: Sequence[Any]) -> dict[str, Any]:
    made = _of(annotation)
    for rule in rules:
        if not isinstance(rule, Limits):
            continue  # What a function checks has no words in JSON.
        for name, key in _RANGE.items():
            if (bound := getattr(rule, name)) is not None:
                made[key] = bound
        what = "Items" if made.get("type") == "array" else "Length"
        for name, length in (("min", rule.min_length), ("max", rule.max_length)):
            if length is not None:
                made[f"{name}{what}"] = length
        if rule.pattern is not None:
            made["pattern"] = rule.pattern
    return made
