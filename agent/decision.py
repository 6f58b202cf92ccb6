"""The device decides: whether a plan may be run on this data, and why not.

Everything looked at is public or the device's own configuration, except the number of
records, which is not looked at.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import cbor2

from agent.accounts import fresh_account, price_after, require_noise_as_priced
from agent.ledger import Ledger
from agent.update import mechanism_of
from dpagent.errors import DataError, DpagentError, ParameterError
from dpagent.learning import Dataset, built_in, check_fits
from dpagent.privacy import PrivacyLossEvent
from dpagent.protocol.messages import Plan

# A target and a budget that are equal on paper differ in the last bits.
_ROUNDING = 1e-9


class Declined(DpagentError):
    """The device does not take part; the text says why."""


def schedule_digest(plan: Plan) -> str:
    """SHA-256 of everything that prices a job: its mechanism, for all rounds, and its dimension."""
    terms = plan.mechanism.model_dump() | {"parameters": plan.model.parameters}
    return hashlib.sha256(cbor2.dumps(terms, canonical=True)).hexdigest()


@dataclass(frozen=True, slots=True)
class Price:
    """What taking part in a round is charged as."""

    job_epsilon: float
    """ε reserved for the whole job."""
    cumulative_epsilon: float
    """What other jobs reserved plus what this one has spent, this round included."""
    cumulative_delta: float
    loss_grid: float | None
    """On which the job is priced; see :class:`~agent.accounts.Charge`."""


def decide(plan: Plan, dataset: Dataset, ledger: Ledger, name: str, *, now: float) -> Price:
    """Whether to take part in the round of ``plan``.

    The whole of the job that is left must fit the lifetime budget, not this round alone: it
    is reserved at its first charge (see :mod:`agent.accounts`), and a job that cannot be
    finished would waste what it spends.

    Args:
        plan: Signed and well-formed.
        dataset: The device's records.
        ledger: What was spent before.
        name: The ledger's name for the records.
        now: Unix time.

    Returns:
        What to charge.

    Raises:
        Declined: With the reason.
    """
    if plan.deadline < now + plan.compute_slot_s:
        raise Declined("by this board's clock the round's deadline would pass before anything may be sent")
    try:
        spec = built_in(plan.model.name)
    except DpagentError as error:
        raise Declined(f"the model is unknown here: {error}") from error
    if spec.digest() != plan.model.architecture or spec.parameter_count != plan.model.parameters:
        raise Declined(
            f"the model {spec.name} is built differently here; install the coordinator's version of dpagent"
        )
    try:
        check_fits(dataset, spec)
    except DataError as error:
        raise Declined(str(error)) from error
    job = plan.job.hex()
    account = ledger.accounts.job(name, job)
    if account is not None and account.schedule != schedule_digest(plan):
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
    budget, others, terms = ledger.budget(name), ledger.accounts.others(name, job), plan.mechanism
    total_delta = others.delta + terms.delta
    if not total_delta <= budget.delta * (1 + _ROUNDING):
        raise Declined(
            f"the job would bring δ to {total_delta:.4g}; "
            f"the lifetime budget for {name!r} is {budget.delta:g}, "
            f"of which other jobs have {others.delta:.4g}"
        )
    # Before anything that takes time.
    _require_noise(plan, 0.0)
    rest = [
        PrivacyLossEvent(noise, terms.sampling_rate, terms.local_steps)
        for noise in terms.noise_multipliers[plan.round - 1 :]
    ]
    if account is None:
        spent, grid = fresh_account(rest, terms.delta)
        job_epsilon = price_after(spent, rest, terms.delta)
    else:
        spent, grid, job_epsilon = account.spent, account.grid, account.epsilon
    total = others.epsilon + job_epsilon
    if not total <= budget.epsilon * (1 + _ROUNDING):
        raise Declined(
            f"the job would bring ε to {total:.4g}; the lifetime budget for {name!r} is {budget.epsilon:g}, "
            f"of which other jobs have {others.epsilon:.4g}"
        )
    _require_noise(plan, job_epsilon)
    so_far = price_after(spent, rest[:1], terms.delta)
    return Price(job_epsilon, others.epsilon + so_far, total_delta, grid)


def _require_noise(plan: Plan, job_epsilon: float) -> None:
    try:
        require_noise_as_priced(mechanism_of(plan), plan.rounds, job_epsilon, plan.mechanism.delta)
    except ParameterError as error:
        raise Declined(f"round {plan.round}'s {error}") from error
