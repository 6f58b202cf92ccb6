"""How much memory processes have for themselves, as the kernel counts it (proc(5), ``/proc/pid/smaps``)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_SHARED: Final = "/dev/zero"
"""How the kernel names memory that a process shares with its forks on purpose."""


def own_mib(*processes: int) -> float:
    """Memory that one of these processes alone has written to; what a fork has in common with its parent, and
    what it may read again from a file, is none of it.

    Args:
        processes: their ids.

    Returns:
        MiB.

    Raises:
        OSError: the kernel does not say.
    """
    return sum(_kib(process, "Private_Dirty:", is_shared=False) for process in processes) / 1024


def shared_mib(*processes: int) -> float:
    """Memory that these processes share on purpose, counted once.

    Args:
        processes: their ids; all that share it.

    Returns:
        MiB.

    Raises:
        OSError: the kernel does not say.
    """
    return sum(_kib(process, "Pss:", is_shared=True) for process in processes) / 1024


def _kib(process: int, wanted: str, *, is_shared: bool) -> int:
    """A figure, added up over the mappings of a process that are shared, or are not."""
    kib, fits = 0, False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            fits = is_shared == any(value.startswith(_SHARED) for value in values)
        elif fits and name == wanted:
            kib += int(values[0])
    return kib
