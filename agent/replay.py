"""The replay of a ledger: every charge is priced again, and every entry checked against those before it.

The agent has its ledger replayed when it starts, in a process that ends (:mod:`agent.pricing`), and the
auditor's command replays it. The replay trusts no figure of a charge: it rebuilds the mechanism from its
parameters, composes the job's events anew, and compares.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from agent.accounts import GRID_TOLERANCE, JobAccounts
from agent.charges import Budget, BudgetChange, Charge, Record, WriteOff
from agent.columns import require_scope, scope_of
from agent.priced_charges import empty_account, price_after, rebuilt, require_derived_values
from dpagent.errors import LedgerError, ParameterError, require_between
from dpagent.notation import plain_bound
from dpagent.privacy.accounting.basic import BasicAccountant
from dpagent.privacy.accounting.pld import PldAccountant
from dpagent.privacy.events import Event
from dpagent.privacy.mechanisms.mechanism import NOISE_SHARE
from dpagent.privacy.mechanisms.truncated_laplace import TruncatedLaplace

_TOLERANCE: Final = 1e-6
"""A recomputed figure may differ from the stated one by rounding, at most by this."""


def replay(records: Sequence[Record]) -> JobAccounts:
    """The accounts that the records of a ledger add up to.

    Raises:
        LedgerError: naming the entry, from 1: it cannot be priced, contradicts the entries before it, or
            begins a job that brings the reservations above the lifetime budget in force.
    """
    prices = _job_prices({number: each for number, each in enumerate(records, 1) if isinstance(each, Charge)})
    ledger = _Replay()
    for number, record in enumerate(records, 1):
        with _naming_entry(number):
            match record:
                case BudgetChange():
                    ledger.set_budget(record)
                case WriteOff():
                    ledger.write_off(record)
                case Charge():
                    ledger.add(number, record, prices[record.dataset, record.job])
    return ledger.accounts


class _Contradiction(Exception):
    """An entry is wrong; the text is the predicate of a sentence about it."""


@contextmanager
def _naming_entry(number: int) -> Iterator[None]:
    try:
        yield
    except _Contradiction as error:
        raise LedgerError(f"Entry {number} {str(error).removesuffix('.')}.") from error


def _job_prices(charges: Mapping[int, Charge]) -> dict[tuple[str, str], _JobPrices]:
    """The prices of each job, by dataset and job; ``charges`` by the number of their entry."""
    jobs: dict[tuple[str, str], dict[int, Event]] = {}
    for number, charge in charges.items():
        with _naming_entry(number):
            jobs.setdefault((charge.dataset, charge.job), {})[number] = _event_of(charge)
    prices = {}
    for job, events in jobs.items():
        first = min(events)
        with _naming_entry(first):
            prices[job] = _JobPrices(charges[first], events)
    return prices


class _Replay:
    """The state of a ledger between two of its entries. Each entry is checked whole before it is added."""

    def __init__(self) -> None:
        self.accounts = JobAccounts()
        self._budgets: dict[str, Budget] = {}

    def set_budget(self, change: BudgetChange) -> None:
        if not (change.epsilon > 0 and 0 < change.delta <= 1):
            raise _Contradiction(f"sets an invalid budget of ε = {change.epsilon!r}, δ = {change.delta!r}")
        try:
            scope_of(change.dataset)
        except ParameterError as error:
            raise _Contradiction(f"sets a budget of no account: {error}") from error
        self._budgets[change.dataset] = Budget(change.epsilon, change.delta)

    def write_off(self, lost: WriteOff) -> None:
        if not (lost.epsilon >= 0 and lost.delta >= 0):
            raise _Contradiction(f"writes off ε = {lost.epsilon!r}, δ = {lost.delta!r}")
        if lost.dataset not in self._budgets:
            raise _Contradiction("writes off a part of no budget")
        before = self.accounts.reserved(lost.dataset)
        for name, stated, computed in (
            ("ε", lost.cumulative_epsilon, before.epsilon + lost.epsilon),
            ("δ", lost.cumulative_delta, before.delta + lost.delta),
        ):
            _require_total(name, stated, computed)
        self.accounts.write_off(lost)

    def add(self, number: int, charge: Charge, prices: _JobPrices) -> None:
        others = self.accounts.others(charge.dataset, charge.job)
        self._require_order(charge)
        self._require_pinned_terms(charge)
        prices.require_epsilon(number, charge.cumulative_epsilon, others.epsilon)
        reserved = Budget(others.epsilon + charge.job_epsilon, others.delta + charge.delta)
        _require_total("δ", charge.cumulative_delta, reserved.delta)
        if self.accounts.job(charge.dataset, charge.job) is None:
            # A job that has begun goes on under a budget that was lowered since.
            if math.isfinite(charge.job_epsilon) and self.accounts.is_exposed(charge.dataset):
                raise _Contradiction("begins a job after rounds on the same records that guarantee nothing")
            self._require_within_budget(charge, reserved)
        self.accounts.add(charge)

    def _require_order(self, charge: Charge) -> None:
        """Rounds of a job rise, and jobs on a dataset run in sequence."""
        account = self.accounts.job(charge.dataset, charge.job)
        if account is None:
            return
        if charge.round <= account.last_round:
            raise _Contradiction(f"is for round {charge.round} after round {account.last_round}")
        if not self.accounts.is_running(charge.dataset, charge.job):
            raise _Contradiction("continues a job after a newer one or a write-off has ended it")

    def _require_pinned_terms(self, charge: Charge) -> None:
        """Every charge of a job repeats the terms of the first one."""
        account = self.accounts.job(charge.dataset, charge.job)
        if account is None:
            return
        pinned = (
            account.schedule,
            account.delta,
            account.epsilon,
            account.accountant,
            account.loss_grid,
        )
        if pinned != (charge.schedule, charge.delta, charge.job_epsilon, charge.accountant, charge.loss_grid):
            raise _Contradiction("changes the schedule, δ, accountant, grid or reservation of its job")

    def _require_within_budget(self, charge: Charge, reserved: Budget) -> None:
        budget = self._budgets.get(charge.dataset)
        if budget is None:
            raise _Contradiction("charges a dataset without a budget")
        for name, total, limit in (
            # Of rounds that guarantee nothing, no budget has room, and the owner has allowed them.
            *([("ε", reserved.epsilon, budget.epsilon)] if math.isfinite(charge.job_epsilon) else []),
            ("δ", reserved.delta, budget.delta),
        ):
            if not total <= limit * (1 + _TOLERANCE):
                raise _Contradiction(
                    f"brings the reserved {name} to {total:.6g}; the lifetime budget is {limit:.6g}"
                )


class _JobPrices:
    """The running ε of one job.

    One pass computes it, in a second for a thousand rounds. In a longer job it looks at the ε after some
    charges only: one between two looks has to state an ε between theirs. On a grid it can exceed
    :func:`~agent.priced_charges.price_after` slightly; only on a mismatch is a charge priced separately.

    Args:
        first: the job's first charge.
        events: of all its charges, by the number of their entry.

    Raises:
        _Contradiction: The job has no price.
    """

    def __init__(self, first: Charge, events: Mapping[int, Event]) -> None:
        self._first, self._events = first, events
        self._is_on_a_grid = first.loss_grid is not None
        self._tolerance = GRID_TOLERANCE if self._is_on_a_grid else _TOLERANCE
        try:
            empty_account(first).compose(*events.values())  # No more of one mechanism than can be counted.
            running = empty_account(first).running_epsilon(events.values(), first.delta * (1 - NOISE_SHARE))
        except ParameterError as error:
            raise _Contradiction(f"begins a job that has no price: {error}") from error
        self._bounds = dict(zip(events, _bounds(running.tolist(), self._is_on_a_grid), strict=True))
        """The least and the most ε that a charge may state, by the number of its entry; equal where it was
        looked at."""

    def require_epsilon(self, number: int, stated: float, others: float) -> None:
        """Check the cumulative ε that a charge states.

        Args:
            number: of the charge's entry.
            stated: its cumulative ε.
            others: ε reserved by other jobs.

        Raises:
            _Contradiction: The job exceeds its reservation, or ``stated`` is wrong.
        """
        least, most = self._bounds[number]
        spent, reserved = most, self._first.job_epsilon
        allowed = reserved * (1 + self._tolerance)
        is_right = spent <= allowed and self._is_within(stated, others + least, others + most)
        if self._is_on_a_grid and not is_right:
            least, spent = self._priced_separately(number)
            most = least
        if not spent <= allowed:
            raise _Contradiction(
                f"brings its job to ε = {plain_bound(spent)}; the reservation is {plain_bound(reserved)}"
            )
        if not self._is_within(stated, others + least, others + most):
            raise _wrong_total("ε", stated, others + spent)

    def _priced_separately(self, number: int) -> tuple[float, float]:
        """The ε that the device states after a charge, and the least proven bound."""
        events, delta = [event for entry, event in self._events.items() if entry <= number], self._first.delta
        reserved = self._first.job_epsilon
        alone = price_after(empty_account(self._first), events, delta)
        least = min(alone, self._bounds[number][1])
        # The device states no more than it reserved; both figures bound the rounds' cost.
        return min(alone, reserved), least

    def _is_within(self, stated: float, least: float, most: float) -> bool:
        if math.isinf(most):
            return stated == most
        # Of a figure that is shown; what counts is reserved, for which nothing absolute is left out.
        return least - self._tolerance * max(1.0, least) <= stated <= most + self._tolerance * max(1.0, most)


def _bounds(running: Sequence[float], is_on_a_grid: bool) -> Iterator[tuple[float, float]]:
    """The least and the most ε after each charge; on a grid, one that is followed by the same ε may not have
    been computed, but stand for the next that was."""
    before = 0.0
    for epsilon, following in zip(running, [*running[1:], math.inf], strict=True):
        is_computed = not is_on_a_grid or epsilon < following
        yield (epsilon if is_computed else before), epsilon
        if is_computed:
            before = epsilon


def _event_of(charge: Charge) -> Event:
    """The event of a charge, if its values can be priced and its noise meets the price's conditions."""
    try:
        mechanism = rebuilt(charge.charged)
        event = mechanism.event
        require_scope(mechanism, charge.dataset)
        require_between("delta", charge.delta, 0.0, 1.0, low_open=True, high_open=True)
        require_derived_values(charge)
        _require_accountant(charge)
        if mechanism.is_private != math.isfinite(charge.job_epsilon):
            raise ParameterError(f"{charge.mechanism} reserves ε = {plain_bound(charge.job_epsilon)}")
        # The ledger does not record the planned number of rounds: check this round's share.
        mechanism.require_noise_as_priced(1, charge.job_epsilon, charge.delta)
        return event
    except (ParameterError, ArithmeticError, ValueError) as error:  # numbers too large for a float, too
        raise _Contradiction(f"is not a charge that can be priced: {error}") from error


def _require_accountant(charge: Charge) -> None:
    if charge.mechanism == TruncatedLaplace.name and charge.accountant != BasicAccountant.name:
        # Its noise is chosen round by round, so only a filter bounds the job.
        raise ParameterError(
            f"accountant is {charge.accountant} with {charge.mechanism}; expected {BasicAccountant.name}."
        )
    if (charge.loss_grid is None) != (charge.accountant != PldAccountant.name):
        raise ParameterError(f"loss grid is {charge.loss_grid!r} with accountant {charge.accountant}.")
    empty_account(charge)


def _require_total(name: str, stated: float, computed: float) -> None:
    if stated != computed and not abs(stated - computed) <= _TOLERANCE * computed < math.inf:
        raise _wrong_total(name, stated, computed)


def _wrong_total(name: str, stated: float, computed: float) -> _Contradiction:
    return _Contradiction(
        f"states a cumulative {name} of {stated:.6g}; the entries so far add up to {computed:.6g}"
    )
