"""Attacks on noise in floating point: which outputs a sampler cannot reach, and how long it took.

After Jin, McMurtry, Rubinstein, Ohrimenko, *Are we there yet? Timing and floating-point attacks on
differential privacy systems* (IEEE S&P 2022), and Mironov, *On significance of the least significant bits for
differential privacy* (CCS 2012). An observer of y = f + σ·n knows that f is one of two numbers. A sampler
computes n from random words by a few operations in floating point, so that only some numbers can come out.
For each candidate f the observer looks for words with which the very bits of y come out; where he finds some
for one candidate only, f is that one, whatever ε says.

Every ``explains`` below answers, for many outputs at once, whether there are such words. It inverts the
sampler approximately, in extended precision, and then runs it forward from the words near by.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from dpagent.privacy.noise.discrete_gaussian import DiscreteGaussianSampler

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_REACH: Final = 4
"""How many steps of a sampler's grid an inversion may be off."""
_GRID: Final = 2.0**52
_log = np.frompyfunc(math.log, 1, 1)  # the C library's, as numpy's samplers call it


class Noise(Protocol):
    """A way to draw Gaussian noise, and its weakness.

    Attributes:
        name: For people.
        together: Numbers that are drawn together, and attacked together.
    """

    name: str
    together: int

    def add(self, values: Floats, sigma: float) -> Floats:
        """``values`` plus noise, both (n, together)."""
        ...

    def explains(self, outputs: Floats, candidate: Floats, sigma: float) -> Bools:
        """For each of the outputs, (n, together), whether it can come of a candidate, (together,): (n,)."""
        ...


class Polar:
    """Marsaglia's polar method, as in numpy's ``RandomState.normal``: two numbers from a point in a disc."""

    name = "polar method (numpy RandomState)"
    together = 2

    def add(self, values: Floats, sigma: float) -> Floats:
        return values + np.random.RandomState().normal(0.0, sigma, values.shape)

    def explains(self, outputs: Floats, candidate: Floats, sigma: float) -> Bools:
        noise = (outputs - candidate).astype(np.longdouble) / np.longdouble(sigma)
        square = (noise**2).sum(axis=1)
        radius = np.sqrt(np.exp(-square / 2) / square)[:, np.newaxis]
        # The second coordinate of the point makes the first number.
        second, first = np.rint(noise * radius * _GRID).astype(np.float64).T

        def forward(step: tuple[int, ...]) -> Floats:
            x, y = (first + step[0]) / _GRID, (second + step[1]) / _GRID
            r2 = x * x + y * y
            is_inside = (r2 < 1) & (r2 > 0)
            r2 = np.where(is_inside, r2, 0.5)
            factor = np.sqrt(-2.0 * _logarithm(r2) / r2)
            numbers = np.stack([factor * y, factor * x], axis=1)
            return np.where(is_inside[:, np.newaxis], numbers, np.nan)

        return _reached(outputs, candidate, sigma, forward, dimensions=2)


class BoxMuller:
    """The Box-Muller transform in float64, of two uniform numbers with 53 bits."""

    name = "Box-Muller transform (float64)"
    together = 2

    def add(self, values: Floats, sigma: float) -> Floats:
        uniform = np.random.default_rng().random((len(values), 2))
        return values + sigma * self._forward(1.0 - uniform[:, 0], uniform[:, 1])

    def explains(self, outputs: Floats, candidate: Floats, sigma: float) -> Bools:
        noise = (outputs - candidate).astype(np.longdouble) / np.longdouble(sigma)
        first = np.rint(np.exp(-(noise**2).sum(axis=1) / 2) * (2 * _GRID)).astype(np.float64)
        angle = np.arctan2(noise[:, 1], noise[:, 0]) / (2 * np.arctan2(np.longdouble(0), np.longdouble(-1)))
        second = np.rint((angle % 1) * (2 * _GRID)).astype(np.float64)

        def forward(step: tuple[int, ...]) -> Floats:
            u, v = (first + step[0]) / (2 * _GRID), (second + step[1]) / (2 * _GRID)
            is_drawn = (u > 0) & (u <= 1) & (v >= 0) & (v < 1)
            numbers = self._forward(np.where(is_drawn, u, 0.5), np.where(is_drawn, v, 0.5))
            return np.where(is_drawn[:, np.newaxis], numbers, np.nan)

        return _reached(outputs, candidate, sigma, forward, dimensions=2)

    @staticmethod
    def _forward(u: Floats, v: Floats) -> Floats:
        radius, angle = np.sqrt(-2.0 * _logarithm(u)), 2.0 * math.pi * v
        return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)


class Ziggurat:
    """The Ziggurat of numpy's ``Generator.normal``: a whole number of 52 bits times the width of one of 256
    layers. (Once in a hundred draws, a number of the wedges or the tail, of which the same is true.)"""

    name = "Ziggurat (numpy Generator)"
    together = 1

    def add(self, values: Floats, sigma: float) -> Floats:
        return np.asarray(np.random.default_rng().normal(values, sigma))

    def explains(self, outputs: Floats, candidate: Floats, sigma: float) -> Bools:
        widths = _ziggurat_widths()
        steps = np.rint((outputs - candidate) / sigma / widths)

        def forward(step: tuple[int, ...]) -> Floats:
            words = steps + step[0]
            return np.where(np.abs(words) < _GRID, words * widths, np.nan)

        return _reached(outputs, candidate, sigma, forward, dimensions=1, all_of_a_row=False)


class Integers:
    """Ours: whole numbers, of which each is reached from each candidate.

    Args:
        units: Grid units to one, a power of two.
    """

    name = "ours (integers)"
    together = 1

    def __init__(self, units: int) -> None:
        self._units = units

    def add(self, values: Floats, sigma: float) -> Floats:
        drawn = DiscreteGaussianSampler(sigma * self._units).sample(values.size).reshape(values.shape)
        return np.asarray((np.rint(values * self._units) + drawn) / self._units)

    def explains(self, outputs: Floats, candidate: Floats, sigma: float) -> Bools:
        steps = (outputs - np.rint(candidate * self._units) / self._units) * self._units
        # No output lies so far out that the sampler could not have drawn it.
        return np.asarray((steps == np.rint(steps)).all(axis=1) & (np.abs(steps) < 2.0**31).all(axis=1))


class Outcome:
    """What an attack finds out.

    Attributes:
        decided: Share of the outputs that only one candidate explains.
        right: Share of these for which that candidate is the true one; NaN if there are none.
        success: Share of all outputs for which the observer is right, with a coin for the others.
        unexplained: Share that not even the true candidate explains, for which the inversion went too far
            astray.
    """

    def __init__(self, truth: Bools, explained: tuple[Bools, Bools]) -> None:
        zero, one = explained
        decided = zero != one
        right = (one == truth) & decided
        self.decided = float(decided.mean())
        self.right = float(right.sum() / decided.sum()) if decided.any() else math.nan
        self.success = float(right.mean() + (1 - decided.mean()) / 2)
        self.unexplained = float((~np.where(truth, one, zero)).mean())


def attack(noise: Noise, epsilon: float, *, releases: int, delta: float = 1e-5) -> Outcome:
    """Tell neighbouring data sets apart, as published: sensitivity 1/32 and noise by the classical formula.

    The second of two candidate releases differs from the first by the sensitivity in one number; the first
    is some number of that size.

    Args:
        noise: To be attacked.
        epsilon: As claimed for one release.
        releases: How many are attacked.
        delta: As claimed.
    """
    generator = np.random.default_rng()
    sensitivity = 1 / 32
    sigma = sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / epsilon
    first = generator.uniform(-sensitivity, sensitivity, noise.together)
    second = first.copy()
    second[0] += sensitivity
    truth = generator.random(releases) < 0.5
    outputs = noise.add(np.where(truth[:, np.newaxis], second, first), sigma)
    return Outcome(truth, (noise.explains(outputs, first, sigma), noise.explains(outputs, second, sigma)))


def _reached(
    outputs: Floats,
    candidate: Floats,
    sigma: float,
    forward: Callable[[tuple[int, ...]], Floats],
    *,
    dimensions: int,
    all_of_a_row: bool = True,
) -> Bools:
    """Whether the sampler, run forward from words near by, makes the outputs bit for bit."""
    found = np.zeros(len(outputs), np.bool_)
    for step in itertools.product(range(-_REACH, _REACH + 1), repeat=dimensions):
        equal = candidate + sigma * forward(step) == outputs
        found |= equal.all(axis=1) if all_of_a_row else equal.any(axis=1)
    return found


def _logarithm(values: Floats) -> Floats:
    return np.asarray(_log(values), np.float64)


class _BitGenerator(ctypes.Structure):
    """numpy's C interface to a source of random words."""

    _Word = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)
    _Half = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p)
    _Number = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_void_p)
    _fields_ = (
        ("state", ctypes.c_void_p), ("next_uint64", _Word), ("next_uint32", _Half), ("next_double", _Number),
        ("next_raw", _Word),
    )  # fmt: skip


class _Words:
    """A source of random words that gives the same one again and again."""

    def __init__(self) -> None:
        self.word = 0
        self._struct = _BitGenerator(
            None, _BitGenerator._Word(lambda _: self.word), _BitGenerator._Half(lambda _: 0),
            _BitGenerator._Number(lambda _: 0.0), _BitGenerator._Word(lambda _: self.word),
        )  # fmt: skip
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self.capsule = new(ctypes.addressof(self._struct), b"BitGenerator", None)
        self.lock = threading.Lock()


@cache
def _ziggurat_widths() -> Floats:
    """The widths of the 256 layers over 2⁵², bit for bit: numpy's own, which it multiplies by one."""
    words: Any = _Words()
    generator, widths = np.random.Generator(words), []
    for layer in range(256):
        words.word = 1 << 9 | layer  # the layer in 8 bits, a sign, and the whole number
        widths.append(generator.standard_normal())
    return np.array(widths)
