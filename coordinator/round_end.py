"""The end of the open round: when all fragments are in and honest devices have had their time, or at its
deadline."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from coordinator.dead_ends import DeadEnds
from coordinator.own_receipts import HELD_S, OwnReceipts
from coordinator.settings import FleetSettings
from coordinator.store import Store
from dpagent.clock import Clock
from dpagent.protocol.messages import Plan
from dpagent.protocol.task import RoundTask

if TYPE_CHECKING:
    from coordinator.token_office import TokenOffice

log = logging.getLogger(__name__)


class Verdict(Enum):
    """The next step of the open round."""

    COLLECT = auto()
    """Before the deadline, fragments are missing, or honest devices may still be sending."""
    CLOSE = auto()
    """The fragments of all devices that may send are in, after the slot and the jitter of honest ones, or
    those of enough devices at the deadline."""
    EXTEND = auto()
    """At the deadline some block has fragments of too few devices."""
    GIVE_UP = auto()
    """The same, and so many members have declined the round that too few are left for it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the open round.

    Attributes:
        counted: fragments counted.
        expected: fragments of all devices.
        scarcest: fragments of the block with the fewest. A sum over blocks would hide a block without
            fragments behind many fragments of another.
        verdict: the next step.
    """

    counted: int
    expected: int
    scarcest: int
    verdict: Verdict


class RoundEnd:
    """Tells when the open round is over.

    Args:
        settings: ``fleet.yaml``.
        store: the job's database.
        tokens: of members, where fragments have to carry one.
        dead_ends: which rounds will not close.
        own_receipts: receipts on topics of their own that this program holds back.
        clock: the program's.

    Attributes:
        announced_at: when the plan was first on its way to the broker (Unix seconds); None before.
        opened_at: when the round was opened (Unix seconds), before any restart.
    """

    def __init__(
        self,
        settings: FleetSettings,
        *,
        store: Store,
        tokens: TokenOffice | None,
        dead_ends: DeadEnds,
        own_receipts: OwnReceipts,
        clock: Clock,
    ) -> None:
        self._settings, self._store, self._tokens = settings, store, tokens
        self._dead_ends, self._own_receipts, self._clock = dead_ends, own_receipts, clock
        self.announced_at: float | None = None
        self.opened_at = clock.unix()
        self._opened = clock.unix(), clock.monotonic()
        """When the round was opened, or went on after a restart, by both clocks."""
        self._closes_at: float | None = None
        """When the round closes at the latest that has what it needs (monotonic)."""

    def begin(self) -> float:
        """A round is opened, or goes on; return the time (Unix seconds)."""
        self._opened = now, _ = self._clock.unix(), self._clock.monotonic()
        self._closes_at = None
        return now

    def now(self) -> float:
        """Unix time as of the round's opening, and what has passed since: a clock that is set meanwhile
        neither ends a round nor keeps it open."""
        unix, monotonic = self._opened
        return unix + self._clock.monotonic() - monotonic

    def progress(self, task: RoundTask) -> Progress:
        """The progress of the round, and its next step."""
        plan, devices = task.plan, self._settings.devices
        counts = self._store.counts(plan.round)
        scarcest = min(counts.get(position, 0) for position in range(task.release.blocks))
        now = self.now()
        if self._honest_have_sent(now) and self._are_all_in(plan.round, scarcest):
            verdict = Verdict.CLOSE
        elif now < plan.deadline:
            verdict = Verdict.COLLECT
        elif scarcest >= self._dead_ends.minimum:
            verdict = Verdict.CLOSE
        elif self._dead_ends.why(plan.round, self.gone(plan.round, scarcest)) is not None:
            verdict = Verdict.GIVE_UP
        else:
            verdict = Verdict.EXTEND
        return Progress(sum(counts.values()), task.release.blocks * devices, scarcest, verdict)

    def gone(self, number: int, scarcest: int) -> int:
        """Devices that were members when the round opened, are none any more, and of which fragments may
        count in each block.

        Args:
            number: of the round.
            scarcest: fragments of the block with the fewest.
        """
        return 0 if self._tokens is None else min(scarcest, self._tokens.gone(number, self.opened_at))

    def receipts_have_left(self, plan: Plan) -> bool:
        """Whether those on topics of their own have left, which are held back: after the next plan, devices
        would give up what is counted.

        Those of workers have their time, and so have this program's: a device that sends what is counted
        again and again does not keep the round open.
        """
        if plan.receipts == "fleet":
            return True
        now = self._clock.monotonic()
        if self._closes_at is None:
            self._closes_at = now + 2 * HELD_S
        counts_alone = self._settings.store.url is None
        return now >= self._closes_at or (counts_alone and math.isinf(self._own_receipts.due_in_s()))

    def _are_all_in(self, number: int, scarcest: int) -> bool:
        """Whether no device is left that may send: where there are tokens, members that have declined will
        not. What counts may be of devices that have left the fleet meanwhile, so none of it stands for a
        member that has not sent."""
        if scarcest >= self._settings.devices:
            return True
        if self._tokens is None or scarcest < self._dead_ends.minimum:
            return False
        return scarcest - self.gone(number, scarcest) >= self._tokens.expected(number)

    def _honest_have_sent(self, now: float) -> bool:
        """Whether a device that got the plan at once and trained within its slot has had its jitter window.

        Without this, whoever sends the fragments of all devices before the slot ends the round alone.
        """
        return self.announced_at is not None and now >= self.announced_at + self._settings.round.honest_s

    def groups(self, number: int) -> int:
        """Groups that a round's fragments are dealt to. A setting that was changed while the round was open
        holds from the next one on where it needs values that were added up by then."""
        wanted = self._settings.aggregation
        if wanted.dealt == 1 or self._store.keeps_values_of(number):
            return wanted.dealt
        log.warning(
            "round %d closes by the mean of its fragments, under which it began to be counted; "
            "aggregation.kind %s holds from the next round on", number, wanted.kind,
        )  # fmt: skip
        return 1
