"""Admission: whether a round's task may be run on this data, at which price, and why not.

Everything looked at is public or the device's own configuration, except the number of
records, which is not looked at.
"""

from __future__ import annotations

from agent.accounts import fresh_account, grid_of, price_after
from agent.charges import LEDGER_SCOPE, Price
from agent.ledger import Ledger
from dpagent.errors import DataError, DpagentError, ParameterError
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.fitting import check_fits
from dpagent.protocol.task import RoundTask

# A target and a budget that are equal on paper differ in the last bits.
_ROUNDING = 1e-9


class Declined(DpagentError):
    """The device does not take part; the text says why."""


def admit(task: RoundTask, dataset: Dataset, ledger: Ledger, name: str, *, now: float) -> Price:
    """Whether to take part in a round.

    The whole of the job that is left must fit the lifetime budget, not this round alone: it
    is reserved at its first charge (see :mod:`agent.accounts`), and a job that cannot be
    finished would waste what it spends.

    Args:
        task: of a plan that is signed and well-formed.
        dataset: the device's records.
        ledger: what was spent before.
        name: the ledger's name for the records.
        now: Unix time.

    Returns:
        What to charge.

    Raises:
        Declined: with the reason.
        PlanError: a later round of the job could not be run.
    """
    plan, mechanism = task.plan, task.mechanism
    if plan.deadline < now + plan.compute_slot_s:
        raise Declined("by this board's clock the round's deadline would pass before anything may be sent")
    if (mechanism.unit, mechanism.adjacency, mechanism.trust) != LEDGER_SCOPE:
        raise Declined(
            f"mechanism {mechanism.name} protects {mechanism.unit.meaning} and trusts {mechanism.trust}; "
            "this device's ledger counts what protects a record and trusts nobody"
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
        # What was reserved is the rounds from the first charge on, each once.
        raise Declined(
            f"round {plan.round} comes after round {account.last_round} of the same job was charged"
        )
    latest = ledger.accounts.latest_job(name)
    if account is not None and latest != job:
        # Jobs whose rounds alternate compose concurrently, which the sum is not proven for.
        raise Declined(f"a newer job, {latest}, has begun on {name!r}; jobs are taken one after another")
    budget, others = ledger.budget(name), ledger.accounts.others(name, job)
    total_delta = others.delta + plan.delta
    if not total_delta <= budget.delta * (1 + _ROUNDING):
        raise Declined(
            f"the job would bring δ to {total_delta:.4g}; "
            f"the lifetime budget for {name!r} is {budget.delta:g}, "
            f"of which other jobs have {others.delta:.4g}"
        )
    # Before anything that takes time.
    _require_noise_as_priced(task, 0.0)
    rest = task.events
    if account is None:
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
    so_far = price_after(spent, rest[:1], plan.delta)
    return Price(job_epsilon, others.epsilon + so_far, total_delta, spent.name, grid_of(spent))


def _require_noise_as_priced(task: RoundTask, job_epsilon: float) -> None:
    try:
        task.mechanism.require_noise_as_priced(task.plan.rounds, job_epsilon, task.plan.delta)
    except ParameterError as error:
        raise Declined(f"round {task.plan.round}'s {error}") from error
