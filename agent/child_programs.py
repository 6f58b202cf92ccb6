"""The environment of the agent, and of the programs that it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

KEPT_MEMORY: Final = {
    "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "PYTHONMALLOC": "malloc",
}  # fmt: skip
"""With these, the C library (glibc) gives back no memory that a process once had: so training has what was
tried before the charge, whatever others have taken from the board since."""
LITTLE_MEMORY: Final = {
    "MALLOC_ARENA_MAX": "1", "MALLOC_TOP_PAD_": str(4 << 10), "MALLOC_TRIM_THRESHOLD_": str(64 << 10),
}  # fmt: skip
"""With these, it gives back what its threads do not need any more: 1 MiB of the agent."""


def keep_from_children(variables: Mapping[str, str]) -> None:
    """Have no program that this one starts get variables that are for this one alone.

    Args:
        variables: with their values; with others, they are the owner's.
    """
    for name, value in variables.items():
        if os.environ.get(name) == value:
            del os.environ[name]


def environment() -> dict[str, str]:
    """The environment of a child: it imports from where this program does, and not from the directory that it
    runs in, whose folders may be called like the packages. It does not keep its memory."""
    kept = {key: value for key, value in os.environ.items() if key not in KEPT_MEMORY}
    return kept | {"PYTHONPATH": os.pathsep.join(place or str(Path.cwd()) for place in sys.path)}
