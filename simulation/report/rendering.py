"""From a template and its values to a page on disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from dpagent.storage import disk_errors, real_path, write_atomically
from simulation.report.drawing import COLOURS, DARK_COLOURS


def render(template: str, **values: Any) -> str:
    """The page of a template beside this file."""
    environment = Environment(
        loader=PackageLoader("simulation.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["with_code"] = _with_code
    return environment.get_template(template).render(light=COLOURS, dark=DARK_COLOURS, **values)


def write_page(page: str, directory: Path) -> Path:
    """Write a page to ``directory/index.html``; return that path.

    The directory is made if it is not there; a page already in it is replaced.

    Raises:
        StorageError: The disk is full, or the page cannot be written there.
    """
    path = directory / "index.html"
    with disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page.encode())
    return path


def name_of(file: Path, directory: Path) -> str:
    """``file`` as seen from a page in ``directory``, if both lie in one directory; else as it is."""
    absolute, here = real_path(file), real_path(directory)
    return os.path.relpath(absolute, here) if absolute.is_relative_to(here.parent) else str(file)


def _with_code(sentence: str) -> Markup:
    """``sentence`` for the page: text in backquotes is code, without line breaks."""
    parts = sentence.split("`")
    if len(parts) % 2 == 0:
        return escape(sentence)
    pieces = [
        Markup("<code>{}</code>").format(part) if number % 2 else escape(part)
        for number, part in enumerate(parts)
    ]
    return Markup("").join(pieces)
