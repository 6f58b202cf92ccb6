"""How a job's privacy budget is spread over its rounds.

The budget that is spread is the zCDP parameter ρ (Bun and Steinke, 2016), in which Gaussian
noise composes by addition: a round that gets the share ρ_t has the noise multiplier
σ_t ∝ 1/√ρ_t. :mod:`dpagent.privacy.calibration` solves for the one factor left over.

Sources: ``incrementing`` is Luo, Xu and Guan, *Differential privacy budget optimization based
on deep learning in IoT* (2022); ``linear`` is the "pri-enhanced" schedule of Gong, Feng and
Xie (2020), from a least to a greatest budget; ``uniform`` splits evenly (Wang, 2019).

Departures from Luo, Xu and Guan, whose formulas carry two errors:

- their closed form for ε_t has the sign of the step reversed, so it falls with t. The rising
  schedule of their own recursion is ``ε_t = ε/T + (t − (T+1)/2)·d``;
- they bound the step by ``2/(T(T−1))``, which is right for ε = 1 only. The first round stays
  non-negative for ``0 ≤ d ≤ 2ε/(T(T−1))``;

and which spread a pure-ε budget; here ρ takes the place of ε, because the noise is Gaussian.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, require_between, require_count

ScheduleKind = Literal["uniform", "incrementing", "linear"]

MAX_ROUNDS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Schedule:
    """A rule that gives every round its share of the budget. Public; holds no data.

    Attributes:
        kind: ``uniform`` (equal shares), ``incrementing`` (shares rise by a fixed step, centred
            on the equal share) or ``linear`` (from a least to a greatest share, given by their
            ratio). The last two are both arithmetic progressions, parametrised differently.
        step: ``incrementing`` only: the step as a fraction, in [0, 0.99], of its greatest
            allowed value 2ρ/(T(T−1)). The last share is (1+step)/(1−step) times the first; at
            1 the first round would have no budget at all.
        ratio: ``linear`` only: the last round's share over the first's, in [1, 100].

    Raises:
        ParameterError: an attribute is out of its range (all are checked, whatever the kind).
    """

    kind: ScheduleKind = "incrementing"
    step: float = 0.3
    ratio: float = 3.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScheduleKind):
            raise ParameterError(
                f"schedule kind is {self.kind!r}; expected one of {', '.join(get_args(ScheduleKind))}."
            )
        require_between("schedule step", self.step, 0.0, 0.99)
        require_between("schedule ratio", self.ratio, 1.0, 100.0)

    def shares(self, rounds: int) -> NDArray[np.float64]:
        """Each round's share of the total ρ: shape (rounds,), positive, sum 1, never falling.

        Raises:
            ParameterError: ``rounds`` is not a whole number in [1, 1,000,000].
        """
        require_count("rounds", rounds, maximum=MAX_ROUNDS)
        if rounds == 1:
            return np.ones(1)
        # An arithmetic progression around the equal share is 1 + slope·position, with the
        # position running from −1 to 1. With ρ = 1 the step d = step·2/(T(T−1)) times
        # t − (T+1)/2 = position·(T−1)/2 is step·position/T: the slope is the step itself.
        position = np.linspace(-1.0, 1.0, rounds)
        slope = {
            "uniform": 0.0,
            "incrementing": self.step,
            "linear": (self.ratio - 1.0) / (self.ratio + 1.0),
        }[self.kind]
        weights = 1.0 + slope * position
        return np.asarray(weights / weights.sum(), dtype=np.float64)
