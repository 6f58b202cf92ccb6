"""The norm of an honest fragment, from public parameters alone: what bounds the pull of a hostile one.

A fragment is one block of w = round_to_wire(s + N): m coordinates, s the quantized clipped sums, N the noise
of all steps, in wire units of 2^shift grid units. The noise alone fixes ‖w‖² almost completely, and a record
adds no more than its clip norm, so a coordinator can reject what no honest device sends. Every tail below
is at most e^−x, x = −log of the tail probability. In grid units, for one coordinate and one step, a mechanism
states (:class:`NoiseLaw`)

- a *variance proxy* P: E e^(tN) ≤ e^(t²P/2) for every t;
- bounds V ≤ E N² and M ≥ E N⁴;
- that N is symmetric and unimodal, and independent of everything before it and of other coordinates.

*The signal.* A record adds at most Δ (the sensitivity) to ‖s‖₂, rounding included: the clipped sum of L
records has a norm of at most L·(1 + slack) clip norms, and quantizing adds √d/2 grid units, which Δ holds for
each record. So ‖s‖ ≤ Δ·L, in the update and in each block. L, over all steps, is binomial with mean μ and
rate q, so L ≤ μ + √(2μ(1−q)x) + (1−q)x/3 (Bernstein; Boucheron, Lugosi, Massart, *Concentration
inequalities*, 2013, Thm 2.10). No smaller bound holds for all data: gradients of records that all say the
same lie in one direction, and that may lie in one block.

*From above.* Stochastic rounding adds r with mean 0, given s + N, in an interval of length 1: a variance
proxy of 1/4 (Hoeffding), so one coordinate of w − s/2^shift has the proxy τ² = P·steps/4^shift + 1/4, without
the 1/4 if shift is 0. Saturation only brings values nearer to 0. For one step s does not depend on N. With g
standard normal, e^(u·a²) = E e^(√(2u)·g·a), so a coordinate with signal μ has
E e^(u·w²) ≤ (1−2uτ²)^−½·e^(uμ²/(1−2uτ²)): that of Gaussian noise. The bound on a non-central χ² (Birgé 2001,
Lemma 8.1, which rests on that function alone; with no signal Laurent and Massart 2000, Lemma 1) follows for
S = ‖s‖/2^shift:

    ‖w‖² ≤ mτ² + S² + 2τ·√((mτ² + 2S²)·x) + 2τ²x.

With several steps, later signals depend on earlier noise, and can point where it points. Then ‖w‖ is at most
S plus the bound on the noise alone.

*From below.* For any even function that rises with |v|, its piecewise linear interpolation at the wire's
units is another, and has its least mean over v = s + N at s = 0, as N is symmetric and unimodal. So every
|w_j|, rounded and saturated, is stochastically least without a signal. With several steps, all that comes
before the last noise is such a signal: the noise of one step remains in any case. Then E w² ≥ V/4^shift, and
E w⁴ ≤ M/16^shift + 6·P/4^(shift+1) + 4√(P/4^shift)/10 + 1/12 by the moments of r, given the distance f from
the unit below: f(1−f) ≤ 1/4, f(1−f)|1−2f| < 1/10, f(1−f)(1−3f(1−f)) ≤ 1/12. Saturation at B takes at most
4τ²e^(−B²/2τ²) off the mean. A sum of m independent non-negative variables falls below its mean by more than
√(2x·m·E w⁴) with probability at most e^−x (Maurer, *A bound on the deviation probability for sums of
non-negative random variables*, JIPAM 4(1), 2003).

*A cap on the device* replaces the noisy sum by one within a ball, and rounds it: S is then the ball's radius
and √m/2 for rounding to the grid, τ² = 1/4, and nothing is known from below.

The sampler's distance from its ideal (2·10⁻³² for a whole update of 26,010 values) adds to the probabilities;
it is nothing beside them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import require_between, require_count, require_positive
from dpagent.privacy.mechanisms.wire import WireForm

_ROUNDING_PROXY: Final = 0.25


@dataclass(frozen=True, slots=True)
class NoiseLaw:
    """What is known of one step's noise on one coordinate, which is symmetric and unimodal. Public.

    Attributes:
        proxy: P, a variance proxy of its moment generating function, in grid units squared.
        variance: V, at most its variance, in grid units squared.
        fourth_moment: M, at least its fourth moment, in grid units to the fourth.
    """

    proxy: float
    variance: float
    fourth_moment: float


@dataclass(frozen=True, slots=True)
class NormRange:
    """The squared L2 norms of honest fragments, in wire units squared. Public.

    Attributes:
        least: of the range.
        most: of the range.
    """

    least: float
    most: float

    def holds(self, values: NDArray[np.int64]) -> bool:
        """Whether a fragment's coordinates, without padding, have such a norm."""
        exact = values.astype(np.float64)
        return bool(self.least <= float(exact @ exact) <= self.most)


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
    x = _log_inverse(tail)
    return expected + math.sqrt(2 * expected * (1 - rate) * x) + (1 - rate) * x / 3


def noisy_norms(
    law: NoiseLaw, form: WireForm, *, coordinates: int, steps: int, signal_units: float, tail: float
) -> NormRange:
    """The range that a fragment of a noisy sum leaves with probability at most ``tail``.

    Args:
        law: of the noise.
        form: of the wire.
        coordinates: m, of the block, without padding.
        steps: noisy sums in the update.
        signal_units: bound on the L2 norm of the signal of all steps, in grid units.
        tail: in (0, 1); half of it to each side.
    """
    require_count("coordinates", coordinates)
    require_count("steps", steps)
    x, unit = _log_inverse(tail / 2), float(1 << form.shift)
    rounding = _ROUNDING_PROXY if form.shift else 0.0
    most = _upper(coordinates, law.proxy * steps / unit**2 + rounding, signal_units / unit, x, steps == 1)
    one_step = law.proxy / unit**2
    fourth = law.fourth_moment / unit**4
    if form.shift:
        fourth += 6 * one_step / 4 + 4 * math.sqrt(one_step) / 10 + 1 / 12
    proxy, end = one_step + rounding, 2.0 ** (form.width - 1) - 1
    mean = law.variance / unit**2 - 4 * proxy * math.exp(-(end**2) / (2 * proxy))
    least = coordinates * mean - math.sqrt(2 * x * coordinates * fourth)
    return NormRange(max(0.0, least), most)


def capped_norms(form: WireForm, *, coordinates: int, ball_units: float, tail: float) -> NormRange:
    """The same for a sum that a device has brought into a ball before rounding it.

    Args:
        form: of the wire.
        coordinates: m, of the block, without padding.
        ball_units: radius of the ball, in grid units.
        tail: in (0, 1).
    """
    require_count("coordinates", coordinates)
    signal = (ball_units + math.sqrt(coordinates) / 2) / float(1 << form.shift)
    proxy = _ROUNDING_PROXY if form.shift else 0.0
    return NormRange(0.0, _upper(coordinates, proxy, signal, _log_inverse(tail), True))


def _upper(coordinates: int, proxy: float, signal: float, x: float, is_independent: bool) -> float:
    """The bound from above of the module's text, on the squared norm."""
    noise = coordinates * proxy
    if not is_independent:
        return (signal + math.sqrt(_upper(coordinates, proxy, 0.0, x, True))) ** 2
    deviation = 2 * math.sqrt(proxy * (noise + 2 * signal**2) * x)
    return noise + signal**2 + deviation + 2 * proxy * x


def _log_inverse(tail: float) -> float:
    return -math.log(require_between("tail", tail, 0.0, 1.0, low_open=True, high_open=True))
