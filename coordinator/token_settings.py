"""The section ``tokens`` of ``fleet.yaml``: one-time tokens, and what the fleet grants a device."""

from __future__ import annotations

from typing import Annotated

from dpagent.protocol.tokens import MAX_ROUNDS_AHEAD
from dpagent.schema.limits import Limits
from dpagent.settings import Settings


class TokenSettings(Settings):
    """One-time tokens. They are used where ``linkability`` is not ``none``."""

    rounds_ahead: Annotated[int, Limits(ge=0, lt=MAX_ROUNDS_AHEAD)] = 3
    """Rounds after the open one whose tokens devices may ask for."""
    device_epsilon: Annotated[float, Limits(gt=0, le=1000)] | None = None
    """Largest ε that a device may be granted over all jobs of the fleet, of which each counts as a whole, in
    each column of its own; beyond it a device gets no tokens. By default the devices' own budgets are the
    only limit."""
