"""Numbers below 10⁻³⁸ count as zero: so arithmetic takes as long for all numbers.

A product whose result is subnormal takes some processors a hundred times as long (an Intel Xeon: products of
matrices 170 times, a tanh 60 times). A coordinator chooses the weights, and with them which record has such
numbers: how long training took would tell whether it is there. No bound on an engine's error needs subnormal
numbers (:mod:`dpagent.learning.training.engine`).

The processor is told by a register of each thread, which threads and forks that it starts take over. The C
library keeps it in the structure of fegetenv(3); where that has it, is a part of each platform's ABI.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np

_ROOM: Final = 256
"""More bytes than any such structure has."""
_PLACES: Final = {
    "x86_64": (28, 1 << 15 | 1 << 6),  # MXCSR: results (FTZ) and operands (DAZ).
    "aarch64": (0, 1 << 24),  # FPCR: FZ, of both.
    "armv7l": (0, 1 << 24),  # FPSCR; NEON flushes in any case.
}
"""Of the register in the structure, in bytes, and the bits to be set."""


def flush_subnormals() -> bool:
    """Have subnormal numbers count as zero in this thread, and in its threads and forks from now on.

    Returns:
        Whether they do now.
    """
    _change(lambda register, bits: register | bits)
    return are_flushed()


@contextmanager
def flushed_subnormals() -> Iterator[None]:
    """The same for a while, and then as before: in a process that others use, too."""
    were_flushed = are_flushed()
    flush_subnormals()
    try:
        yield
    finally:
        if not were_flushed:
            _change(lambda register, bits: register & ~bits)


def _change(change: Callable[[int, int], int]) -> None:
    place = _PLACES.get(os.uname().machine)
    if place is None:
        return
    offset, bits = place
    library, state = ctypes.CDLL(None), ctypes.create_string_buffer(_ROOM)
    if hasattr(library, "fegetenv") and library.fegetenv(state) == 0:
        register = ctypes.c_uint32.from_buffer(state, offset)
        register.value = change(register.value, bits)
        library.fesetenv(state)


def are_flushed() -> bool:
    """Whether subnormal numbers count as zero in this thread."""
    result = np.full(64, 2.0**-100, np.float32) * np.float32(2.0**-40)
    operand = np.full(64, 1 << 10, np.uint32).view(np.float32) * np.float32(2.0**100)
    return not result.any() and not operand.any()
