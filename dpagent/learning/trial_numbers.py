"""Numbers for trials: of engines, of the time that a round takes. Never noise, and never a choice of records.

By the standard library's generator, since numpy's take 4 MiB of a board's memory once they are imported.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

_BITS: Final = 24
"""Of a number in [0, 1): as many as a float32 has."""
_AT_ONCE: Final = 1 << 16
"""Numbers: what is drawn at once takes four times their memory, and has no more than 2³¹ bits."""


class TrialNumbers:
    """Draws numbers.

    Args:
        seed: of the draws; of the system's entropy if None.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._generator = random.Random(seed)

    def uniform(self, shape: Sequence[int], low: float = 0.0, high: float = 1.0) -> NDArray[np.float32]:
        """Numbers of [low, high), of this shape."""
        numbers = np.empty(math.prod(shape), np.float32)
        for start in range(0, len(numbers), _AT_ONCE):
            some = numbers[start : start + _AT_ONCE]
            some[...] = np.frombuffer(self._generator.randbytes(4 * len(some)), np.uint32) >> (32 - _BITS)
        numbers *= np.float32((high - low) / 2**_BITS)
        if low:
            numbers += np.float32(low)
        return numbers.reshape(shape)

    def normal(self, shape: Sequence[int]) -> NDArray[np.float32]:
        """Numbers of the standard normal distribution, of this shape: of it, no more than 5.8 from zero.

        Pairs are drawn by a radius and an angle (Box and Muller, 1958).
        """
        count = math.prod(shape)
        radius, angle = pairs = self.uniform((2, -(-count // 2)))
        np.log1p(-radius, out=radius)
        radius *= -2
        np.sqrt(radius, out=radius)
        angle *= np.float32(2 * math.pi)
        cosine = np.cos(angle)
        np.sin(angle, out=angle)
        angle *= radius
        radius *= cosine
        return pairs.ravel()[:count].reshape(shape)

    def integers(self, bound: int, count: int) -> NDArray[np.int64]:
        """Integers of [0, bound)."""
        return np.array([self._generator.randrange(bound) for _ in range(count)], np.int64)

    def integer(self, bound: int) -> int:
        """One of [0, bound)."""
        return self._generator.randrange(bound)

    def number(self, low: float, high: float) -> float:
        """One of [low, high]."""
        return self._generator.uniform(low, high)

    def order(self, count: int) -> NDArray[np.intp]:
        """The integers of [0, count) in an order of chance."""
        return np.array(self._generator.sample(range(count), count), np.intp)
