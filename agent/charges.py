"""The entries of a ledger, as records: a lifetime budget that was set, a round that was charged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from pydantic import ConfigDict

from dpagent.privacy.accounting.accountant import Accountant, AccountantName
from dpagent.privacy.accounting.choice import accountant_named
from dpagent.privacy.events import Event
from dpagent.privacy.mechanisms.mechanism import JOB_ASSUMPTIONS, PlannedMechanism, Query
from dpagent.privacy.mechanisms.registry import mechanism_named
from dpagent.privacy.statement import Adjacency, BudgetStatement, Trust, Unit
from dpagent.protocol.task import RoundTask

#: What every figure of a ledger refers to: only such guarantees are added up in it.
LEDGER_SCOPE: Final = (Unit.RECORD, Adjacency.ADD_OR_REMOVE_ONE, Trust.NONE)

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Budget:
    """An ε and a δ."""

    epsilon: float
    delta: float


@dataclass(frozen=True, slots=True)
class BudgetChange:
    """The integrator set the lifetime budget of a dataset."""

    __pydantic_config__ = _STRICT

    dataset: str
    epsilon: float
    delta: float


@dataclass(frozen=True, slots=True)
class Price:
    """What taking part in a round is charged as."""

    job_epsilon: float
    """ε reserved for the whole job."""
    cumulative_epsilon: float
    """What other jobs reserved plus what this one has spent, this round included."""
    cumulative_delta: float
    accountant: AccountantName
    loss_grid: float | None
    """By which and on which the job is priced; see :class:`Charge`."""


@dataclass(frozen=True, slots=True)
class Charge:
    """One round, with everything an auditor needs to price it again."""

    __pydantic_config__ = _STRICT

    dataset: str
    job: str
    round: int
    mechanism: str
    noise_multiplier: float
    parameters: dict[str, int | float]
    """Of the mechanism, besides."""
    clip_norm: float
    accumulation_slack: float
    """What summing in floating point may have added to a record's influence, relative to the clip norm."""
    dimension: int
    sampling_rate: float
    steps: int
    granularity: float
    """One grid unit in gradient units."""
    statistical_distance: float
    """Of the noise from the ideal."""
    schedule: str
    """SHA-256 of the job's announced schedule, pinned at its first charge."""
    job_epsilon: float
    """ε reserved for the whole job, at ``delta``, when it was first charged."""
    delta: float
    """δ of the job."""
    cumulative_epsilon: float
    """What other jobs reserved plus what this one has spent up to and including this charge."""
    cumulative_delta: float
    """Sum of the δ of all jobs on the dataset."""
    charged_at: str
    accountant: AccountantName
    """What prices the job, pinned."""
    loss_grid: float | None
    """Step of the grid on which privacy losses are composed (``pld``), pinned; None for the others."""

    @classmethod
    def of(cls, task: RoundTask, price: Price, dataset: str, *, charged_at: str) -> Charge:
        """The charge for a round that was admitted."""
        mechanism = task.mechanism
        return cls(
            dataset=dataset,
            job=task.plan.job.hex(),
            round=task.plan.round,
            mechanism=mechanism.name,
            noise_multiplier=mechanism.noise_multiplier,
            parameters=mechanism.announced,
            clip_norm=mechanism.clip_norm,
            accumulation_slack=task.plan.clipping.accumulation_slack,
            dimension=mechanism.dimension,
            sampling_rate=mechanism.sampling_rate,
            steps=mechanism.steps,
            granularity=mechanism.granularity,
            statistical_distance=mechanism.statistical_distance,
            schedule=task.schedule_digest,
            job_epsilon=price.job_epsilon,
            delta=task.plan.delta,
            cumulative_epsilon=price.cumulative_epsilon,
            cumulative_delta=price.cumulative_delta,
            charged_at=charged_at,
            accountant=price.accountant,
            loss_grid=price.loss_grid,
        )

    def rebuilt(self) -> PlannedMechanism:
        """The mechanism that was charged for.

        Raises:
            ParameterError: there is none of that name or with such parameters.
        """
        query = Query(self.clip_norm, self.accumulation_slack, self.dimension, self.sampling_rate, self.steps)
        return mechanism_named(self.mechanism).build(query, self.noise_multiplier, self.parameters)

    @property
    def event(self) -> Event:
        """The charge as the accountant counts it."""
        return self.rebuilt().event

    def empty_account(self) -> Accountant:
        """An account of the kind that prices the charge's job, before its first charge.

        Raises:
            ParameterError: there is none with such a grid.
        """
        return accountant_named(self.accountant, grid=self.loss_grid)


def ledger_statement(reserved: Budget, mechanisms: Iterable[str], *assumptions: str) -> BudgetStatement:
    """What holds for the records of a ledger, whatever its jobs still send.

    Args:
        reserved: sum over the jobs.
        mechanisms: names of those that were charged.
        assumptions: besides those that all jobs rest on.
    """
    names = " + ".join(dict.fromkeys(mechanisms)) or "nothing released"
    return BudgetStatement(
        *LEDGER_SCOPE, names, reserved.epsilon, reserved.delta, (*JOB_ASSUMPTIONS, *assumptions)
    )
