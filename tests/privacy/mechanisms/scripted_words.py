"""The two-point mechanism on random words of the test's choice."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dpagent.privacy.mechanisms.layer_ranges import LayerRange
from dpagent.privacy.mechanisms.two_point import TwoPoint


def one_layer(size: int, centre: float = 0.0, radius: float = 1.0) -> tuple[LayerRange, ...]:
    return (LayerRange("dense", size, centre, radius),)


def scripted(*words: int) -> Callable[[int], bytes]:
    """Entropy that hands out these 64-bit words, in order, and no more."""
    rest = b"".join(word.to_bytes(8, "little") for word in words)

    def entropy(count: int) -> bytes:
        nonlocal rest
        assert count <= len(rest), "more random bytes read than expected"
        data, rest = rest[:count], rest[count:]
        return data

    return entropy


def ones_of_all_words(mechanism: TwoPoint, weight: float) -> int:
    """How many of the 2⁶⁴ words give a 1, found by bisection on the shipped ``report``."""

    def is_one(word: int) -> bool:
        return bool(mechanism.report(np.array([weight]), entropy=scripted(0, word)).bits[0])

    low, high = 0, 2**64  # words below give a 1, from the threshold on a 0
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if is_one(middle) else (low, middle)
    for word in {max(low - 1, 0), min(low, 2**64 - 1), 0, 2**64 - 1, low // 2, (low + 2**64) // 2}:
        assert is_one(word) == (word < low)  # one threshold, not several
    return low
