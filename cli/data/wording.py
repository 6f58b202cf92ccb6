"""What the library says in keys of a configuration file, said in options of the command line.

Its sentences name the keys of ``agent.yaml`` in backquotes (`label`, `shape: [64]`). Whoever typed a command
has options instead.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Final

from dpagent.errors import DpagentError

_OPTIONS: Final = (
    "kind", "classes", "shape", "size", "mode", "label", "features", "offset", "scale", "window", "stride",
    "group", "mixed", "delimiter", "half",
)  # fmt: skip
_KEY: Final = re.compile(rf"`(?:csv\.|images\.)?({'|'.join(_OPTIONS)})(?:: ([^`]*))?`")
_NO_HEADER: Final = re.compile(r"`(?:csv\.)?header(?:: false)?`")


def as_options(sentence: str) -> str:
    """``sentence`` with options for keys: "set `shape: [8, 8]`" becomes "set `--shape 8,8`"."""
    return _NO_HEADER.sub("`--no-header`", _KEY.sub(_option, sentence))


@contextlib.contextmanager
def told_as_options() -> Iterator[None]:
    """Let errors that pass name options."""
    try:
        yield
    except DpagentError as error:
        error.args = (as_options(str(error)), *error.args[1:])
        raise


def _option(match: re.Match[str]) -> str:
    name, value = match[1], match[2]
    if not value:
        return f"`--{name}`"
    if value.startswith("["):
        separator = "x" if name == "size" else ","
        value = separator.join(part.strip() for part in value.strip("[]").split(","))
    return f"`--{name} {value}`"
