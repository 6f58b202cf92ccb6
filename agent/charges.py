"""The entries of a ledger as records: lifetime budgets, charges for rounds, and write-offs.

What they mean (the mechanism of a charge, its price) is in :mod:`agent.priced_charges`, which needs numpy.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from dpagent.privacy.ranges import AccountantName
from dpagent.protocol.codec import encode
from dpagent.protocol.messages import Plan
from dpagent.schema.limits import Before, Limits


def _or_infinite(value: Any) -> Any:
    return math.inf if value is None else value


Epsilon: TypeAlias = Annotated[float, Limits(ge=0, finite=False), Before(_or_infinite)]
"""An ε of a ledger. Of rounds that guarantee nothing it is infinite, which is null in JSON."""


@dataclass(frozen=True, slots=True)
class Budget:
    """An ε and a δ."""

    epsilon: float
    delta: float


@dataclass(frozen=True, slots=True)
class BudgetChange:
    """The integrator set the lifetime budget of a dataset, or of its jobs that trust a party."""

    dataset: str
    """Name of the account; see :mod:`agent.columns`."""
    epsilon: float
    delta: float


@dataclass(frozen=True, slots=True)
class WriteOff:
    """The ledger was restored from a backup: what its missing entries reserved, or may have reserved.

    It ends all jobs on the dataset: a round that seems new to the backup may have been taken already.
    """

    dataset: str
    epsilon: Epsilon
    delta: float
    cumulative_epsilon: Epsilon
    """Reserved by all jobs and write-offs, including this one."""
    cumulative_delta: float
    is_exact: bool
    """Whether a second head proves the amounts; otherwise they are all that the budget had left."""
    written_at: str


@dataclass(frozen=True, slots=True)
class ChargedSum:
    """All that the price of a round with a noisy sum follows from; see :class:`SumCharge`."""

    mechanism: str
    noise_multiplier: float
    parameters: tuple[tuple[str, int | float], ...]
    clip_norm: float
    accumulation_slack: float | None
    dimension: int
    sampling_rate: float
    steps: int


@dataclass(frozen=True, slots=True)
class ChargedReports:
    """All that the price of a round of reports follows from; see :class:`ReportCharge`."""

    mechanism: str
    noise_multiplier: float
    coordinates: int
    dimension: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge(ABC):
    """One round, with everything an auditor needs to price it again. A subclass for each kind of release."""

    dataset: str
    """Name of the account; see :mod:`agent.columns`."""
    job: str
    round: int
    mechanism: str
    noise_multiplier: float
    dimension: int
    statistical_distance: float
    """Distance of the noise from its ideal distribution."""
    plan: str
    """:func:`digest_of` the round's plan, in hexadecimal: the round is run, and run again, for no other."""
    schedule: str
    """SHA-256 of the job's announced schedule, pinned at its first charge."""
    job_epsilon: Epsilon
    """ε reserved for the whole job, at ``delta``, when it was first charged."""
    delta: float
    """δ of the job."""
    cumulative_epsilon: Epsilon
    """The ε reserved by other jobs plus the ε spent by this one, including this charge."""
    cumulative_delta: float
    """Sum of the δ of all jobs on the dataset."""
    charged_at: str
    accountant: AccountantName
    """The accountant that prices the job, pinned."""
    loss_grid: float | None
    """Step of the grid for composing privacy losses (``pld``), pinned; None for the other accountants."""

    @property
    @abstractmethod
    def charged(self) -> ChargedSum | ChargedReports:
        """All that the price of the round follows from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SumCharge(Charge):
    """A round that released a noisy sum, or an update to whose sum the coordinator adds noise."""

    parameters: dict[str, int | float]
    """The mechanism's other parameters."""
    clip_norm: float
    accumulation_slack: float | None
    """Most that float summation may have added to a record's influence, relative to the clip norm; None where
    what was summed was whole numbers."""
    sampling_rate: float
    steps: int
    granularity: float
    """One grid unit in gradient units."""

    @property
    def charged(self) -> ChargedSum:
        """See :class:`Charge`."""
        return ChargedSum(
            self.mechanism, self.noise_multiplier, tuple(sorted(self.parameters.items())), self.clip_norm,
            self.accumulation_slack, self.dimension, self.sampling_rate, self.steps,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportCharge(Charge):
    """A round that released two-point reports."""

    coordinates: int
    """Bits that the device sent."""

    @property
    def charged(self) -> ChargedReports:
        """See :class:`Charge`."""
        return ChargedReports(self.mechanism, self.noise_multiplier, self.coordinates, self.dimension)


def digest_of(plan: Plan) -> bytes:
    """SHA-256 of a plan but for its deadline, which the coordinator puts off, and which nothing is charged
    for."""
    return hashlib.sha256(encode(plan.with_values({"deadline": 0.0}))).digest()


Record = Charge | BudgetChange | WriteOff
"""What an entry of a ledger records."""
