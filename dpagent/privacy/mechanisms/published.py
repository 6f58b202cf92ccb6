"""The ``published`` noise cap: Algorithm 1 of Luo, Xu and Guan to the letter. **Not private.**

Luo, Xu, Guan, *Differential privacy budget optimization based on deep learning in IoT* (Chinese
Journal on Internet of Things, 2022). For each parameter w and each round t of T: draw
n = Lap(Δ/ε_t). If |n| is below |γ·w|, step with g + n, and ε_t is used up. Otherwise step with
g + γ·w, count as used up the ε′ with γ·w = Lap(Δ/ε′), and restart the schedule of the remainder,
ε_{t+1} = ε_rem/(T−t) − (T−t−1)·d/2.

**It guarantees nothing.** In the second branch g is recovered exactly: everyone who sees the model
knows γ·w. ε′ belongs to one value, and privacy to the distribution. Δ is that of a coordinate, and
the whole vector is released. It is here to reproduce the paper's figures and for nothing else: it
has to be asked for by ``allow_unproven=True``, on the coordinator and on every device. Its event is a
:class:`~dpagent.privacy.events.NonPrivateEvent`, so that its ε is infinite, in every ledger and report.

The paper leaves these points open; we decided:

- *ε′*: n at another scale. With n = (Δ/ε_t)·z, z a standard Laplace draw, it is Δ|z|/|γ·w|: the
  ε at which the same draw would have been γ·w. It is never below ε_t.
- *Each parameter has a schedule of its own*, because each takes its own branches.
- *The remainder can run out*, as nothing keeps ε′ below it. A schedule that has come to 0 or less
  means infinite noise, and so the second branch. How many have come to that is reported.
- The step d has the corrected bound 2ε/(T(T−1)), see :mod:`dpagent.privacy.schedules`.
- z is a discrete Laplace draw of scale 2²⁰ over 2²⁰: even so, no floating-point generator.
- *g* is the clipped sum over a Poisson lot by the lot's expected size, and leaves on the grid of the wire,
  which rounds it.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, PlanError, require_between, require_count, require_positive
from dpagent.privacy.events import Event, NonPrivateEvent
from dpagent.privacy.mechanisms.discretised_laplace import RESOLUTION, LaplaceNoise
from dpagent.privacy.mechanisms.mechanism import Parameter, PlannedMechanism
from dpagent.privacy.noise.discrete_laplace import DiscreteLaplaceSampler
from dpagent.privacy.noise.entropy import Entropy
from dpagent.privacy.schedules import MAX_ROUNDS
from dpagent.privacy.statement import BudgetStatement

GUARANTEE: Final = "none"
NOT_PRIVATE: Final = "Algorithm 1 of Luo, Xu and Guan is not differentially private."

_UNIT_SCALE: Final = 2.0**20
_MAX_EPSILON: Final = 1000.0


@dataclass(frozen=True, slots=True)
class PublishedLaplace(LaplaceNoise, PlannedMechanism):
    """A round of Algorithm 1, as plans and ledgers name it. **Not private.**

    Its attributes are those of :class:`~dpagent.privacy.mechanisms.discretised_laplace.LaplaceNoise`, with
    the noise of a parameter whose noise was never replaced. :class:`PublishedCap` draws it.
    """

    name: ClassVar[str] = "published-laplace"
    is_private: ClassVar[bool] = False
    deviation_per_multiplier: ClassVar[float] = math.sqrt(2)
    parameters: ClassVar[tuple[Parameter, ...]] = (RESOLUTION,)

    @property
    def event(self) -> Event:
        """That nothing is proven."""
        return NonPrivateEvent()

    def round_cost(self, delta: float) -> tuple[float, float]:
        """(∞, 0)."""
        return math.inf, 0.0

    def require_noise_as_priced(self, rounds: int, job_epsilon: float, delta: float) -> None:
        """It has no price that noise could miss."""

    def statement(self, delta: float = 0.0) -> BudgetStatement:
        """That nothing is guaranteed."""
        return self.job_statement(math.inf, delta)

    @classmethod
    def job_statement(cls, epsilon: float, delta: float, *assumptions: str) -> BudgetStatement:
        """That nothing is guaranteed, whatever ε the algorithm counts."""
        return BudgetStatement(
            cls.unit, cls.adjacency, cls.trust, cls.name, math.inf, 1.0, (NOT_PRIVATE, *assumptions)
        )

    @property
    def statistical_distance(self) -> float:
        """0: there is no ideal that the noise would be distant from."""
        return 0.0

    @property
    def deviation_units(self) -> float:
        """Of noise that is not replaced, in grid units: λ√2."""
        return self.scale_units * math.sqrt(2)

    @property
    def wire_step(self) -> int:
        """1: the noise may be far below that of :attr:`deviation_units`."""
        return 1

    def wire_bits(self, expected_lot: float) -> float:
        """The most that the wire has room for, since what replaces noise has any size."""
        return math.inf

    def sampler(self, *, entropy: Entropy = os.urandom) -> DiscreteLaplaceSampler:
        """Of the draws z, in 2²⁰ths."""
        return DiscreteLaplaceSampler(_UNIT_SCALE, entropy=entropy)


@dataclass(frozen=True, slots=True, eq=False)
class PublishedState:
    """Where the parameters' schedules are after some rounds.

    Attributes:
        rounds_done: number of rounds so far.
        remainder: the algorithm's own count of each parameter's remaining ε, shape (d,).
    """

    rounds_done: int
    remainder: NDArray[np.float64]
    guarantee: ClassVar[str] = GUARANTEE


@dataclass(frozen=True, slots=True, eq=False)
class PublishedStep:
    """The step of a round. **Not private**: where ``capped``, the gradient can be read off.

    Attributes:
        gradient: g + n or g + γ·w, shape (d,), float64.
        capped: which coordinates took the second branch, shape (d,).
        overspent: number of parameters whose schedule has nothing left.
        state: for the next round.
    """

    gradient: NDArray[np.float64]
    capped: NDArray[np.bool_]
    overspent: int
    state: PublishedState
    guarantee: ClassVar[str] = GUARANTEE


@dataclass(frozen=True, slots=True)
class PublishedCap:
    """Algorithm 1 with its parameters. **Not private**, and refused unless that is accepted.

    Attributes:
        epsilon: the paper's total budget, in (0, 1000].
        rounds: T, in [1, 1,000,000].
        step: d, the rise of ε a round, in [0, 2ε/(T(T−1))].
        sensitivity: Δ of one coordinate, as the paper takes it, above 0.
        regularisation: γ, above 0: the derivative of the L2 penalty is γ·w.
        allow_unproven: has to be True.

    Raises:
        PlanError: ``allow_unproven`` is not True.
        ParameterError: another attribute is out of its range.
    """

    guarantee: ClassVar[str] = GUARANTEE

    epsilon: float
    rounds: int
    step: float
    sensitivity: float
    regularisation: float
    allow_unproven: bool = False

    def __post_init__(self) -> None:
        if self.allow_unproven is not True:
            raise PlanError(
                "The published cap (Algorithm 1 of Luo, Xu and Guan) guarantees no privacy: it releases "
                "exact gradients wherever it acts. Use the clamp or bounded cap; only to reproduce the "
                "paper on data that are not private, set allow_unproven: true."
            )
        require_positive("epsilon", self.epsilon, maximum=_MAX_EPSILON)
        require_count("rounds", self.rounds, maximum=MAX_ROUNDS)
        pairs = self.rounds * (self.rounds - 1)
        require_between("step", self.step, 0.0, 2 * self.epsilon / pairs if pairs else 0.0)
        require_positive("sensitivity", self.sensitivity)
        require_positive("regularisation", self.regularisation)

    def start(self, dimension: int) -> PublishedState:
        """Before the first round of a model of ``dimension`` parameters."""
        require_count("dimension", dimension)
        return PublishedState(0, np.full(dimension, float(self.epsilon)))

    def scheduled(self, state: PublishedState) -> NDArray[np.float64]:
        """ε_t of the coming round for each parameter, shape (d,); may be negative.

        The published restart; where nothing was capped, it is the step before plus d.

        Raises:
            ParameterError: there is no round left.
        """
        left = self.rounds - state.rounds_done
        if left < 1:
            raise ParameterError(f"rounds are {self.rounds}; expected a state with a round left.")
        return np.asarray(state.remainder / left - (left - 1) * self.step / 2)

    def noisy_step(
        self,
        gradient: NDArray[np.floating[Any]],
        weights: NDArray[np.floating[Any]],
        state: PublishedState,
        *,
        entropy: Entropy = os.urandom,
    ) -> PublishedStep:
        """One round of Algorithm 1 on a clipped mean gradient. **Not private.**

        Args:
            gradient: g, shape (d,).
            weights: w, public, shape (d,).
            state: after the round before.
            entropy: gives n uniform bytes for an argument n; to be replaced in tests only.

        Raises:
            ParameterError: shapes differ, an entry is not finite, or no round is left.
        """
        epsilon = self.scheduled(state)
        for name, vector in (("gradient", gradient), ("weights", weights)):
            if vector.shape != epsilon.shape or not np.isfinite(vector).all():
                raise ParameterError(
                    f"{name} has shape {vector.shape}; expected {epsilon.size} finite numbers."
                )
        funded = epsilon > 0
        draws = DiscreteLaplaceSampler(_UNIT_SCALE, entropy=entropy).sample(epsilon.size) / _UNIT_SCALE
        pull = self.regularisation * weights.astype(np.float64)
        noise = np.full(epsilon.shape, np.inf)
        used = np.full(epsilon.shape, np.inf)  # no ε makes noise 0, where a weight is 0
        with np.errstate(over="ignore"):  # infinite noise and infinite ε′ are intended
            np.divide(self.sensitivity * draws, epsilon, out=noise, where=funded)
            np.divide(self.sensitivity * np.abs(draws), np.abs(pull), out=used, where=pull != 0)
        capped = np.abs(noise) >= np.abs(pull)
        noise[capped] = pull[capped]
        used[~capped] = epsilon[~capped]
        return PublishedStep(
            gradient=gradient.astype(np.float64) + noise,
            capped=capped,
            overspent=int(np.count_nonzero(~funded)),
            state=PublishedState(state.rounds_done + 1, state.remainder - used),
        )
