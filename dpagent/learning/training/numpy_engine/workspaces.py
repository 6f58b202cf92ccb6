"""Memory of a microbatch: allocated once, every record on a cache line of its own.

Numeric code may treat a number by its address: vector loops peel off numbers that are not aligned or do
not fill a vector at the end, and the peeled part may round differently. Here every record begins on a
64-byte boundary and takes a whole number of the widest vectors, so each lies like every other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dpagent.learning.models.part import Shape

Floats: TypeAlias = NDArray[np.float32]

# Bytes of a cache line and of the widest vectors of x86-64 (AVX-512); a multiple of NEON's 16.
_LINE = 64
_FLOATS = _LINE // 4

AT_ONCE = 1 << 16
"""Floats of a signal to pass over several times in a row: they stay in a core's cache meanwhile."""


class Workspace(NamedTuple):
    """Numbers of all records of a microbatch.

    Attributes:
        values: ``(records, views, *shape)``.
        whole: the same memory, flat and without a break, with the padding of each record.
    """

    values: Floats
    whole: Floats

    @property
    def is_gapless(self) -> bool:
        """Whether the numbers of all records are one run of memory."""
        return self.values.size == self.whole.size

    @property
    def rows(self) -> Floats:
        """``(records, numbers of a record)``, a view."""
        records = len(self.values)
        return self.whole.reshape(records, -1)[:, : self.values.size // records]

    def part(self, records: slice) -> Workspace:
        """The same of some records only, a view."""
        rows = self.whole.reshape((len(self.values), -1), copy=False)
        return Workspace(self.values[records], rows[records].reshape(-1, copy=False))


class Signal(NamedTuple):
    """The numbers that pass between two stages.

    Attributes:
        values: the activations.
        gradient: of the loss by them, or None where nothing before has parameters.
    """

    values: Workspace
    gradient: Workspace | None

    def parts(self, floats: int) -> Iterator[slice]:
        """Cuts the records into as few equal parts as hold at most ``floats`` numbers each, or one record."""
        records = len(self.values.values)
        count = min(records, -(-self.values.whole.size // floats))
        ends = [records * number // count for number in range(count + 1)]
        return map(slice, ends, ends[1:])

    def part(self, records: slice) -> Signal:
        """The same of some records only, a view."""
        return Signal(self.values.part(records), self.gradient.part(records) if self.gradient else None)


class Memory:
    """Hands out the memory of one network: of its own, or shared between steps that follow each other.

    Recently used memory is still in the cache, so the less memory there is the faster it is.

    Args:
        records, views: of a microbatch.
    """

    def __init__(self, records: int, views: int) -> None:
        self.records, self.views = records, views
        self._shared: dict[str, Floats] = {}
        self._parity = False

    def workspace(self, shape: Shape, *, shared: str | None = None) -> Workspace:
        """Room for ``(records, views, *shape)`` numbers."""
        size = self.views * math.prod(shape)
        pitch = round_up(size)
        whole = self.floats(self.records * pitch, shared=shared)
        values = whole.reshape(self.records, pitch)[:, :size]
        return Workspace(values.reshape((self.records, self.views, *shape), copy=False), whole)

    def gradient(self, shape: Shape) -> Workspace:
        """Room for the gradient by a signal, until two steps later, backwards, another one is written."""
        self._parity = not self._parity
        return self.workspace(shape, shared=f"gradient {self._parity:d}")

    def floats(self, size: int, *, shared: str | None = None) -> Floats:
        """``size`` numbers: zeros of its own, or the memory for a purpose, which holds anything."""
        if shared is None:
            return aligned(size)
        if shared not in self._shared or len(self._shared[shared]) < size:
            self._shared[shared] = aligned(size)
        return self._shared[shared][:size]


def cropped(signal: Signal, shape: Shape) -> Signal:
    """The first rows and columns of images: the same memory, with ``values`` of that shape."""

    def crop(whole: Workspace) -> Workspace:
        return Workspace(whole.values[:, :, *(slice(size) for size in shape)], whole.whole)

    return Signal(crop(signal.values), crop(signal.gradient) if signal.gradient else None)


def aligned(size: int) -> Floats:
    """``size`` zeros that begin on a cache line."""
    memory = np.zeros(size + _FLOATS, np.float32)
    start = -memory.__array_interface__["data"][0] % _LINE // 4
    return memory[start : start + size]


def round_up(size: int) -> int:
    """The least whole number of cache lines that holds ``size`` floats, in floats."""
    return -(-size // _FLOATS) * _FLOATS
