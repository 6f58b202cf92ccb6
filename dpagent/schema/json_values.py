"""Values as JSON has them."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from pathlib import Path
from typing import Any

from dpagent.schema.base import Schema


def json_values(value: Any) -> Any:
    """Values as JSON has them: lists for tuples, texts for paths, null for a number that is not finite.

    Args:
        value: a schema's or a dataclass's instance, or one of its values.
    """
    match value:
        case Schema():
            return json_values(value.as_dict())
        case enum.Enum():
            return value.value
        case dict():
            return {key: json_values(each) for key, each in value.items()}
        case list() | tuple():
            return [json_values(each) for each in value]
        case Path():
            return str(value)
        case float():
            return value if math.isfinite(value) else None
        case _ if dataclasses.is_dataclass(value):
            return {each.name: json_values(getattr(value, each.name)) for each in dataclasses.fields(value)}
        case _:
            return value


def json_of(value: Any) -> bytes:
    """The same, in UTF-8.

    Raises:
        UnicodeEncodeError: a path in it is not UTF-8.
    """
    return json.dumps(json_values(value), ensure_ascii=False, separators=(",", ":")).encode()
