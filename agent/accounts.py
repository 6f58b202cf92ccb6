"""What the ledger's entries say, and what they come to.

Inside a job the schedule is announced with the first round and pinned, and its rounds are
taken in order, so its charges compose tightly (RDP). Across jobs, whose parameters a
coordinator may choose after seeing what earlier ones gave, the (ε, δ) of the jobs are added:
basic composition is a valid privacy filter for adaptively chosen parameters (Rogers, Roth,
Ullman, Vadhan, "Privacy odometers and filters", NeurIPS 2016), and a sum over orders chosen
afterwards is not known to be. A job is reserved whole, at its first charge: whatever rounds of
the announced schedule follow, each fixed order's divergence is at most that of all of them. And
jobs follow one another: once a newer one is charged the older is over, because the theorem is
about mechanisms run in sequence, and not about interactive ones whose rounds alternate.

What a job has *spent* so far is the bound if it stopped at a round fixed in advance; while it
runs, the guarantee is what it has reserved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ConfigDict

from dpagent.privacy import PrivacyLossEvent, RdpAccountant, running_epsilon

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

# A re-computed ε may differ from the one written down by rounding, never by more than this.
_TOLERANCE = 1e-6


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
    spent: RdpAccountant


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
        # One vectorised pass a job: a thousand rounds take a fraction of a second.
        job_epsilon: dict[int, float] = {}
        for indices in by_job.values():
            running = running_epsilon([charges[index].event for index in indices], charges[indices[0]].delta)
            job_epsilon.update(zip(indices, running.tolist(), strict=True))
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
            terms = (account.schedule, account.delta, account.epsilon)
            if terms != (charge.schedule, charge.delta, charge.job_epsilon):
                raise InconsistentChargeError(index, "changes the schedule, δ or reservation of its job")
            if job_epsilon[index] > account.epsilon + _TOLERANCE * max(1.0, account.epsilon):
                raise InconsistentChargeError(
                    index,
                    f"brings its job to ε = {job_epsilon[index]:.6g}; it had reserved {account.epsilon:.6g}",
                )
            others = self.others(charge.dataset, charge.job)
            _require_equal(index, "ε", charge.cumulative_epsilon, others.epsilon + job_epsilon[index])
            _require_equal(index, "δ", charge.cumulative_delta, others.delta + account.delta)
            _require_within(index, self.reserved(charge.dataset), budgets.get(charge.dataset))
            self._spent[charge.dataset] = charge.cumulative_epsilon
        for (dataset, job), indices in by_job.items():
            self._jobs[dataset][job].spent.compose(*(charges[index].event for index in indices))

    def _account(self, charge: Charge) -> JobAccount:
        jobs = self._jobs.setdefault(charge.dataset, {})
        account = jobs.setdefault(
            charge.job,
            JobAccount(charge.schedule, charge.job_epsilon, charge.delta, charge.round, RdpAccountant()),
        )
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


def _require_equal(index: int, name: str, stated: float, computed: float) -> None:
    tolerance = _TOLERANCE * (max(1.0, computed) if name == "ε" else computed)
    if not abs(stated - computed) <= tolerance:
        raise InconsistentChargeError(
            index, f"states a cumulative {name} of {stated:.6g}; the charges up to it come to {computed:.6g}"
        )
