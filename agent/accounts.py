"""The accounts of a ledger: the reservations and spending that its entries add up to.

Inside a job, the first round announces the schedule, the device pins it, and rounds run in
order. So the charges compose tightly, by their privacy-loss distributions (or by Rényi
divergence, where thousands of rounds all differ). A coordinator may choose the parameters of a later
job after seeing the results of earlier ones. So the (ε, δ) of jobs add up:
basic composition is a valid privacy filter for adaptively chosen parameters (Rogers, Roth,
Ullman, Vadhan, "Privacy odometers and filters", NeurIPS 2016); an accountant for charges fixed
in advance is not. The first charge reserves the whole job: whichever rounds of the announced
schedule follow, the device sends a subset of what all of them would have sent. Jobs run in
sequence: a charge for a newer job ends the older one, because the
theorem covers mechanisms in sequence, not interactive mechanisms with interleaved rounds.

A job is its id and its schedule. A round that has a guarantee without trust and another one with it is
charged in the account of each (:mod:`agent.columns`): two charges of one job, of which neither ends the
other. A job of another schedule does, whatever id it goes by.

Under a ``bounded`` noise cap, the rounds of a job depend on the weights before them, which the coordinator
chooses. Such a job reserves a stated ε, its account is one of basic composition, and a round is charged only
while the sum stays within the reservation: that is the same filter, inside the job.

A job of rounds that guarantee nothing reserves an infinite ε. No other job fits beside it, ever.

A write-off, after the ledger was restored from a backup, counts like the reservation of one more job. It ends
all jobs before it: the backup does not know which of their rounds have been taken since.

The ε that a job has *spent* so far is the bound if it stops at a round fixed in advance; while it
runs, the guarantee is its reservation.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from agent.charges import Budget, Charge, ChargedReports, ChargedSum, WriteOff
from agent.columns import SCOPES, account_name, dataset_of
from dpagent.privacy.ranges import AccountantName

GRID_TOLERANCE: Final = 1e-3
"""Bounds by privacy-loss distributions depend slightly on how many charges are priced together."""


@dataclass(frozen=True, slots=True)
class JobAccount:
    """One job's spending on one dataset."""

    schedule: str
    """Digest of the announced schedule, pinned."""
    epsilon: float
    """Reserved at the first charge."""
    delta: float
    last_round: int
    accountant: AccountantName
    loss_grid: float | None
    """That price the job, pinned; see :class:`~agent.charges.Charge`."""
    rounds: int
    """How many were charged."""
    spent: Counter[ChargedSum | ChargedReports] = field(default_factory=Counter)
    """What was charged, and how often, while the job may go on: its price is computed from that anew, in
    another process (:mod:`agent.admission`)."""


class JobAccounts:
    """Spending by account (:mod:`agent.columns`) and job, built from charges and write-offs in order."""

    def __init__(self) -> None:
        self._jobs: dict[str, dict[str, JobAccount]] = {}
        self._written_off: dict[str, Budget] = {}
        self._running: dict[str, tuple[str, str]] = {}
        """Id and schedule of the job that was charged last, in whichever account, by data set."""
        self._spent: dict[str, float] = {}

    def job(self, dataset: str, job: str) -> JobAccount | None:
        """The account of a job; None before its first charge."""
        return self._jobs.get(dataset, {}).get(job)

    def others(self, dataset: str, job: str) -> Budget:
        """Sum of the reserved ε and δ of all other jobs on the dataset, and of what is written off."""
        rest = [account for name, account in self._jobs.get(dataset, {}).items() if name != job]
        gone = self.written_off(dataset)
        return Budget(
            gone.epsilon + sum(account.epsilon for account in rest),
            gone.delta + sum(account.delta for account in rest),
        )

    def is_running(self, dataset: str, job: str) -> bool:
        """Whether a job of an account may go on: it is that of the last charge, and no write-off ended it.

        The last one of all accounts of the data set: the jobs of one may not go on between those of another,
        under the same id either.
        """
        account = self.job(dataset, job)
        return account is not None and self._running.get(dataset_of(dataset)) == (job, account.schedule)

    def running_job(self, dataset: str) -> str | None:
        """The job that may go on, in any account of the data set; None before the first, or if a write-off
        ended it."""
        running = self._running.get(dataset_of(dataset))
        return None if running is None else running[0]

    def jobs_without_bound(self, account: str) -> int:
        """Number of an account's jobs that are not charged to the account of the data set that trusts nobody
        too, in all of their rounds."""
        return self._jobs_without(account, dataset_of(account))

    def jobs_besides(self, account: str) -> int:
        """Number of jobs on the data set of an account that are charged to the account which trusts nobody,
        and not to this one too, or not in all of their rounds: an owner may come to trust a party later."""
        return self._jobs_without(dataset_of(account), account)

    def _jobs_without(self, account: str, other: str) -> int:
        """Number of jobs of an account of which rounds are not charged to the other one too."""
        there = self._jobs.get(other, {})
        return sum(
            job not in there or there[job].schedule != known.schedule or there[job].rounds < known.rounds
            for job, known in self._jobs.get(account, {}).items()
        )

    def reserved(self, dataset: str) -> Budget:
        """Sum of the reserved ε and δ of all jobs on the dataset, and of what is written off."""
        return self.others(dataset, "")

    def is_exposed(self, account: str) -> bool:
        """Whether rounds that guarantee nothing have been run on the data set of an account: then nothing
        bounds what is known of its records, to anybody."""
        return math.isinf(self.reserved(dataset_of(account)).epsilon)

    def written_off(self, dataset: str) -> Budget:
        """What was written off on the dataset."""
        return self._written_off.get(dataset, Budget(0.0, 0.0))

    def epsilon_spent(self, dataset: str) -> float:
        """Cumulative ε of the dataset as its last charge or write-off states it; 0 before the first."""
        return self._spent.get(dataset, 0.0)

    def add(self, charge: Charge) -> None:
        """Add a charge: one that the device has just priced, or one of a ledger."""
        dataset, job = dataset_of(charge.dataset), (charge.job, charge.schedule)
        if self._running.get(dataset, job) != job:
            self._end_running(dataset)
        account = self.job(charge.dataset, charge.job)
        spent: Counter[ChargedSum | ChargedReports] = Counter() if account is None else account.spent
        spent[charge.charged] += 1
        rounds = 1 if account is None else account.rounds + 1
        self._jobs.setdefault(charge.dataset, {})[charge.job] = JobAccount(
            charge.schedule, charge.job_epsilon, charge.delta, charge.round, charge.accountant,
            charge.loss_grid, rounds, spent,
        )  # fmt: skip
        self._running[dataset] = job
        self._spent[charge.dataset] = charge.cumulative_epsilon

    def _end_running(self, dataset: str) -> None:
        """The job that was charged last may not go on: forget what its price would follow from."""
        if (running := self._running.pop(dataset, None)) is None:
            return
        for trust in SCOPES:
            account = self.job(account_name(dataset, trust), running[0])
            if account is not None and account.schedule == running[1]:
                account.spent.clear()

    def write_off(self, lost: WriteOff) -> None:
        """Add a write-off."""
        known = self.written_off(lost.dataset)
        self._written_off[lost.dataset] = Budget(known.epsilon + lost.epsilon, known.delta + lost.delta)
        self._end_running(dataset_of(lost.dataset))
        self._spent[lost.dataset] = lost.cumulative_epsilon


@dataclass(frozen=True, slots=True)
class Books:
    """What a ledger adds up to, as admission has to know it."""

    accounts: JobAccounts
    budgets: dict[str, Budget]
    """By account."""
    number_of_charges: int
