"""Clipping of a device's whole update, and one more number by which the clip norm follows a quantile.

After Andrew, Thakkar, McMahan, Ramaswamy, "Differentially Private Learning with Adaptive Clipping" (NeurIPS
2021). The change x of a device's weights is clipped to C in the norm of the noise, L1 or L2. Without a count,
that is what the device sends. With a count of weight w, it sends one number more, its *vote*

    v = w·C·(b − 1/2),    b = 1 if ‖x‖ ≤ C, else 0,

and a device whose weights did not change (one without records) votes 0. So |v| ≤ wC/2, whatever the records
are, and behind clipping

    ‖(x, v)‖₂ ≤ C·√(1 + w²/4),    ‖(x, v)‖₁ ≤ C·(1 + w/2).

This is the *radius* R. Zeros in place of a device's numbers (zero-out, see
:mod:`dpagent.privacy.mechanisms.central`) change their sum by R at the most, and the count by half a vote. A
mechanism with the clip norm R covers update and vote together, on one grid, at the price of its noise
multiplier z alone. Andrew et al. write the same for Gaussian noise as two mechanisms, with a noise multiplier
z_Δ for updates and a deviation σ_b for the count, z = (z_Δ⁻² + (2σ_b)⁻²)^(−1/2): here z_Δ = z·√(1 + w²/4)
and σ_b = z_Δ/w. For Laplace noise of scale R/ε, updates have ε/(1 + w/2) of ε, and votes the rest.

The noise is proportional to R, and R to C. So a round costs the same at every C: devices accept a norm that
changes from round to round, and charge the same. The next C is a function of noisy sums alone
(:func:`~dpagent.privacy.clipping.adapted_norm`), and costs nothing.

A departure: the paper divides the count by the number of devices that came. Here the divisor is public and
fixed, as it is for the updates, so each expected device that is missing counts as half a vote.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import require_between, require_count
from dpagent.norm import Norm
from dpagent.privacy.ranges import MAX_NORM, MIN_NORM

COUNT_WEIGHT: Final = 0.5
"""w where the quantile is wanted."""


@dataclass(frozen=True, slots=True)
class UpdateClipping:
    """How an update is clipped and laid out. Public.

    Attributes:
        norm: of the noise.
        clip_norm: C, in [1e-9, 1e6].
        parameters: d, weights of the model.
        count_weight: w in (0, 1], or 0 without a vote.

    Raises:
        ParameterError: an attribute is out of its range.

    >>> clipping = UpdateClipping(Norm.L2, clip_norm=1.0, parameters=2, count_weight=0.5)
    >>> clipping.clip(np.array([0.5, 0.5])), clipping.clip(np.array([3.0, 4.0]))
    (array([0.5 , 0.5 , 0.25]), array([ 0.6 ,  0.8 , -0.25]))
    """

    norm: Norm
    clip_norm: float
    parameters: int
    count_weight: float = 0.0

    def __post_init__(self) -> None:
        require_between("clip norm", self.clip_norm, MIN_NORM, MAX_NORM)
        require_count("parameters", self.parameters)
        require_between("count weight", self.count_weight, 0.0, 1.0)

    @property
    def dimension(self) -> int:
        """Numbers that a device sends: one for each weight, and its vote if there is one."""
        return self.parameters + (self.count_weight > 0)

    @property
    def radius(self) -> float:
        """R: bound on the norm of what a device sends, the mechanism's clip norm."""
        vote = self.count_weight / 2
        return self.clip_norm * (math.hypot(1.0, vote) if self.norm is Norm.L2 else 1.0 + vote)

    @property
    def largest_vote(self) -> float:
        """wC/2."""
        return self.count_weight * self.clip_norm / 2

    def clip(self, change: NDArray[np.float64]) -> NDArray[np.float64]:
        """What a device sends, (dimension,), before it is brought onto the grid. Private.

        Args:
            change: of its weights, (parameters,), finite.
        """
        size = float(np.linalg.norm(change, 2 if self.norm is Norm.L2 else 1))
        clipped = change / max(1.0, size / self.clip_norm)
        if not self.count_weight:
            return clipped
        vote = math.copysign(self.largest_vote, self.clip_norm - size) * (size > 0)
        return np.append(clipped, vote)

    def share_within(self, mean: float) -> float:
        """β: the estimated share of devices within C, from the last coordinate of the noisy mean."""
        return 0.5 + mean / (2 * self.largest_vote)
