"""How sentences for people are made: plurals, and the names of settings.

A setting has one name in a YAML file (`label`) and another on a command line (`--label`), and a sentence
should use the one that its reader can set. The program knows which that is; the code that makes the
sentence does not. So the code writes :func:`named`, and a command says once how settings are named
(:func:`settings_named_by`), as programs choose a language with gettext.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TypeAlias

Namer: TypeAlias = Callable[[str, object], str]
"""From a setting's key and the value proposed for it, or None, to how both are written."""


def counted(number: float, noun: str) -> str:
    """A number with its noun, in the plural unless the number reads as 1.

    >>> counted(1, "device"), counted(2000, "device"), counted(3, "class"), counted(0, "entry")
    ('1 device', '2,000 devices', '3 classes', '0 entries')
    >>> counted(1.0, "record"), counted(287.4, "record")
    ('1 record', '287.4 records')
    """
    shown = f"{int(number):,}" if float(number).is_integer() else f"{number:,.6g}"
    if shown == "1":
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{shown} {noun[:-1]}ies"
    return f"{shown} {noun}{'es' if noun.endswith(('s', 'x', 'ch')) else 's'}"


def lasting(seconds: float) -> str:
    """A time in its largest unit, rounded down.

    >>> lasting(0), lasting(61), lasting(7_300), lasting(3 * 86_400)
    ('0 seconds', '1 minute', '2 hours', '3 days')
    """
    for size, unit in (86_400, "day"), (3_600, "hour"), (60, "minute"):
        if seconds >= size:
            return counted(int(seconds // size), unit)
    return counted(int(seconds), "second")


def shortened(text: str, most_bytes: int) -> str:
    """A text, or its beginning where it is longer.

    Args:
        text: of anybody's.
        most_bytes: of the result as UTF-8, at least 3.

    >>> shortened("enough", 6), shortened("more than enough", 7), shortened("ééé", 5)
    ('enough', 'more…', 'é…')
    """
    data = text.encode(errors="backslashreplace")
    if len(data) > most_bytes:
        return data[: most_bytes - 3].decode(errors="ignore") + "…"
    return data.decode()


def named(key: str, value: object = None) -> str:
    """A setting as the reader of the sentence sets it, in backquotes.

    Args:
        key: As in a configuration file; below a section, with or without its name: ``csv.label``, ``label``.
        value: The proposed value, if the sentence has one.

    >>> f"Set {named('label')} to one of them, or {named('shape', [8, 8])}."
    'Set `label` to one of them, or `shape: [8, 8]`.'
    """
    return f"`{_namer.get()(key, value)}`"


@contextlib.contextmanager
def settings_named_by(namer: Namer) -> Iterator[None]:
    """Have all settings named by ``namer`` that sentences made meanwhile name."""
    token = _namer.set(namer)
    try:
        yield
    finally:
        _namer.reset(token)


def as_yaml(key: str, value: object = None) -> str:
    """The namer of configuration files: the key, and the value as YAML has it."""
    if value is None:
        return key
    if isinstance(value, bool):
        return f"{key}: {str(value).lower()}"
    # YAML reads a comma or a bar as its own.
    return f"{key}: {value!r}" if isinstance(value, str) and not value[:1].isalnum() else f"{key}: {value}"


_namer: ContextVar[Namer] = ContextVar("namer", default=as_yaml)
