"""What the device is at: a round that is priced, one that is prepared, or one that is trained for."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from agent.announcements import Announced, Model
from agent.charges import Charge
from agent.pricing import Verdict
from agent.publisher import Slots
from agent.sitting_out import Decision
from agent.training_messages import Prepared, Update
from dpagent.protocol.messages import Plan


@dataclass(frozen=True, slots=True)
class Deciding:
    """A round that is priced."""

    announced: Announced
    plan: Plan
    model: Model
    decision: Decision
    """As far as it has come: until the pricing process was asked."""
    answer: Future[Verdict]
    is_decided: bool
    """Whether it is charged, and only has to keep to the limits."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A round that the training process prepares."""

    announced: Announced
    plan: Plan
    charges: tuple[Charge, ...]
    """To be made; none: it is charged already, or is sat out."""
    decision: Decision
    """As far as it has come: until the training process was asked."""
    asked_at: float
    answer: Future[Prepared]
    is_decided: bool
    """Whether it is charged, or sat out, whatever comes of it."""


@dataclass(frozen=True, slots=True)
class InTraining:
    """A round that is charged, and for which records are read; or one that is sat out, whose work is done
    without a record."""

    announced: Announced
    plan: Plan
    answer: Future[Update]
    slots: Slots
    """That training has by its trial."""
    over_at: float
    """The update is not taken before (monotonic), however soon it is ready."""
    paused_s: float = 0.0
    """How long it was held back, also after training was done. Public."""
