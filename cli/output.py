"""JSON for scripts: written atomically to a file, or to standard output."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import typer

from dpagent.storage import write_atomically


def finite(value: Any) -> Any:
    """``value`` for JSON, with null for a number that is not finite: an ε that bounds nothing."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: finite(item) for key, item in value.items()}
        case list() | tuple():
            return [finite(item) for item in value]
        case _:
            return value


def write_json(target: Path, value: Any) -> None:
    """Write ``value`` to ``target``, or to standard output if ``target`` is ``-``.

    Raises:
        StorageError: The file cannot be written.
    """
    text = json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if str(target) == "-":
        typer.echo(text, nl=False)
    else:
        write_atomically(target, text.encode())
