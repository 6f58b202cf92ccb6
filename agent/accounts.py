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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from agent.charges import Budget, Charge, WriteOff
from agent.columns import dataset_of
from dpagent.privacy.accounting.accountant import Accountant
from dpagent.privacy.accounting.pld import PldAccountant
from dpagent.privacy.events import Event
from dpagent.privacy.mechanisms.mechanism import NOISE_SHARE

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
    spent: Accountant


def grid_of(account: Accountant) -> float | None:
    """The step of the grid on which an account composes privacy losses, if it does."""
    return account.grid if isinstance(account, PldAccountant) else None


def price_after(account: Accountant, events: Sequence[Event], delta: float) -> float:
    """ε at a job's ``delta`` after also charging ``events``, including the sampler's inexactness."""
    return account.epsilon_after(events, delta * (1 - NOISE_SHARE))


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
        too."""
        bounded = self._jobs.get(dataset_of(account), {})
        return sum(
            job not in bounded or bounded[job].schedule != known.schedule
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
        """Add a charge that the device has just priced."""
        account = self.job(charge.dataset, charge.job)
        spent = charge.empty_account() if account is None else account.spent
        spent.compose(charge.event)
        self.restore(charge, spent)

    def restore(self, charge: Charge, spent: Accountant) -> None:
        """Add a charge of a ledger that is replayed.

        Args:
            charge: the next one.
            spent: all charges of its job, up to this one or beyond it.
        """
        self._jobs.setdefault(charge.dataset, {})[charge.job] = JobAccount(
            charge.schedule, charge.job_epsilon, charge.delta, charge.round, spent
        )
        self._running[dataset_of(charge.dataset)] = (charge.job, charge.schedule)
        self._spent[charge.dataset] = charge.cumulative_epsilon

    def write_off(self, lost: WriteOff) -> None:
        """Add a write-off."""
        known = self.written_off(lost.dataset)
        self._written_off[lost.dataset] = Budget(known.epsilon + lost.epsilon, known.delta + lost.delta)
        self._running.pop(dataset_of(lost.dataset), None)
        self._spent[lost.dataset] = lost.cumulative_epsilon
