"""Clipping, of the whole gradient or by layer, and the resulting vector of bounded norm.

A record's gradient is clipped as a whole to a norm C, or layer by layer to norms C_ℓ (McMahan, Ramage,
Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018, section 2.2;
Abadi et al., CCS 2016, section 3.2). Both are one mechanism here. With shares p_ℓ that add up to 1,
layer ℓ is summed as r_ℓ = √p_ℓ·(R/C_ℓ)·g_ℓ, R = √ΣC_ℓ². For a record,

    ‖r‖² = Σ p_ℓ·(R/C_ℓ)²·‖g_ℓ‖² ≤ R²·Σ p_ℓ = R²,

so one Gaussian with sensitivity R covers all layers at the price of one, and layer ℓ gets noise of
σ·C_ℓ/√p_ℓ a coordinate, as separate mechanisms with multipliers σ/√p_ℓ would give, but on one grid.
The noise on the gradient, Σ d_ℓ·C_ℓ²/p_ℓ, is minimal for p_ℓ ∝ C_ℓ·√d_ℓ (Lagrange), which
:meth:`Clipping.layers` uses. One norm for all is the case R = C, where r = g.

*A public quantile* (Andrew, Thakkar, McMahan, Ramaswamy, "Differentially Private Learning with
Adaptive Clipping", NeurIPS 2021). One extra coordinate is w·R·(b − 1/2), where b is 1 for a record
whose norm is at most C and 0 otherwise; so one record adds at most wR/2. The vector's norm is then at
most R·√(1 + w²/4), and the noise grows accordingly: by 0.5 % at w = 0.2. The sum of the coordinate
divided by wR and by the expected lot, plus 1/2, estimates the share β of records within C, with noise of
standard deviation σ·√(1 + w²/4)/w over the lot; :func:`adapted_norm` follows it. The next C
depends only on noisy sums, so it costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, require_between, require_count, require_positive
from dpagent.privacy.ranges import MAX_NORM, MIN_NORM

COUNT_WEIGHT: Final = 0.2
"""w where the quantile is wanted: for half a percent more noise, it is known to 5σ records of a lot."""

_SHARE_TOLERANCE: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Clipping:
    """How gradients are clipped and laid out for one sum. Public.

    Attributes:
        sizes: d_ℓ, coordinates of each layer, in the order of the gradient.
        norms: C_ℓ, in [1e-9, 1e6].
        shares: p_ℓ, in (0, 1], which add up to 1.
        count_weight: w in (0, 1], or 0 without a quantile; only with a single norm.

    Raises:
        ParameterError: an attribute is out of its range, or their lengths differ.
    """

    sizes: tuple[int, ...]
    norms: tuple[float, ...]
    shares: tuple[float, ...]
    count_weight: float = 0.0

    def __post_init__(self) -> None:
        if not len(self.sizes) == len(self.norms) == len(self.shares) >= 1:
            raise ParameterError(
                f"there are {len(self.sizes)} layers, {len(self.norms)} clip norms and {len(self.shares)}"
                " shares; expected one of each for a layer."
            )
        for number, (size, norm, share) in enumerate(zip(self.sizes, self.norms, self.shares, strict=True)):
            require_count(f"size of layer {number}", size)
            name = "clip norm" if len(self.norms) == 1 else f"clip norm of layer {number}"
            require_between(name, norm, MIN_NORM, MAX_NORM)
            require_positive(f"share of layer {number}", share, maximum=1.0)
        if len(self.shares) == 1 and self.shares[0] != 1:
            raise ParameterError(f"the share of the only layer is {self.shares[0]!r}; expected 1.")
        total = math.fsum(self.shares)
        if abs(total - 1) > _SHARE_TOLERANCE:
            raise ParameterError(f"shares of the layers add up to {total!r}; expected 1.")
        require_between("count weight", self.count_weight, 0.0, 1.0)
        if self.count_weight and len(self.norms) > 1:
            raise ParameterError(
                "count weight is above 0 with several clip norms; expected one norm for all."
            )

    @classmethod
    def whole(cls, parameters: int, norm: float, *, count_weight: float = 0.0) -> Clipping:
        """One norm for the whole gradient."""
        return cls((parameters,), (norm,), (1.0,), count_weight)

    @classmethod
    def layers(cls, sizes: Sequence[int], norms: Sequence[float]) -> Clipping:
        """A norm for each layer, with the shares that let the least noise through."""
        # Lengths that differ are named below, with the rest.
        weights = [norm * math.sqrt(size) for size, norm in zip(sizes, norms, strict=False)]
        return cls(tuple(sizes), tuple(norms), tuple(weight / math.fsum(weights) for weight in weights))

    @property
    def parameters(self) -> int:
        """Coordinates of the gradient."""
        return sum(self.sizes)

    @property
    def dimension(self) -> int:
        """Coordinates of the sum: the gradient's, and one more if the clip norm follows a quantile."""
        return self.parameters + (self.count_weight > 0)

    @property
    def reference(self) -> float:
        """R: the norm of a whole gradient all of whose layers reach theirs."""
        return math.hypot(*self.norms)

    @property
    def radius(self) -> float:
        """Bound on the L2 norm of one record's contribution to the sum: the mechanism's clip norm."""
        # Corrects for the rounding error of the shares' sum.
        return self.reference * math.hypot(1.0, self.count_weight / 2) * math.sqrt(math.fsum(self.shares))

    def scaled_sum(self, total: NDArray[np.float64], within: int, counted: int) -> NDArray[np.float64]:
        """The vector that a lot's clipped sum becomes, without noise. Private.

        Args:
            total: Σ of the clipped gradients, shape (parameters,).
            within: of the records in it, how many had a norm of at most C.
            counted: how many records are in it.

        Returns:
            Shape (dimension,): each layer scaled as the module's text says, and the count last.
        """
        scaled = np.empty(self.dimension)
        np.multiply(total, self._repeated(1.0), out=scaled[: self.parameters])
        if self.count_weight:
            scaled[-1] = self.count_weight * self.reference * (within - counted / 2)
        return scaled

    def gradient(self, scaled: NDArray[np.float64]) -> NDArray[np.float64]:
        """The gradient in a scaled sum, or in a mean of them, in its own units, shape (parameters,)."""
        return scaled[: self.parameters] * self._repeated(-1.0)

    def share_within(self, mean: float) -> float:
        """β, the estimated share of records within C, from the last coordinate of the noisy mean."""
        return 0.5 + mean / (self.count_weight * self.reference)

    def _repeated(self, power: float) -> NDArray[np.float64] | float:
        """(√p_ℓ·R/C_ℓ)^power for every coordinate, or 1 where that is all of them."""
        if len(self.sizes) == 1:
            return 1.0
        scales = [
            (math.sqrt(share) * self.reference / norm) ** power
            for norm, share in zip(self.norms, self.shares, strict=True)
        ]
        return np.repeat(scales, self.sizes)


def adapted_norm(
    norm: float,
    share_within: float,
    *,
    quantile: float,
    rate: float,
    bounds: tuple[float, float] = (MIN_NORM, MAX_NORM),
) -> float:
    """The next clip norm: C·exp(−η·(β − γ)), the geometric step of Andrew et al., algorithm 1.

    Args:
        norm: C, in [1e-9, 1e6].
        share_within: β as estimated; noise may take it out of [0, 1], so it is brought back.
        quantile: γ in [0, 1], the share of records that should be within C.
        rate: η, above 0; 0.2 in the paper.
        bounds: least and greatest norm, by default those of a plan. Whatever the counts say, and whoever
            sent them, the norm stays between them.

    Raises:
        ParameterError: a value is out of its range.
    """
    require_between("clip norm", norm, MIN_NORM, MAX_NORM)
    require_between("quantile", quantile, 0.0, 1.0)
    require_positive("rate", rate)
    off = min(max(share_within, 0.0), 1.0) - quantile
    least, most = bounds
    return min(max(norm * math.exp(-rate * off), least), most)
