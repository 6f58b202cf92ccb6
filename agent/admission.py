"""Admission: decide whether a round may run on this data, and at what price.

The decision reads only public values and the device's own configuration, not the number of
records.
"""

from __future__ import annotations

from agent.accounts import fresh_account, grid_of, price_after
from agent.charges import LEDGER_SCOPE, Price
from agent.ledger import Ledger
from dpagent.errors import DataError, DpagentError, ParameterError
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.fitting import check_fits
from dpagent.protocol.task import RoundTask

# A target and an equal budget can differ in the last bits.
_ROUNDING = 1e-9


class Declined(DpagentError):
    """The device does not participate; the text gives the reason."""


def admit(task: RoundTask, dataset: Dataset, ledger: Ledger, name: str, *, now: float) -> Price:
    """Price a round, or decline it.

    The entire rest of the job must fit the lifetime budget, not only this round: the first charge
    reserves it (see :mod:`agent.accounts`), and a job that cannot finish would waste its budget.

    Args:
        task: of a plan that is signed and well-formed.
        dataset: the device's records.
        ledger: with all earlier charges.
        name: the ledger's name for the records.
        now: Unix time.

    Returns:
        The price to charge.

    Raises:
        Declined: with the reason.
        PlanError: a later round of the job cannot run.
    """
    plan, mechanism = task.plan, task.mechanism
    if plan.deadline < now + plan.compute_slot_s:
        raise Declined("by this board's clock, the round's deadline passes before the device may send")
    if (mechanism.unit, mechanism.adjacency, mechanism.trust) != LEDGER_SCOPE:
        raise Declined(
            f"mechanism {mechanism.name} hides the {mechanism.adjacency.meaning} of {mechanism.unit.meaning} "
            f"and trusts {mechanism.trust}; this device's ledger accepts only mechanisms that hide the "
            "presence or absence of one record and trust no one"
        )
    try:
        check_fits(dataset, task.spec)
    except DataError as error:
        raise Declined(str(error)) from error
    job = plan.job.hex()
    account = ledger.accounts.job(name, job)
    if account is not None and account.schedule != task.schedule_digest:
        raise Declined("the job's mechanism or schedule changed after its first round")
    if account is not None and plan.round <= account.last_round:
        # The reservation covers each round from the first charge on, once.
        raise Declined(
            f"round {plan.round} arrived after the charge for round {account.last_round} of the same job"
        )
    latest = ledger.accounts.latest_job(name)
    if account is not None and latest != job:
        # Interleaved rounds of two jobs compose concurrently, which the proof of the sum does not cover.
        raise Declined(f"a newer job, {latest}, has begun on {name!r}; jobs run in sequence")
    budget, others = ledger.budget(name), ledger.accounts.others(name, job)
    total_delta = others.delta + plan.delta
    if not total_delta <= budget.delta * (1 + _ROUNDING):
        raise Declined(
            f"the job would bring δ to {total_delta:.4g}; "
            f"the lifetime budget for {name!r} is {budget.delta:g}, "
            f"of which other jobs have {others.delta:.4g}"
        )
    # A cheap check before the expensive pricing.
    _require_noise_as_priced(task, 0.0)
    if account is None:
        rest = task.events
        spent = fresh_account(rest, plan.delta)
        job_epsilon = price_after(spent, rest, plan.delta)
    else:
        spent, job_epsilon = account.spent, account.epsilon
    total = others.epsilon + job_epsilon
    if not total <= budget.epsilon * (1 + _ROUNDING):
        raise Declined(
            f"the job would bring ε to {total:.4g}; the lifetime budget for {name!r} is {budget.epsilon:g}, "
            f"of which other jobs have {others.epsilon:.4g}"
        )
    _require_noise_as_priced(task, job_epsilon)
    # On the grid of the whole job a few rounds may be priced above it; the whole bounds them too.
    so_far = min(price_after(spent, [mechanism.event], plan.delta), job_epsilon)
    return Price(job_epsilon, others.epsilon + so_far, total_delta, spent.name, grid_of(spent))


def _require_noise_as_priced(task: RoundTask, job_epsilon: float) -> None:
    try:
        task.mechanism.require_noise_as_priced(task.plan.rounds, job_epsilon, task.plan.delta)
    except ParameterError as error:
        raise Declined(f"round {task.plan.round}'s {error}") from error
