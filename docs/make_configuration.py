"""Writes docs/configuration.md from the schemas that the programs enforce.

Run it after a change to one: ``python docs/make_configuration.py``. A test compares.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from agent.profile import Profile
from agent.settings import AgentSettings
from coordinator.settings import FleetSettings

PAGE = Path(__file__).with_name("configuration.md")

_INTRODUCTION = """\
# Configuration

Made by `python docs/make_configuration.py` from the schemas that the programs enforce. Unknown
keys, wrong types and values out of range are refused with file, line and key (exit code 3).
Paths are relative to the file they stand in. Sections are nested maps.
"""

_FILES: list[tuple[str, str, type[BaseModel]]] = [
    (
        "agent.yaml",
        "What the integrator decides for one device (`dpagent run --config agent.yaml`).",
        AgentSettings,
    ),
    (
        "fleet.yaml",
        "What the operator decides (`dpagent coordinator run --config fleet.yaml`).",
        FleetSettings,
    ),
    ("A board profile", "`firmware_profiles/*.yaml`, or a file of one's own named in `profile`.", Profile),
]


def attribute_docstrings(schema: type[BaseModel]) -> dict[str, str]:
    """The string under each field in the source of ``schema`` and what it derives from."""
    found: dict[str, str] = {}
    for base in schema.__bases__:
        if issubclass(base, BaseModel) and base is not BaseModel:
            found |= attribute_docstrings(base)
    body = ast.parse(textwrap.dedent(inspect.getsource(schema))).body[0]
    assert isinstance(body, ast.ClassDef)
    for field, text in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[field.target.id] = " ".join(str(text.value.value).split()).replace("``", "`")
    return found


def type_name(field: FieldInfo) -> str:
    """The type and range of a field, as a person writes it."""
    return f"{_named(field.annotation)} {limits(field)}".strip()


def _named(annotation: Any, *, many: bool = False) -> str:
    """A type in words, in the plural if ``many``."""
    kind, arguments = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return _named(arguments[0], many=many)
    if kind is Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in arguments)
    if kind in (Union, UnionType):
        return " or ".join(_named(part, many=many) for part in arguments if part is not NoneType)
    if kind in (list, tuple):
        return f"list of {_named(arguments[0], many=True)}"
    if kind is dict:
        return f"map of {_named(arguments[0], many=True)} to {_named(arguments[1], many=True)}"
    names = {float: "number", int: "whole number", bool: "`true` or `false`", str: "text", Path: "path"}
    return names[annotation] + "s" * many


def limits(field: FieldInfo) -> str:
    """The range of a number, in interval notation."""
    low, high, left, right = "-∞", "∞", "(", ")"
    for rule in field.metadata:
        match rule:
            case annotated_types.Gt(gt=bound):
                low, left = f"{bound:g}", "("
            case annotated_types.Ge(ge=bound):
                low, left = f"{bound:g}", "["
            case annotated_types.Lt(lt=bound):
                high, right = f"{bound:g}", ")"
            case annotated_types.Le(le=bound):
                high, right = f"{bound:g}", "]"
    return "" if (low, high) == ("-∞", "∞") else f"in {left}{low}, {high}{right}"


def rows(schema: type[BaseModel], prefix: str = "") -> list[str]:
    """One table row a key, sections flattened to dotted keys."""
    notes = attribute_docstrings(schema)
    result = []
    for name, field in schema.model_fields.items():
        section = next((part for part in _parts(field.annotation) if issubclass(part, BaseModel)), None)
        if section is not None:
            inner = rows(section, f"{prefix}{name}.")
            optional = not field.is_required() and field.default is None
            note = f"required with `{prefix}{name}`"
            result += [row.replace("| required |", f"| {note} |") for row in inner] if optional else inner
            continue
        default = (
            "required" if field.is_required() else "none" if field.default is None else f"`{field.default}`"
        )
        result.append(f"| `{prefix}{name}` | {type_name(field)} | {default} | {notes.get(name, '')} |")
    return result


def _parts(annotation: Any) -> list[type]:
    arguments = getattr(annotation, "__args__", ())
    return [part for part in (annotation, *arguments) if isinstance(part, type)]


def render() -> str:
    """The whole page."""
    sections = [_INTRODUCTION]
    for title, about, schema in _FILES:
        table = "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows(schema)])
        sections.append(f"## {title}\n\n{about}\n\n{table}\n")
    return "\n".join(sections)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
