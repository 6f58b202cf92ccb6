"""The device's own limits on what a plan may ask of it, checked against public values alone."""

from __future__ import annotations

from agent.declined import Declined, TooLate
from agent.limit_settings import LimitSettings
from dpagent.errors import DpagentError
from dpagent.protocol.messages import Plan
from dpagent.protocol.mixing import key_text, seal_for


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
    values = limits.as_dict(only_set=True)
    return ", ".join(f"{name} {_shown(value)}" for name, value in values.items())


def _shown(value: float | bool | tuple[str, ...]) -> str:
    match value:
        case bool():
            return "on" if value else "off"
        case tuple():
            return ", ".join(value) or "none"
        case _:
            return f"{value:g}"


def require_time_left(plan: Plan, now: float, until_it_sends_s: float) -> None:
    """Decline a round that would be over before the device sends.

    Args:
        plan: the round's.
        now: Unix time.
        until_it_sends_s: seconds until its jitter window opens.

    Raises:
        TooLate: it would.
    """
    if plan.deadline < now + until_it_sends_s:
        raise TooLate(
            f"by this board's clock, the round's deadline passes in {plan.deadline - now:.3g} s; the device"
            f" could not send before {until_it_sends_s:.3g} s"
        )


def require_key(plan: Plan) -> None:
    """See that something can be sealed to a plan's key, which shows with any fragment.

    Raises:
        Declined: 32 bytes that are not a point of the curve, or one of small order.
    """
    try:
        seal_for(b"", plan)
    except ValueError as error:
        raise Declined(f"the plan's sealing key is invalid: {error}") from error


def may_send(plan: Plan, limits: LimitSettings, *, is_member: bool) -> bool:
    """Whether fragments can leave for a plan: by a mixer of the owner's, where the owner named any, at times
    that hide what they are there to hide, and with receipts that tell nothing.

    A plan that comes again for a round that is charged may be another one by now.

    Args:
        plan: the round's.
        limits: the device's own.
        is_member: whether the device has a certificate.
    """
    try:
        require_receipts(plan, is_member=is_member)
        require_times(plan, limits)
        require_mixer(plan, limits)
        require_key(plan)
    except DpagentError:
        return False
    return True
