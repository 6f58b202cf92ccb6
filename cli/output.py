"""JSON for scripts: written atomically to a file, or to standard output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from dpagent.schema.json_values import json_values
from dpagent.storage import write_atomically


def write_json(target: Path, value: Any) -> None:
    """Write ``value`` to ``target``, or to standard output if ``target`` is ``-``.

    Raises:
        StorageError: The file cannot be written.
    """
    text = json.dumps(json_values(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if str(target) == "-":
        typer.echo(text, nl=False)
    else:
        write_atomically(target, text.encode())
