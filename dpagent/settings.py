"""The base of every section of a configuration, which a program may have without the file.

:mod:`dpagent.configuration` reads files into them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

from dpagent.schema.base import Schema
from dpagent.schema.limits import After


class Settings(Schema):
    """Base of every configuration section: unknown keys and loose types are errors."""


def _usable(path: Path) -> Path:
    if not str(path).strip() or str(path) == ".":
        raise ValueError("a path is expected")
    if "\0" in str(path):
        raise ValueError("a path without the character NUL is expected")
    return path


FilePath = Annotated[Path, After(_usable)]
"""A path, written as text."""

SettingsT = TypeVar("SettingsT", bound=Settings)
