"""Names of classes and columns in YAML, as text even where YAML reads a number or a date."""

from __future__ import annotations

from typing import Annotated, Any

from dpagent.schema.limits import Before, Limits


def _as_text(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("YAML reads yes, no, on and off as truth values; expected a name: put it in quotes")
    return str(value) if isinstance(value, int) else value


PlainName = Annotated[str, Limits(min_length=1), Before(_as_text)]
