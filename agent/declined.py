"""How a device refuses a round: the errors of admission and of preparation."""

from __future__ import annotations

from dpagent.errors import DpagentError


class Declined(DpagentError):
    """The device does not participate; the text gives the reason."""


class OverBudget(Declined):
    """The budget of the device's owner does not pay for the job."""


class TooLate(Declined):
    """The round would be over before the device sends. That changes when its deadline is put off."""
