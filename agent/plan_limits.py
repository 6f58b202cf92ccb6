"""The device's own limits on what a plan means, which needs the plan's task; the others are in
:mod:`agent.limits`."""

from __future__ import annotations

from agent.limit_settings import FRAGMENT_BYTES, LimitSettings
from agent.limits import BeyondLimitError, require_mixer, require_size, require_times
from dpagent.notation import plain_bound
from dpagent.protocol.messages import Plan
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.task import RoundTask
from dpagent.protocol.tokens import fragment_bytes
from dpagent.protocol.update_size import values_of


def require_update_size(task: RoundTask, limits: LimitSettings) -> None:
    """See that the fragments of a round fit the room that was taken for them.

    Raises:
        BeyondLimitError: they do not.
    """
    size = task.release.blocks * (fragment_bytes(task.plan) + FRAGMENT_BYTES)
    if size > limits.maximum_update_mib << 20:
        raise BeyondLimitError(
            "the size of an update in MiB", size / (1 << 20), f"at most {limits.maximum_update_mib}",
            "maximum_update_mib",
        )  # fmt: skip


def require_within(task: RoundTask, limits: LimitSettings) -> None:
    """See that a round stays within the limits, except for its job's ε, which is known once it is priced.

    Raises:
        BeyondLimitError: it does not.
    """
    plan, release = task.plan, task.release
    require_times(plan, limits)
    require_size(plan, limits)
    require_update_size(task, limits)
    # A few values cannot be cut into more fragments than there are.
    if release.blocks < min(limits.minimum_fragments, values_of(plan)):
        raise BeyondLimitError(
            "the number of fragments",
            release.blocks,
            f"at least {limits.minimum_fragments}",
            "minimum_fragments",
        )
    if release.blocks > limits.maximum_fragments:
        raise BeyondLimitError(
            "the number of fragments",
            release.blocks,
            f"at most {limits.maximum_fragments:,}",
            "maximum_fragments",
        )
    if isinstance(release, NoisySum) and release.sampling.rate > limits.maximum_sampling_rate:
        raise BeyondLimitError(
            "the sampling rate", release.sampling.rate, f"at most {limits.maximum_sampling_rate:g}",
            "maximum_sampling_rate",
        )  # fmt: skip
    if limits.maximum_job_delta is not None and plan.delta > limits.maximum_job_delta:
        raise BeyondLimitError(
            "the job's δ",
            plain_bound(plan.delta),
            f"at most {plain_bound(limits.maximum_job_delta)}",
            "maximum_job_delta",
        )
    if plan.linkability not in limits.linkability:
        raise BeyondLimitError(
            "the linkability", plan.linkability, ", ".join(limits.linkability), "linkability"
        )
    if task.method.name not in limits.methods:
        raise BeyondLimitError("the method", task.method.name, ", ".join(limits.methods), "methods")
    if not (release.mechanism.is_private or limits.allow_unproven):
        raise BeyondLimitError("the guarantee", "none", "proven ones alone", "allow_unproven")
    require_trusted(task, limits)
    require_mixer(plan, limits)


def require_trusted(task: RoundTask, limits: LimitSettings) -> None:
    """See that a round has a guarantee that rests on nobody else than the owner allows.

    Raises:
        BeyondLimitError: it has none.
    """
    if not any(each.mechanism.trust in limits.trust for each in task.priced):
        raise BeyondLimitError(
            "the trusted party", task.release.mechanism.trust, ", ".join(limits.trust), "trust"
        )


def require_room_for_charges(plan: Plan, charges: int, accounts: int, limits: LimitSettings) -> None:
    """See that the ledger has room for the rounds that a job has left.

    Args:
        plan: of the first round that an account pays for.
        charges: that the ledger has.
        accounts: that each round is charged to.
        limits: the device's own.

    Raises:
        BeyondLimitError: it has not.
    """
    if (wanted := charges + accounts * (plan.rounds - plan.round + 1)) > limits.maximum_charges:
        raise BeyondLimitError(
            "the number of charges in the ledger, with the rounds of this job,", wanted,
            f"at most {limits.maximum_charges:,}", "maximum_charges",
        )  # fmt: skip


def require_price(job_epsilon: float, limits: LimitSettings) -> None:
    """See that a job's ε stays within the limits.

    Raises:
        BeyondLimitError: it does not.
    """
    if limits.maximum_job_epsilon is not None and job_epsilon > limits.maximum_job_epsilon:
        raise BeyondLimitError(
            "the job's ε",
            plain_bound(job_epsilon),
            f"at most {plain_bound(limits.maximum_job_epsilon)}",
            "maximum_job_epsilon",
        )
