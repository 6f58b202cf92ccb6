"""The device's own limits on what a plan may ask of it, checked against public values alone."""

from __future__ import annotations

from agent.ledger_room import FRAGMENT_BYTES
from agent.limit_settings import LimitSettings
from dpagent.errors import DpagentError
from dpagent.protocol.messages import Plan
from dpagent.protocol.mixing import key_text
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.task import RoundTask, values_of
from dpagent.protocol.tokens import fragment_bytes


class BeyondLimitError(DpagentError):
    """A plan asks for more than the device allows."""

    def __init__(self, what: str, value: float | str, expected: str, key: str) -> None:
        shown = value if isinstance(value, str) else f"{value:g}"
        super().__init__(f"{what} is {shown}; this device accepts {expected} (limits.{key} in agent.yaml)")


class UnwantedReceiptsError(DpagentError):
    """A plan would have receipts link the connections of a device that has no certificate."""


def require_times(plan: Plan, limits: LimitSettings) -> None:
    """See that a plan's times hide what they are there to hide.

    Raises:
        BeyondLimitError: one is too short.
    """
    for what, value, least, key in (
        ("the compute slot in seconds", plan.compute_slot_s, limits.minimum_compute_slot_s,
         "minimum_compute_slot_s"),
        ("the jitter window in seconds", plan.jitter_window_s, limits.minimum_jitter_window_s,
         "minimum_jitter_window_s"),
    ):  # fmt: skip
        if value < least:
            raise BeyondLimitError(what, value, f"at least {least:g}", key)


def require_size(plan: Plan, limits: LimitSettings) -> None:
    """See that weights and assets of a plan may be fetched.

    Raises:
        BeyondLimitError: they are too large.
    """
    size = plan.model.size + sum(asset.size for asset in plan.assets)
    if size > limits.maximum_model_mib << 20:
        raise BeyondLimitError(
            "the size of the model in MiB", size / (1 << 20), f"at most {limits.maximum_model_mib}",
            "maximum_model_mib",
        )  # fmt: skip


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
            "the job's δ", plan.delta, f"at most {limits.maximum_job_delta:g}", "maximum_job_delta"
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


def require_mixer(plan: Plan, limits: LimitSettings) -> None:
    """See that a plan's mixer is one that the owner trusts, where the owner named any.

    Raises:
        BeyondLimitError: it is another, or it is missing.
    """
    if not limits.mixer_keys or (plan.mixer is None and not limits.require_mixer):
        return
    named = "none" if plan.mixer is None else key_text(plan.mixer)
    if named not in limits.mixer_keys:
        raise BeyondLimitError("the mixer", named, ", ".join(limits.mixer_keys), "mixer_keys")


def require_receipts(plan: Plan, *, is_member: bool) -> None:
    """See that the receipts of a round tell the broker nothing that it does not see anyway.

    A fragment that is sent again after a lost connection has its receipt on the same topic: so this broker,
    or who runs it, knows the new connection for one of the same board. By its certificate it does so in any
    case.

    Args:
        plan: the round's.
        is_member: whether the device has a certificate.

    Raises:
        UnwantedReceiptsError: they would.
    """
    if plan.receipts == "fragment" and not is_member:
        raise UnwantedReceiptsError(
            "receipts come on topics of their own, which would show the broker what connections are this "
            "board's, and it has no certificate: enrol with `dpagent enrol`, or have the operator set "
            "receipts: fleet"
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


def require_room_for_job(jobs_beside: int | None, limits: LimitSettings) -> None:
    """See that a job's last round can stay on record, whether the device takes part or sits out.

    Args:
        jobs_beside: of which a round was ever decided on; None if the job is one of them.
        limits: the device's own.

    Raises:
        BeyondLimitError: it can not.
    """
    if jobs_beside is not None and jobs_beside >= limits.maximum_charges:
        raise BeyondLimitError(
            "the number of jobs, with this one,", jobs_beside + 1, f"at most {limits.maximum_charges:,}",
            "maximum_charges",
        )  # fmt: skip


def require_price(job_epsilon: float, limits: LimitSettings) -> None:
    """See that a job's ε stays within the limits.

    Raises:
        BeyondLimitError: it does not.
    """
    if limits.maximum_job_epsilon is not None and job_epsilon > limits.maximum_job_epsilon:
        raise BeyondLimitError(
            "the job's ε", job_epsilon, f"at most {limits.maximum_job_epsilon:g}", "maximum_job_epsilon"
        )


def require_training_time(longest_s: float, limits: LimitSettings) -> None:
    """See that training stays within the limits, as long as it may take with the largest lot.

    Raises:
        BeyondLimitError: it does not.
    """
    if longest_s > limits.maximum_training_s:
        raise BeyondLimitError(
            "the time of training in seconds, by a trial,", longest_s,
            f"at most {limits.maximum_training_s:g}", "maximum_training_s",
        )  # fmt: skip


def shown(limits: LimitSettings) -> str:
    """The limits in a line, for the log."""
    values = limits.model_dump(exclude_none=True)
    return ", ".join(f"{name} {_shown(value)}" for name, value in values.items())


def _shown(value: float | bool | tuple[str, ...]) -> str:
    match value:
        case bool():
            return "on" if value else "off"
        case tuple():
            return ", ".join(value) or "none"
        case _:
            return f"{value:g}"
