"""What the ledger's entries say, and what they come to.

Inside a job the schedule is announced with the first round and pinned, and its rounds are
taken in order, so its charges compose tightly, by their privacy-loss distributions (or by Rényi
divergence, in old ledgers and where thousands of rounds all differ). Across jobs, whose parameters a
coordinator may choose after seeing what earlier ones gave, the (ε, δ) of the jobs are added:
basic composition is a valid privacy filter for adaptively chosen parameters (Rogers, Roth,
Ullman, Vadhan, "Privacy odometers and filters", NeurIPS 2016), and an accountant for charges fixed
in advance is not. A job is reserved whole, at its first charge: whatever rounds of the announced
schedule follow, and for whatever reason others do not, what is sent is a part of what all of them
would have sent. And
jobs follow one another: once a newer one is charged the older is over, because the theorem is
about mechanisms run in sequence, and not about interactive ones whose rounds alternate.

What a job has *spent* so far is the bound if it stopped at a round fixed in advance; while it
runs, the guarantee is what it has reserved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pydantic import ConfigDict

from dpagent.privacy import (
    PldAccountant,
    PrivacyLossEvent,
    RdpAccountant,
    accountant_for,
    loss_grid,
    running_epsilon,
    running_pld_epsilon,
)

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

Accountant: TypeAlias = PldAccountant | RdpAccountant

#: Share of a job's δ that its ε does without, to cover noise that is not drawn exactly (its statistical
#: distance) and not continuous (the lemma in :mod:`dpagent.privacy.pld`).
NOISE_SHARE = 1e-6

# A re-computed figure may differ from the one written down by rounding, never by more than this.
_TOLERANCE = 1e-6
# Bounds by privacy-loss distributions depend a little on how much of a job is looked at in one go.
_GRID_TOLERANCE = 1e-3


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
class Charge:
    """One release, with everything an auditor needs to price it again."""

    __pydantic_config__ = _STRICT

    dataset: str
    job: str
    round: int
    mechanism: str
    noise_multiplier: float
    sampling_rate: float
    steps: int
    clip_norm: float
    granularity: float
    dimension: int
    statistical_distance: float
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
    loss_grid: float | None = None
    """Step of the grid on which the job's privacy losses are composed, pinned; None for Rényi orders."""

    @property
    def event(self) -> PrivacyLossEvent:
        """The charge as the accountant counts it."""
        return PrivacyLossEvent(self.noise_multiplier, self.sampling_rate, self.steps)


@dataclass(slots=True)
class JobAccount:
    """One job's spending on one dataset."""

    schedule: str
    """Digest of the announced schedule, pinned."""
    epsilon: float
    """Reserved at the first charge."""
    delta: float
    last_round: int
    spent: Accountant
    grid: float | None
    """Of ``spent``; None if it composes Rényi divergences."""


def fresh_account(events: Sequence[PrivacyLossEvent], delta: float) -> tuple[Accountant, float | None]:
    """What prices a job of these rounds, and its grid."""
    if accountant_for([event.noise_multiplier for event in events]) == "rdp":
        return RdpAccountant(), None
    grid = loss_grid(events, delta)
    return PldAccountant(grid=grid), grid


def price_after(account: Accountant, events: Sequence[PrivacyLossEvent], delta: float) -> float:
    """ε at a job's ``delta`` with ``events`` charged as well, noise as it is drawn included."""
    return account.epsilon_after(events, delta * (1 - NOISE_SHARE))


def _running(events: Sequence[PrivacyLossEvent], delta: float, grid: float | None) -> list[float]:
    """:func:`price_after` each of ``events``, in one pass: a thousand rounds take a second."""
    less = delta * (1 - NOISE_SHARE)
    running = running_epsilon(events, less) if grid is None else running_pld_epsilon(events, less, grid=grid)
    return [float(epsilon) for epsilon in running]


class JobAccounts:
    """Spending by dataset and job, built from charges in their order."""

    def __init__(self) -> None:
        self._jobs: dict[str, dict[str, JobAccount]] = {}
        self._spent: dict[str, float] = {}

    def job(self, dataset: str, job: str) -> JobAccount | None:
        """The account of a job, once it has been charged."""
        return self._jobs.get(dataset, {}).get(job)

    def others(self, dataset: str, job: str) -> Budget:
        """Sum of ε and δ that all other jobs on the dataset have reserved."""
        rest = [account for name, account in self._jobs.get(dataset, {}).items() if name != job]
        return Budget(sum(account.epsilon for account in rest), sum(account.delta for account in rest))

    def latest_job(self, dataset: str) -> str | None:
        """The job that was charged last on the dataset."""
        return next(reversed(self._jobs.get(dataset, {})), None)

    def reserved(self, dataset: str) -> Budget:
        """Sum of ε and δ that all jobs on the dataset have reserved."""
        return self.others(dataset, "")

    def epsilon_spent(self, dataset: str) -> float:
        """Cumulative ε of the dataset as its last charge states it; 0 before the first."""
        return self._spent.get(dataset, 0.0)

    def add(self, charge: Charge) -> None:
        """Take one charge, which the device has just priced."""
        account = self._account(charge)
        account.spent.compose(charge.event)
        self._spent[charge.dataset] = charge.cumulative_epsilon

    def check_and_add(self, records: Sequence[Charge | BudgetChange]) -> None:
        """Take the records of a ledger, each charge checked against what stands before it.

        Raises:
            InconsistentChargeError: A charge states what the records before it contradict, or
                its job's reservation exceeded the lifetime budget in force.
        """
        charges: dict[int, Charge] = {
            index: record for index, record in enumerate(records) if isinstance(record, Charge)
        }
        by_job: dict[tuple[str, str], list[int]] = {}
        for index, charge in charges.items():
            by_job.setdefault((charge.dataset, charge.job), []).append(index)
        job_epsilon: dict[int, float] = {}
        for indices in by_job.values():
            first = charges[indices[0]]
            running = _running([charges[index].event for index in indices], first.delta, first.loss_grid)
            job_epsilon.update(zip(indices, running, strict=True))
        budgets: dict[str, Budget] = {}
        for index, record in enumerate(records):
            if isinstance(record, BudgetChange):
                budgets[record.dataset] = Budget(record.epsilon, record.delta)
                continue
            charge = record
            before = self.job(charge.dataset, charge.job)
            if before is not None and charge.round <= before.last_round:
                raise InconsistentChargeError(
                    index, f"is for round {charge.round} after round {before.last_round}"
                )
            if before is not None and self.latest_job(charge.dataset) != charge.job:
                raise InconsistentChargeError(index, "goes on with a job after a newer one had begun")
            account = self._account(charge)
            terms = (account.schedule, account.delta, account.epsilon, account.grid)
            if terms != (charge.schedule, charge.delta, charge.job_epsilon, charge.loss_grid):
                raise InconsistentChargeError(index, "changes schedule, δ, grid or reservation of its job")
            tolerance = _TOLERANCE if account.grid is None else _GRID_TOLERANCE
            if job_epsilon[index] > account.epsilon + tolerance * max(1.0, account.epsilon):
                raise InconsistentChargeError(
                    index,
                    f"brings its job to ε = {job_epsilon[index]:.6g}; it had reserved {account.epsilon:.6g}",
                )
            others = self.others(charge.dataset, charge.job)
            cumulative = others.epsilon + job_epsilon[index]
            _require_equal(
                index, "ε", charge.cumulative_epsilon, cumulative, tolerance * max(1.0, cumulative)
            )
            total_delta = others.delta + account.delta
            _require_equal(index, "δ", charge.cumulative_delta, total_delta, _TOLERANCE * total_delta)
            _require_within(index, self.reserved(charge.dataset), budgets.get(charge.dataset))
            self._spent[charge.dataset] = charge.cumulative_epsilon
        for (dataset, job), indices in by_job.items():
            self._jobs[dataset][job].spent.compose(*(charges[index].event for index in indices))

    def _account(self, charge: Charge) -> JobAccount:
        jobs = self._jobs.setdefault(charge.dataset, {})
        if charge.job not in jobs:
            grid = charge.loss_grid
            spent = RdpAccountant() if grid is None else PldAccountant(grid=grid)
            jobs[charge.job] = JobAccount(
                charge.schedule, charge.job_epsilon, charge.delta, charge.round, spent, grid
            )
        account = jobs[charge.job]
        account.last_round = charge.round
        return account


class InconsistentChargeError(ValueError):
    """A charge contradicts the charges before it.

    Attributes:
        index: Which of the records, from 0.
    """

    def __init__(self, index: int, what: str) -> None:
        super().__init__(what)
        self.index = index


def _require_within(index: int, reserved: Budget, budget: Budget | None) -> None:
    if budget is None:
        raise InconsistentChargeError(index, "charges a dataset for which no budget was set")
    for name, total, limit in (("ε", reserved.epsilon, budget.epsilon), ("δ", reserved.delta, budget.delta)):
        if not total <= limit * (1 + _TOLERANCE):
            raise InconsistentChargeError(
                index, f"brings the reserved {name} to {total:.6g}; the lifetime budget was {limit:.6g}"
            )


def _require_equal(index: int, name: str, stated: float, computed: float, tolerance: float) -> None:
    if not abs(stated - computed) <= tolerance:
        raise InconsistentChargeError(
            index, f"states a cumulative {name} of {stated:.6g}; the charges up to it come to {computed:.6g}"
        )
