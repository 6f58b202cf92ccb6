"""Discrete Gaussian noise against numpy's continuous one.

Values a second of ``DiscreteGaussianSampler.sample``, which draws exact integers from the operating
system's entropy, and of numpy's ``Generator.normal`` (PCG64, float64), which is neither exact nor
unpredictable and is here as the mark for speed. Ten calls of 26,010 values (a release of the MNIST
model) at a time, the two in turn, medians of 15.
σ = 2 and 1000 are drawn from one table, 147,000 from two: it is the noise of such a release at 2.24
clip norms. The time for a new σ is that of one release with a σ not seen before, so it includes
building a table.

Limits: one thread; ``os.urandom`` is part of the time, and its speed is the kernel's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

import numpy as np

from benchmarks.figures import Figure
from benchmarks.timing import alternate
from dpagent.privacy import DiscreteGaussianSampler

_SIGMAS = (2.0, 1000.0, 147_000.0)
_CALLS, _RELEASE = 10, 26_010
_REPEATS = 15


def run() -> list[Figure]:
    """Time the sampler at three σ, then a release with a new one."""
    generator = np.random.default_rng(0)
    figures = []
    for sigma in _SIGMAS:
        ours, theirs = alternate(
            partial(_call, partial(DiscreteGaussianSampler(sigma).sample, _RELEASE)),
            partial(_call, partial(generator.normal, 0.0, sigma, _RELEASE)),
            repeats=_REPEATS,
        )
        millions = _CALLS * _RELEASE / 1e6
        figures.append(
            Figure(
                f"values drawn, σ = {sigma:,.0f}",
                millions / ours,
                "million a second",
                f"numpy Generator.normal: {millions / theirs:.1f}",
                theirs / ours,
            )
        )
    fresh = (147_000.0 + number for number in count(1))
    (new,) = alternate(lambda: DiscreteGaussianSampler(next(fresh)).sample(_RELEASE), repeats=_REPEATS)
    return [*figures, Figure("one release of 26,010 values with a new σ, about 147,000", 1000 * new, "ms")]


def _call(draw: Callable[[], object]) -> None:
    for _ in range(_CALLS):
        draw()
