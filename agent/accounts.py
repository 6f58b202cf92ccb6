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

The ε that a job has *spent* so far is the bound if it stops at a round fixed in advance; while it
runs, the guarantee is its reservation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from agent.charges import Budget, BudgetChange, Charge
from dpagent.errors import ParameterError, require_between
from dpagent.privacy.accounting.accountant import Accountant
from dpagent.privacy.accounting.choice import accountant_for
from dpagent.privacy.accounting.pld import PldAccountant
from dpagent.privacy.events import Event
from dpagent.privacy.mechanisms.mechanism import NOISE_SHARE

# A recomputed figure may differ from the stated one by rounding, at most by this.
_TOLERANCE = 1e-6
# Bounds by privacy-loss distributions depend slightly on how many charges are priced together.
_GRID_TOLERANCE = 1e-3


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


def fresh_account(events: Sequence[Event], delta: float) -> Accountant:
    """An empty account of the kind that prices a job of these rounds."""
    return accountant_for(events, delta)


def grid_of(account: Accountant) -> float | None:
    """The step of the grid on which an account composes privacy losses, if it does."""
    return account.grid if isinstance(account, PldAccountant) else None


def price_after(account: Accountant, events: Sequence[Event], delta: float) -> float:
    """ε at a job's ``delta`` after also charging ``events``, including the sampler's inexactness."""
    return account.epsilon_after(events, delta * (1 - NOISE_SHARE))


class _JobPrices:
    """The running ε of the charges of one job.

    One pass computes it, in a second for a thousand rounds. The result can exceed :func:`price_after`
    slightly; only on a mismatch is a charge priced separately.
    """

    def __init__(self, first: Charge, events: Sequence[Event]) -> None:
        self._first, self._delta, self._events = first, first.delta, events
        self._is_on_a_grid = first.loss_grid is not None
        self.tolerance = _GRID_TOLERANCE if self._is_on_a_grid else _TOLERANCE
        """Tolerance of a recomputed ε, relative to max(1, ε)."""
        self.spent = first.empty_account()
        """All charges, composed."""
        self.spent.compose(*events)
        less = self._delta * (1 - NOISE_SHARE)
        running = self._first.empty_account().running_epsilon(self._events, less)
        self._running = [float(epsilon) for epsilon in running]

    def agrees(self, number: int, stated: float, others: float) -> tuple[bool, float]:
        """Whether ``stated``, less the reserved ``others``, is the ε after charge ``number``; and that ε."""
        epsilon = self._running[number]
        if not self._near(stated, others + epsilon) and self._is_on_a_grid:
            alone = price_after(self._first.empty_account(), self._events[: number + 1], self._delta)
            # The device states no more than it reserved; both figures bound the rounds' cost.
            agrees = self._near(stated, others + min(alone, self._first.job_epsilon))
            epsilon = min(alone, epsilon)
            if epsilon > self._first.job_epsilon:
                # The grid was chosen for the whole job: on one of their own, few rounds may cost less.
                own = fresh_account(self._events[: number + 1], self._delta)
                epsilon = min(epsilon, price_after(own, self._events[: number + 1], self._delta))
            return agrees, epsilon
        return self._near(stated, others + epsilon), epsilon

    def _near(self, stated: float, computed: float) -> bool:
        return abs(stated - computed) <= self.tolerance * max(1.0, computed)


class JobAccounts:
    """Spending by dataset and job, built from charges in their order."""

    def __init__(self) -> None:
        self._jobs: dict[str, dict[str, JobAccount]] = {}
        self._spent: dict[str, float] = {}

    def job(self, dataset: str, job: str) -> JobAccount | None:
        """The account of a job; None before its first charge."""
        return self._jobs.get(dataset, {}).get(job)

    def others(self, dataset: str, job: str) -> Budget:
        """Sum of the reserved ε and δ of all other jobs on the dataset."""
        rest = [account for name, account in self._jobs.get(dataset, {}).items() if name != job]
        return Budget(sum(account.epsilon for account in rest), sum(account.delta for account in rest))

    def latest_job(self, dataset: str) -> str | None:
        """The last charged job on the dataset."""
        return next(reversed(self._jobs.get(dataset, {})), None)

    def reserved(self, dataset: str) -> Budget:
        """Sum of the reserved ε and δ of all jobs on the dataset."""
        return self.others(dataset, "")

    def epsilon_spent(self, dataset: str) -> float:
        """Cumulative ε of the dataset as its last charge states it; 0 before the first."""
        return self._spent.get(dataset, 0.0)

    def add(self, charge: Charge) -> None:
        """Add a charge that the device has just priced."""
        account = self._account(charge)
        account.spent.compose(charge.event)
        self._spent[charge.dataset] = charge.cumulative_epsilon

    def check_and_add(self, records: Sequence[Charge | BudgetChange]) -> None:
        """Add the records of a ledger, checking each charge against the records before it.

        Raises:
            InconsistentChargeError: A charge contradicts the records before it, or
                its job's reservation exceeds the lifetime budget in force.
        """
        charges: dict[int, Charge] = {
            index: record for index, record in enumerate(records) if isinstance(record, Charge)
        }
        by_job: dict[tuple[str, str], list[int]] = {}
        for index, charge in charges.items():
            by_job.setdefault((charge.dataset, charge.job), []).append(index)
        events: dict[int, Event] = {}
        prices: dict[int, tuple[_JobPrices, int]] = {}
        for indices in by_job.values():
            events |= {index: _checked_event(index, charges[index]) for index in indices}
            try:
                job_prices = _JobPrices(charges[indices[0]], [events[index] for index in indices])
            except ParameterError as error:
                raise InconsistentChargeError(
                    indices[0], f"begins a job that has no price: {error}"
                ) from error
            prices |= {index: (job_prices, number) for number, index in enumerate(indices)}
        budgets: dict[str, Budget] = {}
        for index, record in enumerate(records):
            if isinstance(record, BudgetChange):
                if not (record.epsilon > 0 and 0 < record.delta <= 1):
                    raise InconsistentChargeError(
                        index, f"sets an invalid budget of ε = {record.epsilon!r}, δ = {record.delta!r}"
                    )
                budgets[record.dataset] = Budget(record.epsilon, record.delta)
                continue
            charge = record
            before = self.job(charge.dataset, charge.job)
            if before is not None and charge.round <= before.last_round:
                raise InconsistentChargeError(
                    index, f"is for round {charge.round} after round {before.last_round}"
                )
            if before is not None and self.latest_job(charge.dataset) != charge.job:
                raise InconsistentChargeError(index, "continues a job after a newer one has begun")
            account = self._account(charge)
            terms = (
                account.schedule,
                account.delta,
                account.epsilon,
                account.spent.name,
                grid_of(account.spent),
            )
            stated = (charge.schedule, charge.delta, charge.job_epsilon, charge.accountant, charge.loss_grid)
            if terms != stated:
                raise InconsistentChargeError(
                    index, "changes the schedule, δ, accountant, grid or reservation of its job"
                )
            others = self.others(charge.dataset, charge.job)
            job_prices, number = prices[index]
            agrees, epsilon = job_prices.agrees(number, charge.cumulative_epsilon, others.epsilon)
            if not epsilon <= account.epsilon + job_prices.tolerance * max(1.0, account.epsilon):
                raise InconsistentChargeError(
                    index, f"brings its job to ε = {epsilon:.6g}; the reservation is {account.epsilon:.6g}"
                )
            if not agrees:
                _refuse(index, "ε", charge.cumulative_epsilon, others.epsilon + epsilon)
            total_delta = others.delta + account.delta
            if not abs(charge.cumulative_delta - total_delta) <= _TOLERANCE * total_delta:
                _refuse(index, "δ", charge.cumulative_delta, total_delta)
            _require_within(index, self.reserved(charge.dataset), budgets.get(charge.dataset))
            self._spent[charge.dataset] = charge.cumulative_epsilon
        for (dataset, job), indices in by_job.items():
            self._jobs[dataset][job].spent = prices[indices[0]][0].spent

    def _account(self, charge: Charge) -> JobAccount:
        jobs = self._jobs.setdefault(charge.dataset, {})
        if charge.job not in jobs:
            jobs[charge.job] = JobAccount(
                charge.schedule, charge.job_epsilon, charge.delta, charge.round, charge.empty_account()
            )
        account = jobs[charge.job]
        account.last_round = charge.round
        return account


class InconsistentChargeError(ValueError):
    """A charge contradicts the charges before it.

    Attributes:
        index: Of the record, from 0.
    """

    def __init__(self, index: int, what: str) -> None:
        super().__init__(what)
        self.index = index


def _require_within(index: int, reserved: Budget, budget: Budget | None) -> None:
    if budget is None:
        raise InconsistentChargeError(index, "charges a dataset without a budget")
    for name, total, limit in (("ε", reserved.epsilon, budget.epsilon), ("δ", reserved.delta, budget.delta)):
        if not total <= limit * (1 + _TOLERANCE):
            raise InconsistentChargeError(
                index, f"brings the reserved {name} to {total:.6g}; the lifetime budget is {limit:.6g}"
            )


def _refuse(index: int, name: str, stated: float, computed: float) -> NoReturn:
    raise InconsistentChargeError(
        index, f"states a cumulative {name} of {stated:.6g}; the charges so far add up to {computed:.6g}"
    )


def _checked_event(index: int, charge: Charge) -> Event:
    """The event of a charge, if its values can be priced and its noise meets the price's conditions.

    Raises:
        InconsistentChargeError: they cannot, or it does not.
    """
    try:
        mechanism = charge.rebuilt()
        event = mechanism.event
        require_between("delta", charge.delta, 0.0, 1.0, low_open=True, high_open=True)
        for name in ("granularity", "statistical_distance"):
            stated, computed = getattr(charge, name), getattr(mechanism, name)
            if not abs(stated - computed) <= _TOLERANCE * computed:
                raise ParameterError(
                    f"{name.replace('_', ' ')} is {stated!r}; the charge's parameters give {computed!r}."
                )
        if (charge.loss_grid is None) != (charge.accountant != PldAccountant.name):
            raise ParameterError(f"loss grid is {charge.loss_grid!r} with accountant {charge.accountant}.")
        charge.empty_account()
        # The ledger does not record the planned number of rounds: check this round's share.
        mechanism.require_noise_as_priced(1, charge.job_epsilon, charge.delta)
        return event
    except (ParameterError, ArithmeticError, ValueError) as error:
        raise InconsistentChargeError(index, f"is not a charge that can be priced: {error}") from error
