"""The device decides: whether a plan may be run on this data, and why not.

Everything looked at is public or the device's own configuration, except the number of
records, which is not looked at.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import cbor2

from agent.accounts import fresh_account, price_after
from agent.ledger import Ledger
from agent.update import augmentation_of, mechanism_of
from dpagent.errors import DataError, DpagentError, ParameterError
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.models.description import from_description
from dpagent.learning.models.fitting import check_fits
from dpagent.learning.models.spec import ModelSpec
from dpagent.privacy.covariance import FLOAT64_SLACK
from dpagent.privacy.events import PrivacyLossEvent
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian, require_noise_as_priced
from dpagent.protocol.messages import Plan

# A target and a budget that are equal on paper differ in the last bits.
_ROUNDING = 1e-9


class Declined(DpagentError):
    """The device does not take part; the text says why."""


def schedule_digest(plan: Plan) -> str:
    """SHA-256 of everything that prices a job: its mechanism, for all rounds, and its dimension."""
    terms = plan.mechanism.model_dump() | {
        "parameters": plan.model.parameters,
        "projection": None if plan.projection is None else plan.projection.model_dump(),
    }
    if plan.mechanism.clipping.count_weight:
        # The norm follows the quantile, round by round, and the noise follows the norm.
        del terms["clipping"]["norms"]
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


def model_of(plan: Plan) -> ModelSpec:
    """The model that ``plan`` describes.

    Raises:
        Declined: It describes none, or one that is built differently here.
    """
    terms = plan.model
    try:
        spec = from_description(cbor2.loads(terms.description), where="the model")
    except (DpagentError, cbor2.CBORDecodeError, RecursionError) as error:
        raise Declined(f"the model cannot be built: {error}") from error
    if spec.digest() != terms.architecture or spec.parameter_count != terms.parameters:
        raise Declined(
            f"the model {spec.name} is built differently here; install the coordinator's version of dpagent"
        )
    return spec


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
    spec = model_of(plan)
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
    mechanism = _mechanism(plan, spec)
    _require_noise(plan, mechanism, 0.0)
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
    _require_noise(plan, mechanism, job_epsilon)
    so_far = price_after(spent, rest[:1], terms.delta)
    return Price(job_epsilon, others.epsilon + so_far, total_delta, grid)


def _mechanism(plan: Plan, spec: ModelSpec) -> DiscretisedGaussian:
    if plan.cap.kind == "clamp" and plan.cap.where == "device" and plan.dimension > plan.model.parameters:
        raise Declined("a cap on the device and a clip norm that follows a quantile exclude each other")
    if plan.cap.kind == "clamp" and plan.cap.where == "device" and len(plan.mechanism.clipping.norms) > 1:
        raise Declined("a cap on the device and a clip norm for each layer exclude each other")
    values = None if spec.projection is None else math.prod(spec.shape_before_projection)
    if values != (None if plan.projection is None else plan.projection.values):
        raise Declined(f"the model projects {values} values of a record, and the plan says otherwise")
    if plan.second_moments is not None and plan.mechanism.accumulation_slack < FLOAT64_SLACK:
        raise Declined(
            f"the plan allows for an error of {plan.mechanism.accumulation_slack:.3g} of a sum; second "
            f"moments need {FLOAT64_SLACK:.3g}"
        )
    if plan.augmentation is not None and spec.front_end:
        raise Declined("the plan asks for views of records whose features are computed once")
    try:
        if (augmentation := augmentation_of(plan)) is not None:
            augmentation.check_fits(spec.input_shape)
        return mechanism_of(plan, spec)
    except DpagentError as error:
        raise Declined(f"round {plan.round}'s {error}") from error


def _require_noise(plan: Plan, mechanism: DiscretisedGaussian, job_epsilon: float) -> None:
    try:
        require_noise_as_priced(mechanism, plan.rounds, job_epsilon, plan.mechanism.delta)
    except ParameterError as error:
        raise Declined(f"round {plan.round}'s {error}") from error
