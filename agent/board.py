"""What this board is, as the kernel tells it: public facts, none of which depends on a record."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DEVICE_TREE: Final = Path("/proc/device-tree")
_LONGEST: Final = 4_096
_32_BITS: Final = {"aarch64": "armv7l", "armv8l": "armv7l", "x86_64": "i686"}
"""What a program of 32 bits runs on, by the name that a 64-bit kernel has for its processor."""


@dataclass(frozen=True, slots=True)
class Board:
    """A machine that an agent may run on.

    Attributes:
        architecture: of this program, as ``uname -m`` names it: that of a 32-bit system on a 64-bit processor
            is ``armv7l``.
        cores: that this program may use.
        memory_mib: installed, without what firmware and kernel keep for themselves.
        model: its name in the device tree; empty on machines without one, such as PCs.
        compatible: the root of the device tree's names for it, the most special one first.
    """

    architecture: str
    cores: int
    memory_mib: int
    model: str = ""
    compatible: tuple[str, ...] = ()

    @classmethod
    def this(cls, device_tree: Path = DEVICE_TREE) -> Board:
        """The one that this program runs on."""
        return cls(
            architecture=_architecture(platform.machine(), sys.maxsize > 2**32),
            # A container, or taskset, may leave fewer than the machine has.
            cores=len(os.sched_getaffinity(0)),
            memory_mib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
            model=" ".join(_texts(device_tree / "model")),
            compatible=_texts(device_tree / "compatible"),
        )


def _architecture(machine: str, has_64_bits: bool) -> str:
    return machine if has_64_bits else _32_BITS.get(machine, machine)


def _texts(file: Path) -> tuple[str, ...]:
    """The texts of a property, which are separated by NUL; none without the file."""
    try:
        with file.open("rb") as stream:
            data = stream.read(_LONGEST)
    except OSError:
        return ()
    return tuple(text for text in data.decode(errors="replace").split("\0") if text)
