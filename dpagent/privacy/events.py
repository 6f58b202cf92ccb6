"""What accountants consume: records that state what was released, and nothing of how.

A record fully determines the cost of what it describes. The meaning of a record, once written to
a ledger, never changes; a mechanism that costs something else gets a record of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dpagent.errors import require_between, require_count

#: Noise multipliers that accountants take: within them, nothing overflows.
SIGMA_RANGE: Final = (1e-6, 1e12)
_MAX_EPSILON: Final = 1000.0
#: Steps that are exact in double precision.
MAX_STEPS: Final = 2**53


@dataclass(frozen=True, slots=True)
class PrivacyLossEvent:
    """One charge: ``steps`` compositions of the Poisson-subsampled discrete Gaussian.

    Rényi accounting prices it whatever the grid; the tight accountant where the noise's parameter is at
    least :data:`~dpagent.privacy.accounting.gaussian_loss.MIN_SIGMA_STEPS` grid steps. Whoever charges sees
    to that.

    Attributes:
        noise_multiplier: σ, the noise's parameter over the L2 sensitivity, in [1e-6, 1e12].
        sampling_rate: probability with which each record enters the lot, in (0, 1].
        steps: number of compositions, in [1, 2⁵³], each with a fresh lot and fresh noise.

    Raises:
        ParameterError: an attribute is out of its range.
    """

    noise_multiplier: float
    sampling_rate: float
    steps: int = 1

    def __post_init__(self) -> None:
        require_between("noise multiplier", self.noise_multiplier, *SIGMA_RANGE)
        require_between("sampling rate", self.sampling_rate, 0.0, 1.0, low_open=True)
        require_count("steps", self.steps, maximum=MAX_STEPS)


@dataclass(frozen=True, slots=True)
class ApproximateEvent:
    """One charge: ``steps`` compositions of any mechanism known to be (ε, δ)-DP, after sampling.

    Attributes:
        epsilon: ε of one composition, amplification by sampling included, in [0, 1000].
        delta: δ of one composition, likewise, in [0, 1); 0 for a pure mechanism.
        steps: number of compositions, in [1, 2⁵³].

    Raises:
        ParameterError: an attribute is out of its range.
    """

    epsilon: float
    delta: float = 0.0
    steps: int = 1

    def __post_init__(self) -> None:
        require_between("epsilon", self.epsilon, 0.0, _MAX_EPSILON)
        require_between("delta", self.delta, 0.0, 1.0, high_open=True)
        require_count("steps", self.steps, maximum=MAX_STEPS)
