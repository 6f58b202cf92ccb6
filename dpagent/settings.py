"""The base of every section of a configuration: a pydantic model, which a program may have without the file.

:mod:`dpagent.configuration` reads files into them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model


class WithheldError(ValueError):
    """What is wrong with a value that may hold a secret, so that it is not shown."""


class Settings(BaseModel):
    """Base of every configuration section: unknown keys and loose types are errors."""

    # Most programs get settings that another has checked: they have no need of checks of their own.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=False,
        defer_build=True,
    )  # fmt: skip


def _usable(path: Path) -> Path:
    if not str(path).strip() or str(path) == ".":
        raise ValueError("a path is expected")
    if "\0" in str(path):
        raise ValueError("a path without the character NUL is expected")
    return path


FilePath = Annotated[Path, Field(strict=False), AfterValidator(_usable)]
"""A path, written as text."""

SettingsT = TypeVar("SettingsT", bound=Settings)


def defaults_of(schema: type[SettingsT]) -> SettingsT:
    """A section in which nothing is set: as ``schema()``, without its checks, which take time and memory in
    each program that imports the section."""
    return cast(SettingsT, schema.model_construct())


def plain(value: object) -> Any:
    """The values of a section as JSON has them, in a program that has no need of its checks.

    Args:
        value: a section, or one of its values.
    """
    if isinstance(value, BaseModel):
        return {name: plain(each) for name, each in value}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def with_fields(schema: type[SettingsT], **fields: Any) -> type[SettingsT]:
    """``schema``, under its own name, with more fields: a type and a default each."""
    made: type[SettingsT] = create_model(
        schema.__name__, __base__=schema, __module__=schema.__module__, __doc__=schema.__doc__, **fields
    )
    return made
