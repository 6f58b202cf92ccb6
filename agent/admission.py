"""Admission: decide whether a round may run on this data, and at what price.

The decision reads only public values and the device's own configuration: no record, and not the number of
them. What is declared of the data (shape, classes) is configuration.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.accounts import GRID_TOLERANCE, Books, JobAccount
from agent.columns import account_name, require_scope
from agent.declined import Declined, OverBudget
from agent.limit_settings import LimitSettings
from agent.limits import require_time_left
from agent.plan_limits import require_price, require_room_for_charges, require_within
from agent.priced_charges import Price, grid_of, price_after, rebuilt
from agent.pricing_messages import JobPrice
from dpagent.errors import DataError, ParameterError
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.fitting import check_fits
from dpagent.notation import plain_bound
from dpagent.privacy.accounting.accountant import Accountant
from dpagent.privacy.accounting.basic import BasicAccountant
from dpagent.privacy.accounting.choice import accountant_named, priced
from dpagent.privacy.events import Event
from dpagent.privacy.mechanisms.mechanism import NOISE_SHARE, Mechanism
from dpagent.privacy.statement import Trust
from dpagent.protocol.messages import Plan
from dpagent.protocol.task import Priced, RoundTask

# A target and an equal budget can differ in the last bits.
_ROUNDING: Final = 1e-9
_MOST_KNOWN: Final = 8


def admit(
    task: RoundTask,
    dataset: Dataset,
    books: Books,
    name: str,
    limits: LimitSettings,
    *,
    now: float,
    known: JobPrices | None = None,
) -> tuple[Price, ...]:
    """Price a round, or decline it.

    A round may have two guarantees, one of them without trust. Each is charged to the account of its trust,
    that with trust only where the owner trusts that party. If one of these accounts cannot pay, the device
    declines.

    The entire rest of the job must fit the lifetime budget, not only this round: the first charge
    reserves it (see :mod:`agent.accounts`), and a job that cannot finish would waste its budget.

    Args:
        task: of a plan that is signed and well-formed.
        dataset: no records, of the form of the device's, which is declared.
        books: of the ledger, with all earlier charges.
        name: the ledger's name for the records.
        limits: the device's own.
        now: Unix time.
        known: prices of whole jobs, to which this one's is added.

    Returns:
        The prices to charge, each in an account of its own; at least one.

    Raises:
        Declined, BeyondLimitError: with the reason.
        PlanError: a later round of the job cannot run.
    """
    require_time_left(task.plan, now, task.plan.compute_slot_s)
    require_within(task, limits)
    try:
        check_fits(dataset, task.spec)
    except DataError as error:
        raise Declined(str(error)) from error
    charged = [each for each in task.priced if each.mechanism.trust in (Trust.NONE, *limits.trust)]
    accounts = [account_name(name, each.mechanism.trust) for each in charged]
    if any(books.accounts.job(account, task.plan.job.hex()) is None for account in accounts):
        require_room_for_charges(task.plan, books.number_of_charges, len(accounts), limits)
    return tuple(
        _price(task, each, books, account, limits, JobPrices() if known is None else known)
        for each, account in zip(charged, accounts, strict=True)
    )


def _price(
    task: RoundTask, priced: Priced, books: Books, name: str, limits: LimitSettings, known: JobPrices
) -> Price:
    """What a guarantee of a round costs its account.

    Raises:
        Declined, BeyondLimitError: with the reason.
        PlanError: a later round of the job cannot run.
    """
    plan, mechanism = task.plan, priced.mechanism
    try:
        require_scope(mechanism, name)
    except ParameterError as error:
        raise Declined(str(error)) from error
    if name not in books.budgets:
        raise OverBudget(
            f"the ledger has no lifetime budget for {name!r}: set budget.{mechanism.trust} in agent.yaml, "
            "and run `dpagent budget raise`"
        )
    job = plan.job.hex()
    account = books.accounts.job(name, job)
    if account is not None and account.schedule != task.schedule_digest:
        raise Declined("the job's mechanism or schedule changed after its first round")
    if account is not None and plan.round <= account.last_round:
        # The reservation covers each round from the first charge on, once.
        raise Declined(
            f"round {plan.round} arrived after the charge for round {account.last_round} of the same job"
        )
    if account is not None and not books.accounts.is_running(name, job):
        # Interleaved rounds of two jobs compose concurrently, which the proof of the sum does not cover.
        running = books.accounts.running_job(name)
        reason = (
            "the ledger was restored from a backup" if running is None else f"a newer job, {running}, began"
        )
        raise Declined(f"the job has ended on {name!r}: {reason}")
    if mechanism.is_private and books.accounts.is_exposed(name):
        raise OverBudget(
            f"rounds that guarantee nothing have been run on {name!r}: no budget is left for others, ever"
        )
    others = books.accounts.others(name, job)
    total_delta = others.delta + plan.delta
    if account is None:
        _require_left("δ", total_delta, books.budgets[name].delta, others.delta, name)
    # A cheap check before the expensive pricing.
    _require_noise_as_priced(plan, mechanism, 0.0)
    is_on_a_grid = priced.reserved_epsilon is None
    if account is None:
        spent, job_epsilon = _reservation(priced, plan.delta, known)
        if is_on_a_grid:
            # On the grid of the whole job, this round alone may be priced above it. Both are bounds; but the
            # ledger does not know the rounds that are to come, and whoever replays it finds the higher one.
            job_epsilon = max(job_epsilon, price_after(spent, [mechanism.event], plan.delta))
        if mechanism.is_private:
            _require_left(
                "ε", others.epsilon + job_epsilon, books.budgets[name].epsilon, others.epsilon, name
            )
    else:
        # It was reserved whole, and goes on though the budget was lowered since.
        spent, job_epsilon = _spent_by(account), account.epsilon
    if mechanism.is_private:
        require_price(job_epsilon, limits)
    _require_noise_as_priced(plan, mechanism, job_epsilon)
    so_far = price_after(spent, [mechanism.event], plan.delta)
    # No more than a replay of the ledger takes, or the device would refuse its own at the next start.
    most = job_epsilon * (1 + GRID_TOLERANCE) if is_on_a_grid else job_epsilon
    if not so_far <= most:
        raise Declined(
            f"round {plan.round} would bring the job to ε = {plain_bound(so_far)} at its δ; it "
            f"reserved {plain_bound(job_epsilon)}"
        )
    so_far = min(so_far, job_epsilon)  # The whole bounds them too.
    return Price(
        name, mechanism, job_epsilon, others.epsilon + so_far, total_delta, spent.name, grid_of(spent)
    )


def require_finite(weights: NDArray[np.float32]) -> None:
    """See that the global weights are numbers.

    Raises:
        Declined: one is not finite.
    """
    if not np.isfinite(weights).all():
        raise Declined("the model has weights that are not finite")


class JobPrices(dict[str, JobPrice]):
    """The prices of the last jobs, by what they follow from: each round of a job asks, and each announcement.

    They go with the questions and answers of the pricing process, which keeps nothing itself.
    """

    def of(self, rounds: tuple[Event, ...], delta: float) -> tuple[Accountant, float]:
        """An empty account for a job of these rounds, and its ε.

        Args:
            rounds: that are left.
            delta: of the job.
        """
        key = hashlib.sha256(repr((rounds, delta)).encode()).hexdigest()
        if key not in self:
            account, epsilon = priced(rounds, delta * (1 - NOISE_SHARE))
            self[key] = JobPrice(account.name, grid_of(account), epsilon)
            for oldest in list(self)[:-_MOST_KNOWN]:
                del self[oldest]
        known = self[key]
        return accountant_named(known.accountant, grid=known.loss_grid), known.epsilon


def _spent_by(account: JobAccount) -> Accountant:
    """An account with all charges of a job."""
    spent = accountant_named(account.accountant, grid=account.loss_grid)
    for charged, count in account.spent.items():
        event = rebuilt(charged).event
        spent.compose(*[event] * count)
    return spent


def _reservation(release: Priced, delta: float, known: JobPrices) -> tuple[Accountant, float]:
    """An empty account for a job that begins with this round, and the ε that it reserves.

    Where later rounds depend on what the coordinator has seen by then, what they cost adds up within the
    reservation: basic composition is a privacy filter (see :mod:`agent.accounts`).
    """
    if (epsilon := release.reserved_epsilon) is not None:
        return BasicAccountant(), epsilon
    return known.of(release.events, delta)


def _require_left(symbol: str, total: float, budget: float, others: float, name: str) -> None:
    if not total <= budget * (1 + _ROUNDING):
        raise OverBudget(
            f"the job would bring {symbol} to {plain_bound(total)}; the lifetime budget for {name!r} is "
            f"{plain_bound(budget)}, of which {plain_bound(others)} is reserved"
        )


def _require_noise_as_priced(plan: Plan, mechanism: Mechanism, job_epsilon: float) -> None:
    try:
        mechanism.require_noise_as_priced(plan.rounds, job_epsilon, plan.delta)
    except ParameterError as error:
        raise Declined(f"round {plan.round}'s {error}") from error
