"""The device decides: whether a plan may be run on this data, and why not.

Everything looked at is public or the device's own configuration, except the number of
records, which is not looked at.
"""

from __future__ import annotations

import hashlib

import cbor2

from agent.ledger import Ledger
from dpagent.errors import DataError, DpagentError
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


def decide(plan: Plan, dataset: Dataset, ledger: Ledger, name: str, *, now: float) -> float:
    """Whether to take part in the round of ``plan``.

    The whole of the job that is left must fit the lifetime budget, not this round alone:
    a job that cannot be finished would waste what it spends.

    Args:
        plan: Signed and well-formed.
        dataset: The device's records.
        ledger: What was spent before.
        name: The ledger's name for the records.
        now: Unix time.

    Returns:
        The cumulative ε once this round is charged.

    Raises:
        Declined: With the reason.
    """
    if plan.deadline < now:
        raise Declined(f"the round's deadline passed {now - plan.deadline:.0f} s ago")
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
    pinned = ledger.pinned_schedule(job)
    if pinned is not None and pinned != schedule_digest(plan):
        raise Declined("the job's mechanism or schedule changed after its first round")
    budget = ledger.budget(name)
    terms = plan.mechanism
    rest = [
        PrivacyLossEvent(noise, terms.sampling_rate, terms.local_steps)
        for noise in terms.noise_multipliers[plan.round - 1 :]
    ]
    total = ledger.epsilon_after(name, rest)
    if total > budget.epsilon * (1 + _ROUNDING):
        spent = ledger.epsilon_after(name, [])
        raise Declined(
            f"the job would bring ε to {total:.4g} at δ = {budget.delta:g}; "
            f"the lifetime budget for {name!r} is {budget.epsilon:g}, of which {spent:.4g} is spent"
        )
    return ledger.epsilon_after(name, rest[:1])
