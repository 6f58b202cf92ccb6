"""A worked example of a message field: a plan that says how much memory its model takes."""

from __future__ import annotations

from typing import Annotated

from dpagent.protocol import messages
from dpagent.schema.limits import Limits


class Plan(messages.Plan):
    """A plan with one field more."""

    training_memory_mib: Annotated[int, Limits(ge=1, le=1_048_576)]
    """Memory that a device needs to train the model, in MiB."""
