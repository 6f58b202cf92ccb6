"""What the charges of a ledger mean: their mechanisms, their accountants, and what a round costs.

The pricing process and the auditor's commands use it. The agent keeps charges, and leaves this to them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agent.charges import Budget, Charge, ChargedReports, ChargedSum, ReportCharge, SumCharge, digest_of
from agent.columns import scope_of
from dpagent.errors import ParameterError
from dpagent.privacy.accounting.accountant import Accountant
from dpagent.privacy.accounting.choice import accountant_named
from dpagent.privacy.accounting.pld import PldAccountant
from dpagent.privacy.events import Event
from dpagent.privacy.mechanisms.mechanism import (
    JOB_ASSUMPTIONS,
    NOISE_SHARE,
    PlannedMechanism,
    Query,
)
from dpagent.privacy.mechanisms.registry import mechanism_named
from dpagent.privacy.mechanisms.two_point_rounds import TwoPointRound
from dpagent.privacy.ranges import AccountantName
from dpagent.privacy.statement import BudgetStatement
from dpagent.protocol.task import RoundTask

_TOLERANCE: Final = 1e-6
"""A recomputed figure may differ from the stated one by rounding, at most by this."""
_DIGEST: Final = re.compile("[0-9a-f]{64}")


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


def rebuilt(charged: ChargedSum | ChargedReports) -> PlannedMechanism | TwoPointRound:
    """The charged mechanism.

    Raises:
        ParameterError: no mechanism has that name, or such parameters.
    """
    match charged:
        case ChargedSum():
            query = Query(
                charged.clip_norm, charged.accumulation_slack, charged.dimension, charged.sampling_rate,
                charged.steps,
            )  # fmt: skip
            kind = mechanism_named(charged.mechanism)
            return kind.build(query, charged.noise_multiplier, dict(charged.parameters))
        case ChargedReports():
            if charged.mechanism != TwoPointRound.name:
                raise ParameterError(f"mechanism is {charged.mechanism!r}; expected {TwoPointRound.name}.")
            return TwoPointRound(charged.noise_multiplier, charged.coordinates, charged.dimension)


def event_of(charge: Charge) -> Event:
    """The event that the accountant prices."""
    return rebuilt(charge.charged).event


def empty_account(charge: Charge) -> Accountant:
    """An empty account of the kind that prices the charge's job.

    Raises:
        ParameterError: the accountant does not accept the grid.
    """
    return accountant_named(charge.accountant, grid=charge.loss_grid)


def grid_of(account: Accountant) -> float | None:
    """The step of the grid on which an account composes privacy losses, if it does."""
    return account.grid if isinstance(account, PldAccountant) else None


def price_after(account: Accountant, events: Sequence[Event], delta: float) -> float:
    """ε at a job's ``delta`` after also charging ``events``, including the sampler's inexactness."""
    return account.epsilon_after(events, delta * (1 - NOISE_SHARE))


def require_derived_values(charge: Charge) -> None:
    """Check the figures of a charge that follow from the others.

    Raises:
        ParameterError: one is wrong.
    """
    if not _DIGEST.fullmatch(charge.plan):
        raise ParameterError(f"plan is {charge.plan!r}; expected a SHA-256 in 64 hexadecimal digits.")
    mechanism = rebuilt(charge.charged)
    _require_stated("statistical distance", charge.statistical_distance, mechanism.statistical_distance)
    if isinstance(charge, SumCharge):
        assert isinstance(mechanism, PlannedMechanism)
        _require_stated("granularity", charge.granularity, mechanism.granularity)


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


def _require_stated(name: str, stated: float, computed: float) -> None:
    if not abs(stated - computed) <= _TOLERANCE * computed:
        raise ParameterError(f"{name} is {stated!r}; the charge's parameters give {computed!r}.")
