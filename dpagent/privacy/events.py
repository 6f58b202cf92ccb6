"""Privacy events: records of mechanisms' operations, for accountants to price.

After the events of Google's ``dp_accounting``: an event says the distribution of the noise and how often,
and on which sample, the mechanism runs; events nest as mechanisms do. An event documents its
mechanism completely; an accountant needs to know nothing else of it. Once written to a ledger, the
meaning of an event never changes; a mechanism that costs something else gets an event of its own.

The neighbouring relation of all events is add-or-remove-one: two data sets are neighbours if one of them
has a unit (usually a record) that the other lacks, or for which the other has zeros, which add up to the
same. No event knows its unit; mechanisms state it (:mod:`dpagent.privacy.statement`).

>>> round_ = SelfComposedEvent(PoissonSampledEvent(0.1, GaussianEvent(2.25)), count=3)
>>> round_ == poisson_sampled(GaussianEvent(2.25), 0.1, count=3)
True
>>> ApproximateEvent(epsilon=1.0)
ApproximateEvent(epsilon=1.0, delta=0.0)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from dpagent.errors import ParameterError, require_between, require_count

#: Noise multipliers that accountants price: within them, nothing overflows.
SIGMA_RANGE: Final = (1e-6, 1e12)
#: Largest ε of one event.
MAX_EVENT_EPSILON: Final = 1000.0
#: Largest number of compositions: whole numbers up to here are exact in double precision.
MAX_COUNT: Final = 2**53


@dataclass(frozen=True, slots=True)
class GaussianEvent:
    """The discrete Gaussian mechanism, once: a sum of integer vectors plus discrete Gaussian noise.

    Each unit contributes to the sum an integer vector with an L2 norm of at most Δ; every coordinate of the
    sum gets independent noise N_ℤ(0, σ²Δ²). The prices of continuous Gaussian noise hold as well. Accounting
    by Rényi divergences covers every Δ, accounting by privacy-loss distributions a noise parameter σΔ of at
    least :data:`~dpagent.privacy.accounting.gaussian_loss.MIN_SIGMA_UNITS`, which the mechanism has to
    ensure.

    Attributes:
        noise_multiplier: σ, the noise's parameter over the L2 sensitivity, in [1e-6, 1e12].

    Raises:
        ParameterError: an attribute is out of its range.
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        require_between("noise multiplier", self.noise_multiplier, *SIGMA_RANGE)


@dataclass(frozen=True, slots=True)
class ApproximateEvent:
    """Any mechanism that is (ε, δ)-differentially private, once; ε-DP ("pure") where δ is 0.

    Nothing else is known of the mechanism.

    Attributes:
        epsilon: in [0, 1000].
        delta: in [0, 1).

    Raises:
        ParameterError: an attribute is out of its range.
    """

    epsilon: float
    delta: float = 0.0

    def __post_init__(self) -> None:
        require_between("epsilon", self.epsilon, 0.0, MAX_EVENT_EPSILON)
        require_between("delta", self.delta, 0.0, 1.0, high_open=True)


@dataclass(frozen=True, slots=True)
class NonPrivateEvent:
    """A mechanism that nothing is proven of: (∞, 0)-DP, as any mechanism is."""


@dataclass(frozen=True, slots=True)
class PoissonSampledEvent:
    """An event on a Poisson sample: each unit takes part independently, with the same probability.

    The sample is drawn afresh, is secret, and all of ``event`` runs on it.

    Attributes:
        sampling_rate: q, at least the probability with which a unit takes part, in (0, 1].
        event: runs on the sample.

    Raises:
        ParameterError: an attribute is out of its range.
    """

    sampling_rate: float
    event: Event

    def __post_init__(self) -> None:
        require_between("sampling rate", self.sampling_rate, 0.0, 1.0, low_open=True)
        _require_event(self.event)


@dataclass(frozen=True, slots=True)
class SelfComposedEvent:
    """An event run several times in sequence, each time with fresh randomness.

    Later runs may depend on the outputs of earlier ones; their parameters may not.

    Attributes:
        event: one run.
        count: number of runs, in [1, 2⁵³].

    Raises:
        ParameterError: an attribute is out of its range.
    """

    event: Event
    count: int

    def __post_init__(self) -> None:
        _require_event(self.event)
        require_count("count", self.count, maximum=MAX_COUNT)


Event: TypeAlias = (
    GaussianEvent | ApproximateEvent | NonPrivateEvent | PoissonSampledEvent | SelfComposedEvent
)


def poisson_sampled(event: Event, sampling_rate: float, count: int = 1) -> SelfComposedEvent:
    """``count`` runs of ``event``, each on a Poisson sample of its own.

    Raises:
        ParameterError: an argument is out of its range.
    """
    return SelfComposedEvent(PoissonSampledEvent(sampling_rate, event), count)


def _require_event(event: object) -> None:
    if not isinstance(event, Event):
        raise ParameterError(f"event is {event!r}; expected a privacy event.")
