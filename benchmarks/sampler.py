"""Exact integer noise against numpy's continuous one, and against OpenDP's exact one.

Values a second of ``DiscreteGaussianSampler.sample`` and ``DiscreteLaplaceSampler.sample``, which draw
exact integers from the operating system's entropy. Ten calls of 26,010 values (one noisy sum of the
MNIST model) at a time, in turn with numpy's ``Generator.normal`` or ``laplace`` (PCG64, float64), which is
neither exact nor unpredictable and serves as the speed reference; medians of 15. OpenDP's ``make_gaussian``
and ``make_laplace`` on a vector of as many whole numbers are exact, too; in turn with one call of ours,
medians of 3. They are left out where OpenDP is not installed (it is not a dependency; 265 MB):
``pip install opendp==0.16.*``.

σ up to 1,024 is drawn from one table, 354,690 from two (147,000 is the noise of such a sum at 2.24
clip norms), 2²⁴ from three; λ up to 97 from one, 1.5 million from two, 2⁴⁰ from four. A table takes 4 random
bytes a value, so ``os.urandom``, whose speed is the kernel's, sets a bound, given here. The times for a new
σ or λ are those of the first draw with it, so they include building a table; the first of a process builds
all. With a pool, the same number of values is drawn before the clock starts.

Limits: one thread; numpy's generators draw no entropy; OpenDP's time includes conversion from and to a list.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count
from typing import Any

import numpy as np

from benchmarks.figures import Figure
from benchmarks.timing import alternate
from dpagent.privacy.noise.discrete_gaussian import DiscreteGaussianSampler, gaussian_table
from dpagent.privacy.noise.discrete_laplace import DiscreteLaplaceSampler
from dpagent.privacy.noise.entropy import NoisePool, Sampler

_SIGMAS = (1.0, 2.0, 1000.0, 147_000.0, 1e6, 3e6)
_SCALES: Sequence[tuple[float, int | None]] = (
    (2.0, None),
    (1000.0, None),
    (147_000.0, None),
    (147_000.0, 500_000),
    (2.0**40, None),
)
_CALLS, _RELEASE = 10, 26_010
_REPEATS, _SLOW_REPEATS = 15, 3


def run() -> list[Figure]:
    """Time the kernel's generator, both samplers, a release with a new parameter, and a pool."""
    generator = np.random.default_rng(0)
    figures = [_entropy()]
    for sigma in _SIGMAS:
        name = f"Gaussian, σ = {sigma:,.0f}"
        normal = partial(generator.normal, 0.0, sigma, _RELEASE)
        figures.append(_against_numpy(name, DiscreteGaussianSampler(sigma), "normal", normal))
    for scale, bound in _SCALES:
        name = f"Laplace, λ = {scale:,.0f}" + ("" if bound is None else f", |k| ≤ {bound:,}")
        laplace = partial(generator.laplace, 0.0, scale, _RELEASE)
        figures.append(_against_numpy(name, DiscreteLaplaceSampler(scale, bound=bound), "laplace", laplace))
    figures += _against_opendp()

    numbers = count(1)
    (new,) = alternate(
        lambda: DiscreteGaussianSampler(147_000.0 + next(numbers)).sample(_RELEASE), repeats=_REPEATS
    )
    figures.append(Figure("one release of 26,010 values with a new σ, about 147,000", 1000 * new, "ms"))
    (first,) = alternate(_first_release, repeats=_REPEATS)
    figures.append(Figure("the first one of a process, σ = 3,000,000", 1000 * first, "ms"))
    (new,) = alternate(
        lambda: DiscreteLaplaceSampler(147_000.0 + next(numbers)).sample(_RELEASE), repeats=_REPEATS
    )
    figures.append(Figure("one release of 26,010 values with a new λ, about 147,000", 1000 * new, "ms"))

    sampler = DiscreteGaussianSampler(147_000.0)
    pool = NoisePool(sampler)
    pool.prepare((_REPEATS + 1) * _RELEASE)
    pooled, drawn = alternate(
        partial(pool.sample, _RELEASE), partial(sampler.sample, _RELEASE), repeats=_REPEATS
    )
    figures.append(
        Figure(
            "one release of 26,010 values, σ = 147,000, from a pool", 1000 * pooled, "ms",
            f"drawn at once: {1000 * drawn:.3g} ms", pooled / drawn,
        )
    )  # fmt: skip
    return figures


def _first_release() -> None:
    gaussian_table.cache_clear()
    DiscreteGaussianSampler(3e6).sample(_RELEASE)


def _entropy() -> Figure:
    (taken,) = alternate(partial(_call, partial(os.urandom, 4 * _RELEASE)), repeats=_REPEATS)
    millions = _CALLS * _RELEASE / taken / 1e6
    return Figure("bound set by os.urandom, for one table (half of it for two)", millions, "million a second")


def _against_numpy(name: str, sampler: Sampler, distribution: str, draw: Callable[[], object]) -> Figure:
    ours, theirs = alternate(
        partial(_call, partial(sampler.sample, _RELEASE)), partial(_call, draw), repeats=_REPEATS
    )
    millions = _CALLS * _RELEASE / 1e6
    return Figure(
        f"values drawn, {name}",
        millions / ours,
        "million a second",
        f"numpy Generator.{distribution}: {millions / theirs:.1f}",
        theirs / ours,
    )


def _against_opendp() -> list[Figure]:
    if find_spec("opendp") is None:
        print("    OpenDP is not installed (pip install opendp==0.16.*): left out.", file=sys.stderr)
        return []
    opendp: Any = import_module("opendp.prelude")
    opendp.enable_features("contrib")
    domain = opendp.vector_domain(opendp.atom_domain(T="i64"))
    zeros = [0] * _RELEASE
    figures = []
    for sigma in _SIGMAS:
        release = opendp.m.make_gaussian(domain, opendp.l2_distance(T="i64"), scale=sigma)
        sampler: Sampler = DiscreteGaussianSampler(sigma)
        figures.append(_beside(f"Gaussian, σ = {sigma:,.0f}", sampler, partial(release, zeros)))
    for scale, bound in _SCALES:
        if bound is None:
            release = opendp.m.make_laplace(domain, opendp.l1_distance(T="i64"), scale=scale)
            sampler = DiscreteLaplaceSampler(scale)
            figures.append(_beside(f"Laplace, λ = {scale:,.0f}", sampler, partial(release, zeros)))
    return figures


def _beside(name: str, sampler: Sampler, release: Callable[[], object]) -> Figure:
    ours, theirs = alternate(partial(sampler.sample, _RELEASE), release, repeats=_SLOW_REPEATS)
    return Figure(
        f"values drawn, {name}, in turn with OpenDP",
        _RELEASE / ours / 1e6,
        "million a second",
        f"OpenDP {version('opendp')}: {_RELEASE / theirs / 1e6:.3f}",
        theirs / ours,
    )


def _call(draw: Callable[[], object]) -> None:
    for _ in range(_CALLS):
        draw()
