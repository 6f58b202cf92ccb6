"""The norm of an honest fragment, from public parameters alone: what bounds the pull of a hostile one.

A fragment is one block of w = round(s + N): m coordinates, s the quantized clipped sums, N the noise of all
steps, in wire units of a public step, perhaps rounded once more to 2^k (the *level* of
:mod:`dpagent.protocol.packing`). The noise alone fixes ‖w‖² almost completely, and a record adds no more than
its clip norm, so a coordinator can reject what no honest device sends. Every tail below is at most e^−x, x =
−log of the tail probability. A mechanism states the law of its noise
(:class:`NoiseLaw`), and the norms follow: for Laplace noise in
:mod:`dpagent.privacy.mechanisms.laplace_law`, in L1, and here in L2, for noise with Gaussian tails. Of that
a mechanism states (:class:`SubGaussianLaw`), in grid units, for one coordinate and one step,

- a *variance proxy* P: E e^(tN) ≤ e^(t²P/2) for every t;
- bounds V ≤ E N² and M ≥ E N⁴;
- that N is symmetric and unimodal, and independent of everything before it and of other coordinates;
- that where the step is more than one grid unit, and at most √P/2, the nearest multiple of it has the moment
  generating function of N plus independent noise, uniform on one step, but for a factor of 1 + 10⁻³⁰.

*The signal.* A record adds at most Δ (the sensitivity) to ‖s‖₂, rounding included: the clipped sum of L
records has a norm of at most L·(1 + slack) clip norms, and quantizing adds √d/2 grid units, which Δ holds for
each record. So ‖s‖ ≤ Δ·L, in the update and in each block. L, over all steps, is binomial with mean μ and
rate q, so L ≤ μ + √(2μ(1−q)x) + (1−q)x/3 (Bernstein; Boucheron, Lugosi, Massart, *Concentration
inequalities*, 2013, Thm 2.10). No smaller bound holds for all data: gradients of records that all say the
same lie in one direction, and that may lie in one block.

*From above.* Noise that is uniform on an interval of length 1 has the proxy 1/12 (sinh(t/2)/(t/2) ≤
e^(t²/24)). A level k > 0 adds rounding with mean 0, given w, in an interval of length 2^k: a proxy of 4^k/4
(Hoeffding). So for one step one coordinate of w − s has the proxy τ² = P/step² + 1/12 + 4^k/4, without the
1/12 if the step is one grid unit. Saturation only brings values nearer to 0. With g standard normal, e^(u·a²)
= E e^(√(2u)·g·a), so a coordinate with signal μ has E e^(u·w²) ≤ (1−2uτ²)^−½·e^(uμ²/(1−2uτ²)): that of
Gaussian noise. The bound on a non-central χ² (Birgé 2001, Lemma 8.1, which rests on that function alone; with
no signal Laurent and Massart 2000, Lemma 1) follows for S = ‖s‖ in wire units:

    ‖w‖² ≤ mτ² + S² + 2τ·√((mτ² + 2S²)·x) + 2τ²x.

With several steps, later signals depend on earlier noise, and can point where it points, and rounding to the
nearest depends on both. Then ‖w‖ is at most S, plus √m/2 for rounding, plus the bound on the noise and the
level alone.

*How high the level.* Values that fit travel at level 0, and what does not is rounded to the first 2^k at
which it does; so, almost surely, a device needs no more than :func:`dpagent.protocol.packing.highest_level`
for the most that level 0 can have, and a coordinator refuses higher ones.

*From below.* The square of the nearest whole number is an even function of s + N that rises with its
magnitude, and N is symmetric and unimodal: so it is stochastically least at s = 0 (Anderson 1955). With
several steps, all that comes before the last noise is such a signal: the noise of one step remains in any
case. Then E w² ≥ V/step², since rounding Gaussian noise of σ ≥ 0.3 steps gives σ² + 1/12 − 4e^(−2π²σ²)(σ² +
1/4π²) or more, by Poisson summation; and for other laws by the last point above. E w⁴ ≤ E(|N| + 1/2)⁴. A sum
of m independent non-negative variables falls below its mean by more than √(2x·m·E w⁴) with probability at
most e^−x (Maurer, *A bound on the deviation probability for sums of non-negative random variables*, JIPAM
4(1), 2003). A level k > 0 adds r with mean 0, given w: then ‖w + r‖² ≥ ‖w‖² + 2w·r ≥ ‖w‖² − 2^k·‖w‖·√(2x)
(Hoeffding), which rises with ‖w‖ from 2^k·√(x/2) on. Saturation at 2³¹ − 1 is beyond what Gaussian noise of
three steps reaches by more than any probability here can tell.

*A cap on the device* replaces the noisy sum by one within a ball, and rounds it at random: S is then the
ball's radius and √m/2 for rounding to the grid, τ² = 1/4 + 4^k/4, and nothing is known from below.

The sampler's distance from its ideal (2·10⁻³² for a whole update of 26,010 values) adds to the probabilities;
it is nothing beside them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import require_between, require_count, require_positive
from dpagent.norm import Norm

_NEAREST_PROXY: Final = 1 / 12
_RANDOM_PROXY: Final = 1 / 4
_LEAST_DEVIATION: Final = 0.3
"""Of Gaussian noise, in steps, that rounding to the nearest does not make smaller."""


@dataclass(frozen=True, slots=True)
class NormRange:
    """The norms of honest fragments, in wire units. Public.

    Attributes:
        norm: which, of power p.
        least: of ‖w‖^p, for p = 2 the squared norm.
        most: likewise.
    """

    norm: Norm
    least: float
    most: float

    def holds(self, values: NDArray[np.int8] | NDArray[np.int64]) -> bool:
        """Whether a fragment's coordinates, without padding, have such a norm."""
        exact = values.astype(np.float64)
        size = float(exact @ exact) if self.norm is Norm.L2 else float(np.abs(exact).sum())
        return self.least <= size <= self.most

    @property
    def largest(self) -> float:
        """The largest norm."""
        return self.most if self.norm is Norm.L1 else math.sqrt(self.most)


class NoiseLaw(ABC):
    """What is known of one step's noise on one coordinate. Public."""

    __slots__ = ()

    @abstractmethod
    def norms(
        self,
        step: int,
        *,
        coordinates: int,
        steps: int,
        signal_units: float,
        tail: float,
        level: int = 0,
    ) -> NormRange:
        """The range that a fragment of a noisy sum leaves with probability at most ``tail``.

        Args:
            step: grid units to a wire unit, odd.
            coordinates: m, of the block, without padding.
            steps: noisy sums in the update.
            signal_units: bound on the norm of the signal of all steps, in grid units; the norm is that of
                the range.
            tail: in (0, 1); half of it to each side.
            level: of the fragment's values, at least 0.
        """


@dataclass(frozen=True, slots=True)
class SubGaussianLaw(NoiseLaw):
    """Noise that is symmetric and unimodal, with Gaussian tails. Public.

    Attributes:
        proxy: P, a variance proxy of its moment generating function, in grid units squared.
        variance: V, at most its variance, in grid units squared.
        fourth_moment: M, at least its fourth moment, in grid units to the fourth.
    """

    proxy: float
    variance: float
    fourth_moment: float

    def norms(
        self,
        step: int,
        *,
        coordinates: int,
        steps: int,
        signal_units: float,
        tail: float,
        level: int = 0,
    ) -> NormRange:
        """See :meth:`NoiseLaw.norms`: a range of L2 norms, for a bound on the signal's L2 norm."""
        require_count("coordinates", coordinates)
        require_count("steps", steps)
        x, signal = log_inverse(tail / 2), signal_units / step
        noise = self.proxy * steps / step**2 + _level_proxy(level)
        if steps == 1:
            most = _upper(coordinates, noise + (_NEAREST_PROXY if step > 1 else 0.0), signal, x)
        else:
            nearest = math.sqrt(coordinates) / 2 if step > 1 else 0.0
            most = (signal + nearest + math.sqrt(_upper(coordinates, noise, 0.0, x))) ** 2
        return NormRange(Norm.L2, self._least(step, coordinates, tail, level), most)

    def _least(self, step: int, coordinates: int, tail: float, level: int) -> float:
        mean, fourth = self.variance / step**2, self.fourth_moment / step**4
        if step > 1:
            if mean < _LEAST_DEVIATION**2:
                return 0.0
            # E(a + 1/2)⁴ with a = |N|, and E a³ ≤ (E a⁴)^¾, E a² ≤ (E a⁴)^½, E a ≤ (E a⁴)^¼.
            fourth = (fourth**0.25 + 0.5) ** 4
        x = log_inverse(tail / (4 if level else 2))
        least = max(0.0, coordinates * mean - math.sqrt(2 * x * coordinates * fourth))
        if level:
            root, coarse = math.sqrt(least), 2.0**level
            least = least - coarse * root * math.sqrt(2 * x) if root > coarse * math.sqrt(x / 2) else 0.0
        return max(0.0, least)


def largest_lot(expected: float, rate: float, tail: float) -> float:
    """What the number of records in Poisson lots exceeds with probability at most ``tail``.

    Args:
        expected: mean of the number, over all steps of a round, above 0.
        rate: q, the probability with which each record is in a lot, in (0, 1].
        tail: in (0, 1).

    >>> largest_lot(100.0, 1.0, 1e-9)
    100.0
    >>> round(largest_lot(100.0, 0.1, 1e-9), 1)
    167.3
    """
    require_positive("expected lot", expected)
    require_between("sampling rate", rate, 0.0, 1.0, low_open=True)
    x = log_inverse(tail)
    return expected + math.sqrt(2 * expected * (1 - rate) * x) + (1 - rate) * x / 3


def capped_norms(*, step: int, coordinates: int, ball_units: float, tail: float, level: int = 0) -> NormRange:
    """The range of L2 norms for a sum that a device has brought into a ball before rounding it.

    Args:
        step: grid units to a wire unit.
        coordinates: m, of the block, without padding.
        ball_units: radius of the ball, in grid units.
        tail: in (0, 1).
        level: of the fragment's values, at least 0.
    """
    require_count("coordinates", coordinates)
    signal = (ball_units + math.sqrt(coordinates) / 2) / step
    proxy = (_RANDOM_PROXY if step > 1 else 0.0) + _level_proxy(level)
    return NormRange(Norm.L2, 0.0, _upper(coordinates, proxy, signal, log_inverse(tail)))


def _level_proxy(level: int) -> float:
    return _RANDOM_PROXY * 4.0**level if level else 0.0


def _upper(coordinates: int, proxy: float, signal: float, x: float) -> float:
    """The module's bound from above on the squared norm, for noise that is independent of the signal."""
    noise = coordinates * proxy
    deviation = 2 * math.sqrt(proxy * (noise + 2 * signal**2) * x)
    return noise + signal**2 + deviation + 2 * proxy * x


def log_inverse(tail: float) -> float:
    """x with e^−x = ``tail``, in (0, 1)."""
    return -math.log(require_between("tail", tail, 0.0, 1.0, low_open=True, high_open=True))
