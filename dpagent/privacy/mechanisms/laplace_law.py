"""The L1 norm of an honest fragment whose noise is discrete Laplace.

It is used as in :mod:`dpagent.privacy.mechanisms.honest_norms` ("there"). Laplace noise has no variance
proxy, so its squares have tails too heavy for a bound on ‖w‖₂ to be narrow. In L1 its tails are those of a
gamma distribution, and L1 is the norm in which records are clipped: ‖s‖₁ ≤ Δ·L for the quantized sums s of L
records, so a bound on ‖w‖₁ limits the pull in clip norms. (A bound R on ‖w‖₂ would limit it to √m·R, for
values that are all alike.) Below, λ is the noise's scale in grid units, a = step/λ, ρ = e^(−a), c =
1/cosh(1/2λ), m the coordinates of the block, and every tail is at most e^−x.

*The law.* X has P(X ≥ k) = P(X ≤ −k) = c·e^(−(k − 1/2)/λ)/2 for k ≥ 1. Rounded to the nearest multiple of an
odd step, in wire units, it is G·sign with P(G ≥ k) = c·ρ^(k − 1/2), hence E e^(tG) = 1 + c·K(t) for t < a,
negative t too, with

    K(t) = (e^t − 1)·ρ^½/(1 − ρe^t).

*From above, one step.* For a ≤ ln 2, E e^(t|w|) ≤ e^(t|s|)·(1 + K(t)) for a coordinate with any signal s (in
wire units), 0 < t < a. Let n be the whole number nearest to |s|, and c = 1, which only makes the expectations
greater: in each sum below the tails of one side have the factor c, and a coefficient that is not negative.

- |s| = n + h, 0 ≤ h < 1/2: |w| ≤ n + |round(h + N)|, and e^(−th)·E e^(t·|round(h + N)|) = e^(−th)·(1 +
  K·cosh(ah)), a sum of exponentials in h with positive factors.
- |s| = n − h, n ≥ 1: |w| ≤ n − 1 + |1 + round(N − h)|, and e^(−t(1−h))·E e^(t·|1 + round(N − h)|) = e^(th) +
  (K/2)·(e^(−(a−t)h) + e^((a+t)h)·(ρ − e^(−t)(1 − ρ))). The last factor is not negative as ρ ≥ 1/2.

Both are convex in h, so greatest at 0 or 1/2. At 0 they are 1 + K, and at most that. At 1/2 both are
cosh(t/2)·(1 − ρ)/(1 − ρe^t); with u = e^(t/2) and v = e^(a/2), that is at most 1 + K as long as v·(u − 1) ≤
2u² + u + 1, and v ≤ √2. The bound on the block follows (Chernoff): for every such t,

    ‖w‖₁ ≤ S + (m·ln(1 + K(t)) + x)/t,  S = ‖s‖₁ in wire units.

*From above, several steps.* Later signals can follow earlier noise, so ‖w‖₁ ≤ S + m/2 + ‖N₁ + … + N_n‖₁ (m/2
for rounding). X is B·round(Y) for continuous Laplace Y and an independent B that is 1 with probability c,
else 0. To leave terms of mean 0 out of a sum does not increase the expectation of a convex function, so E
e^(t|ΣX|) ≤ e^(tn/2)·E e^(t|ΣY|), with n/2 in grid units. And |ΣY|/λ is a mixture of gamma variables of shape
k = 1 … n, with weights 2·C(2n−1−k, n−k)/2^(2n−k) (Kotz, Kozubowski, Podgórski, *The Laplace distribution and
generalizations*, 2001, sec. 2.3), so E e^(t|ΣY|) = Σ_k weight_k·(1 − λt)^(−k).

*From below.* As there: |w| is stochastically least without signal, and the noise of one step remains in any
case. So ‖w‖₁ ≥ −(m·ln(1 + c·K(−t)) + x)/t for every t > 0.

*A level k > 0* rounds |w| at random to a multiple of 2^k, and never across 0: ‖w‖₁ gains a sum of m terms of
mean 0, given w, in intervals of length 2^k. That adds m·t²·4^k/8 to both logarithms (Hoeffding's lemma).

*Noise that is not drawn beyond A* has the law of X given |X| ≤ A: then no expectation above is more than
1/P(|X| ≤ A) times as large, for each noise. Bounds that can be paid for leave out little: 2δ/(e^ε − 1).

Every t gives a bound; the best of some thousand is taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import require_count
from dpagent.norm import Norm
from dpagent.privacy.mechanisms.honest_norms import NoiseLaw, NormRange, log_inverse

_TILTS: Final = np.geomspace(1e-12, 100.0, 1_500)
"""λt, in wire units."""
_FINE: Final = math.log(2)
"""The widest step, over the scale, whose rounding has the tighter bound."""


@dataclass(frozen=True, slots=True)
class LaplaceLaw(NoiseLaw):
    """One step's discrete Laplace noise on one coordinate. Public.

    Attributes:
        scale_units: λ, in grid units.
        bound_units: A, beyond which noise is not drawn, in grid units; infinity without one.
    """

    scale_units: float
    bound_units: float = math.inf

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
        """See :meth:`NoiseLaw.norms`: a range of L1 norms, for a bound on the signal's L1 norm."""
        require_count("coordinates", coordinates)
        require_count("steps", steps)
        x, a = log_inverse(tail / 2), step / self.scale_units
        level_term = _TILTS**2 * a**2 * (4.0**level / 8 if level else 0.0)

        below = _TILTS < 1
        t = a * _TILTS[below]
        if steps == 1 and a <= _FINE:
            log_above = np.log1p(_rounded(t, a))
        else:
            nearest = (0.5 if step > 1 else 0.0) + steps / 2 / step
            log_above = t * nearest + _log_of_sum(_TILTS[below], steps)
        above = (coordinates * (log_above + steps * self._log_inside + level_term[below]) + x) / t

        t = a * _TILTS
        log_below = np.log1p(_rounded(-t, a) / math.cosh(1 / (2 * self.scale_units)))
        least = -(coordinates * (log_below + self._log_inside + level_term) + x) / t
        return NormRange(Norm.L1, max(0.0, float(least.max())), signal_units / step + float(above.min()))

    @property
    def _log_inside(self) -> float:
        """−ln P(|X| ≤ A)."""
        beyond = math.exp(-(self.bound_units + 0.5) / self.scale_units)
        return -math.log1p(-beyond / math.cosh(1 / (2 * self.scale_units)))


def _rounded(t: NDArray[np.float64], a: float) -> NDArray[np.float64]:
    """K(t)."""
    # 1 − ρe^t is accurate where t comes close to a.
    return np.asarray(np.expm1(t) * math.exp(-a / 2) / -np.expm1(t - a))


def _log_of_sum(tilts: NDArray[np.float64], steps: int) -> NDArray[np.float64]:
    """ln E e^(t|ΣY|) for tilts λt in (0, 1)."""
    shapes = range(1, steps + 1)
    weights = np.array(
        [math.comb(2 * steps - 1 - k, steps - k) / 2 ** (2 * steps - k - 1) for k in shapes], np.float64
    )
    with np.errstate(over="ignore"):
        excess = np.expm1(-np.log1p(-tilts)[:, np.newaxis] * np.array(shapes))
    return np.asarray(np.log1p(excess @ weights))
