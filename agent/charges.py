"""The entries of a ledger as records: lifetime budgets, charges for rounds, and write-offs."""

from __future__ import annotations

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer

from agent.columns import scope_of
from dpagent.errors import ParameterError
from dpagent.privacy.accounting.accountant import Accountant, AccountantName
from dpagent.privacy.accounting.choice import accountant_named
from dpagent.privacy.events import Event
from dpagent.privacy.mechanisms.mechanism import JOB_ASSUMPTIONS, Mechanism, PlannedMechanism, Query
from dpagent.privacy.mechanisms.registry import mechanism_named
from dpagent.privacy.mechanisms.two_point_rounds import TwoPointRound
from dpagent.privacy.statement import BudgetStatement
from dpagent.protocol.codec import encode
from dpagent.protocol.messages import Plan
from dpagent.protocol.task import RoundTask

_TOLERANCE: Final = 1e-6
"""A recomputed figure may differ from the stated one by rounding, at most by this."""
_DIGEST: Final = re.compile("[0-9a-f]{64}")


def _or_infinite(value: Any) -> Any:
    return math.inf if value is None else value


Epsilon: TypeAlias = Annotated[
    float,
    Field(ge=0, allow_inf_nan=True),
    BeforeValidator(_or_infinite),
    PlainSerializer(lambda value: value if math.isfinite(value) else None, when_used="json"),
]
"""An ε of a ledger. Of rounds that guarantee nothing it is infinite, which is null in JSON."""

#: How the records of a ledger, and of its heads, are read from JSON.
STRICT: Final = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Budget:
    """An ε and a δ."""

    epsilon: float
    delta: float


@dataclass(frozen=True, slots=True)
class BudgetChange:
    """The integrator set the lifetime budget of a dataset, or of its jobs that trust a party."""

    __pydantic_config__ = STRICT

    dataset: str
    """Name of the account; see :mod:`agent.columns`."""
    epsilon: float
    delta: float


@dataclass(frozen=True, slots=True)
class WriteOff:
    """The ledger was restored from a backup: what its missing entries reserved, or may have reserved.

    It ends all jobs on the dataset: a round that seems new to the backup may have been taken already.
    """

    __pydantic_config__ = STRICT

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
class Price:
    """The price of one guarantee of a round."""

    account: str
    """That pays it; see :mod:`agent.columns`."""
    mechanism: PlannedMechanism | TwoPointRound
    """That gives the guarantee."""
    job_epsilon: float
    """ε reserved for the whole job."""
    cumulative_epsilon: float
    """The ε reserved by other jobs plus the ε spent by this one, including this round."""
    cumulative_delta: float
    accountant: AccountantName
    """The accountant that prices the job; see :class:`Charge`."""
    loss_grid: float | None
    """Its loss grid; see :class:`Charge`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge(ABC):
    """One round, with everything an auditor needs to price it again. A subclass for each kind of release."""

    __pydantic_config__ = STRICT

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

    @abstractmethod
    def rebuilt(self) -> Mechanism:
        """The charged mechanism.

        Raises:
            ParameterError: no mechanism has that name, or such parameters.
        """

    def require_derived_values(self) -> None:
        """Check the figures that follow from the others.

        Raises:
            ParameterError: one is wrong.
        """
        if not _DIGEST.fullmatch(self.plan):
            raise ParameterError(f"plan is {self.plan!r}; expected a SHA-256 in 64 hexadecimal digits.")
        computed = self.rebuilt().statistical_distance
        _require_stated("statistical distance", self.statistical_distance, computed)

    @property
    def event(self) -> Event:
        """The event that the accountant prices."""
        return self.rebuilt().event

    def empty_account(self) -> Accountant:
        """An empty account of the kind that prices the charge's job.

        Raises:
            ParameterError: the accountant does not accept the grid.
        """
        return accountant_named(self.accountant, grid=self.loss_grid)


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

    def rebuilt(self) -> PlannedMechanism:
        """See :class:`Charge`."""
        query = Query(self.clip_norm, self.accumulation_slack, self.dimension, self.sampling_rate, self.steps)
        return mechanism_named(self.mechanism).build(query, self.noise_multiplier, self.parameters)

    def require_derived_values(self) -> None:
        """See :class:`Charge`."""
        Charge.require_derived_values(self)
        _require_stated("granularity", self.granularity, self.rebuilt().granularity)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportCharge(Charge):
    """A round that released two-point reports."""

    coordinates: int
    """Bits that the device sent."""

    def rebuilt(self) -> TwoPointRound:
        """See :class:`Charge`."""
        if self.mechanism != TwoPointRound.name:
            raise ParameterError(f"mechanism is {self.mechanism!r}; expected {TwoPointRound.name}.")
        return TwoPointRound(self.noise_multiplier, self.coordinates, self.dimension)


def digest_of(plan: Plan) -> bytes:
    """SHA-256 of a plan but for its deadline, which the coordinator puts off, and which nothing is charged
    for."""
    return hashlib.sha256(encode(plan.model_copy(update={"deadline": 0.0}))).digest()


def charge_of(task: RoundTask, price: Price, *, charged_at: str) -> Charge:
    """The charge of a price for an admitted round."""
    mechanism = price.mechanism
    common: dict[str, Any] = {
        "dataset": price.account,
        "job": task.plan.job.hex(),
        "round": task.plan.round,
        "mechanism": mechanism.name,
        "noise_multiplier": mechanism.noise_multiplier,
        "dimension": mechanism.dimension,
        "statistical_distance": mechanism.statistical_distance,
        "plan": digest_of(task.plan).hex(),
        "schedule": task.schedule_digest,
        "delta": task.plan.delta,
        "charged_at": charged_at,
        "job_epsilon": price.job_epsilon,
        "cumulative_epsilon": price.cumulative_epsilon,
        "cumulative_delta": price.cumulative_delta,
        "accountant": price.accountant,
        "loss_grid": price.loss_grid,
    }
    match mechanism:
        case PlannedMechanism():
            return SumCharge(
                **common,
                parameters=mechanism.announced,
                clip_norm=mechanism.clip_norm,
                accumulation_slack=mechanism.accumulation_slack,
                sampling_rate=mechanism.sampling_rate,
                steps=mechanism.steps,
                granularity=mechanism.granularity,
            )
        case TwoPointRound():
            return ReportCharge(**common, coordinates=mechanism.coordinates)


Record = Charge | BudgetChange | WriteOff
"""What an entry of a ledger records."""


def _require_stated(name: str, stated: float, computed: float) -> None:
    if not abs(stated - computed) <= _TOLERANCE * computed:
        raise ParameterError(f"{name} is {stated!r}; the charge's parameters give {computed!r}.")


def ledger_statement(
    account: str, reserved: Budget, mechanisms: Iterable[str], *assumptions: str
) -> BudgetStatement:
    """The guarantee for the records of an account, including everything its jobs may still send.

    Args:
        account: its name.
        reserved: sum over the jobs and write-offs.
        mechanisms: names of the charged mechanisms.
        assumptions: in addition to those of every job.
    """
    names = " + ".join(dict.fromkeys(mechanisms)) or "nothing released"
    return BudgetStatement(
        *scope_of(account), names, reserved.epsilon, reserved.delta, (*JOB_ASSUMPTIONS, *assumptions)
    )
