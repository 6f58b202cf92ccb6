"""Keeps what a program has in memory there: the system neither moves it to the swap nor throws its code away,
to read it again.

What a look at the data takes is a matter of records. Else the system makes room for it with the memory of
programs that stand still meanwhile, and these take long to go on: a trial of training that found its memory
in the swap took four times as long, and with it the slots of its round.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
import resource
from pathlib import Path
from typing import Final

_NOW_AND_LATER_ONCE_USED: Final = 1 | 2 | 4
"""MCL_CURRENT, MCL_FUTURE and MCL_ONFAULT of mlockall(2)."""
_CAP_IPC_LOCK: Final = 14
_ALL_USERS: Final = ["0", "0", "4294967295"]
"""Of the first user namespace, in user_namespaces(7)."""
_READ_BYTES: Final = 1 << 20


def stay_in_memory() -> bool:
    """Keep all that this program has used, and will use, in memory; a fork has to say so for itself.

    Returns:
        Whether the system lets it.
    """
    if not may_stay():
        return False
    with contextlib.suppress(AttributeError):
        return bool(ctypes.CDLL(None).mlockall(_NOW_AND_LATER_ONCE_USED) == 0)
    return False


def may_stay() -> bool:
    """Whether the system sets no bound to what stays (RLIMIT_MEMLOCK): with one, what a program takes later
    could fail for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if hard == resource.RLIM_INFINITY != soft:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    return hard == resource.RLIM_INFINITY or _is_above_it()


def kept(file: Path) -> mmap.mmap | None:
    """The pages of a file, which stay in memory for as long as this is held; None where the system does not
    let this program keep them, or they cannot be had. Nothing here looks at what they hold.

    Args:
        file: that is overwritten in place alone.
    """
    if not may_stay():
        return None
    try:
        with file.open("rb", buffering=0) as opened:
            while opened.read(_READ_BYTES):  # An error of the disk is one here, and below the program's end.
                pass
            pages = mmap.mmap(opened.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
        pages[:: mmap.PAGESIZE]  # Kept once used: MAP_POPULATE passes over what is (MCL_ONFAULT).
        return pages
    except (OSError, ValueError):  # There is none, or an empty one; or no memory.
        return None


def has_swap() -> bool:
    """Whether the system has one."""
    with contextlib.suppress(OSError):
        return len(Path("/proc/swaps").read_text().splitlines()) > 1
    return False


def _is_above_it() -> bool:
    try:
        users = Path("/proc/self/uid_map").read_text().split()
        found = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    if users != _ALL_USERS:  # In a container with users of its own, the kernel heeds the bound all the same.
        return False
    return found is not None and bool(int(found[1], 16) >> _CAP_IPC_LOCK & 1)
