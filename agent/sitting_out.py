"""Rounds that a device sits out: it declines them, or gives up a charged one that its limits exclude by now.

If the owner of the device wants that to stay hidden (``limits.dummy_traffic``), a dummy leaves in the place
of each fragment, when an update would. The training process does the work of an update, without a record, and
its failures have the same consequences. What a device that takes part writes to its disk has a counterpart:
the charge, and the end of what other rounds have still to send, where its slots begin; the update, where they
end. So a power cut, a plan of another job, or a disk that is slow or full is met in the same state. A round
for which the device is *too late* gets no dummies: one that takes part would be as late, and as silent. So
that round alone is decided on again when its deadline is put off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from agent.announcements import Announced, Announcements, Phase, log_expired
from agent.limit_settings import LimitSettings
from agent.limits import BeyondLimitError, may_send, require_room_for_job
from agent.probes import probe_for
from agent.publisher import Publisher, Slots
from agent.spool import SpooledFragment
from agent.state import AgentState
from dpagent.clock import Clock
from dpagent.protocol.dummies import MAX_DUMMIES, dummies_for
from dpagent.protocol.messages import Plan
from dpagent.protocol.update_size import blocks_of
from dpagent.structured_log import Event, about

log = logging.getLogger(__name__)

_REST: Final = 9.0
"""After a decision that took t seconds of processor time and led to no charge, the next one waits at least
this many times t: a coordinator whose plans are slow to price takes a tenth of the board's time, not all of
it. Not where dummies leave as an update would; see also :meth:`SittingOut.rest`."""


class Decision(NamedTuple):
    """What it took to decide on a round that was not charged. Public: it has read no record.

    The rest after it counts processor time alone: other programs may want the same core meanwhile.

    Attributes:
        began_at: monotonic seconds.
        priced_s: processor time of the price, in seconds.
        prepared_s: processor time of the training process and its forks, in seconds.
        started_s: for which it waited, by the clock, until the pricing process had started: whatever that
            answers, so also where the device takes part.
    """

    began_at: float
    priced_s: float = 0.0
    prepared_s: float = 0.0
    started_s: float = 0.0


class SittingOut:
    """Ends the rounds that a device sits out.

    Args:
        announcements: the coordinator's.
        limits: the device's own.
        state: ledger, rounds and spool.
        publisher: sends the dummies.
        is_member: whether the device may ask for tokens, by name.
        clock: the program's.
    """

    def __init__(
        self,
        announcements: Announcements,
        limits: LimitSettings,
        *,
        state: AgentState,
        publisher: Publisher,
        is_member: bool,
        clock: Clock,
    ) -> None:
        self._announcements, self._limits = announcements, limits
        self._state, self._publisher, self._clock = state, publisher, clock
        self._is_member = is_member

    def hides(self, plan: Plan) -> bool:
        """Whether dummies leave in place of a round's fragments: the owner wants them, the plan's times hide
        them, and it stays on record that they have left."""
        try:
            self.require_room(plan)
        except BeyondLimitError:
            return False
        return self._limits.dummy_traffic and self._may_send(plan)

    def _may_send(self, plan: Plan) -> bool:
        return may_send(plan, self._limits, is_member=self._is_member)

    def require_room(self, plan: Plan) -> None:
        """See that it stays on record that a plan's round was decided on.

        Raises:
            BeyondLimitError: it would not; whether the device would take part or sit out, it is silent.
        """
        require_room_for_job(self._state.jobs_beside(plan.job.hex()), self._limits)

    def decision(self) -> Callable[[], Decision]:
        """What a decision that begins now has taken so far, whenever that is asked."""
        began_at, before_s = self._clock.monotonic(), self._clock.processor()
        return lambda: Decision(began_at, self._clock.processor() - before_s)

    def waits_for_receipt(self, announced: Announced) -> bool:
        """Whether a round is not decided on yet, because no receipt has come of the last one.

        If what this device publishes does not arrive, each further round would spend budget for nothing. So
        it asks for a receipt: a probe of the round leaves (through a mixer, one for each block), which costs
        no budget and follows from the plan alone. Whether it waits follows from the coordinator's receipts
        alone.

        A device that may ask for tokens goes on by probes alone, in rounds without tokens too: which rounds
        have some is the plan's word, and with the next one that has, it says by name how many entries its
        ledger has come to. So it has a probe in each round: see :meth:`probe`.

        Args:
            announced: the round.
        """
        plan, waited = announced.plan, announced.waits
        announced.waits = self._awaits_receipt(plan)
        if announced.waits and not waited:
            log.warning(
                "round %d of job %s waits: no receipt has come of what this board published for the round "
                "before. The network may be slow, or the broker refuse it: `dpagent doctor` tries that",
                plan.round, plan.job.hex()[:8],
            )  # fmt: skip
            self._keep_probes(announced)
        self.probe(announced)
        return announced.waits

    def probe(self, announced: Announced) -> None:
        """See that a round has its probe, if the device may ask for tokens, or hides that it may not: before
        it decides whether it takes part, and whatever that will be.

        Args:
            announced: the round.
        """
        has_tokens = announced.plan.linkability != "none"
        if self._is_member or (has_tokens and self.hides(announced.plan)):
            self._keep_probes(announced)

    def waits(self, announced: Announced) -> bool:
        """Whether a round waits for a receipt that has not come yet."""
        return announced.waits and self._awaits_receipt(announced.plan)

    def _awaits_receipt(self, plan: Plan) -> bool:
        return self._state.awaits_receipt(plan.job.hex(), by_probe=self._is_member)

    def _keep_probes(self, announced: Announced) -> None:
        if announced.has_probes:
            return
        announced.has_probes, plan = True, announced.plan
        job, is_late = plan.job.hex(), plan.deadline < self._clock.unix() + plan.compute_slot_s
        if is_late or not self._may_send(plan) or self._state.has_probes(job, plan.round):
            return
        # A mixer holds fewer messages back than a device sends for a round.
        needs_all = plan.mixer is not None and announced.waits
        blocks = min(blocks_of(plan), MAX_DUMMIES) if needs_all else 1
        self._state.keep_probes(job, plan.round, [probe_for(plan, position) for position in range(blocks)])
        self._publisher.open_window(plan, self._publisher.slots(self._clock.monotonic()).begins_at)
        self._announcements.draw_probe_times()

    def begin(self, announced: Announced, reason: str) -> None:
        """Sit out a round of which it is known how long training would take."""
        plan = announced.plan
        log.warning("sitting out round %d of job %s: %s", plan.round, plan.job.hex()[:8], reason)
        self._state.sit_out(plan.job.hex(), plan.round, announced.digest, reason, self._clock.unix())

    def give_up_others(self, plan: Plan) -> None:
        """A round is charged, or sat out: what others have still to send leaves no more."""
        job = plan.job.hex()
        log_expired(self._state.expire_other_rounds(job, plan.round, self._clock.unix()))
        self._state.forget_other_jobs(job)

    def decline(self, announced: Announced, reason: str, decision: Decision) -> None:
        """Decline a round without knowing how long training would take; its dummies leave after one slot.

        Args:
            announced: the round.
            reason: for the owner.
            decision: that it took.
        """
        dummies = self._dummies(announced.plan)
        self._settle(announced, reason, dummies)
        self._schedule(announced, self._publisher.slots(decision.began_at), dummies)
        self.rest(announced.plan, decision)

    def decline_after(self, announced: Announced, reason: str) -> None:
        """Decline a round at the end of the time that its training would have had; its dummies leave now.

        A round that another has replaced meanwhile is left as it is: an update would not leave either.
        """
        plan = announced.plan
        if not self.is_open(plan):
            announced.phase = Phase.SETTLED
            return
        self._spool(announced, reason, self._dummies(plan))
        self._publisher.draw_times()

    def is_open(self, plan: Plan) -> bool:
        """Whether the device is sitting a round out, and no other has replaced it."""
        return self._state.sitting_out(plan.job.hex(), plan.round) is not None

    def decline_late(self, announced: Announced, reason: str, decision: Decision) -> None:
        """Decline a round for its deadline alone, in silence; see :meth:`decline`."""
        self._settle(announced, reason, [])
        self.rest(announced.plan, decision)

    def rest(self, plan: Plan, decision: Decision) -> None:
        """Let no decision begin for several times as long as the last one took, which led to no charge.

        Where dummies hide that a device sits out, the rest ends as if there had been no price, which a device
        may have declined before, and at a point of the grid: one plan a period is priced at most.

        Args:
            plan: that was decided on.
            decision: that it took.
        """
        began_at, priced_s, prepared_s, _ = decision
        if self.hides(plan):
            begins_at, _, sought_from = self._publisher.slots(began_at + (1 + _REST) * prepared_s)
            self._announcements.wait_until(begins_at, sought_from + self._publisher.period_s)
        else:
            self._announcements.wait_until(began_at + (1 + _REST) * (priced_s + prepared_s))

    def give_up(self, announced: Announced, reason: str) -> None:
        """Give up a round that is charged, or being sat out, and of which nothing has left."""
        plan, dummies = announced.plan, self._dummies(announced.plan)
        log.warning(
            "round %d of job %s is given up: %s", plan.round, plan.job.hex()[:8], reason,
            extra=about(event=Event.ROUND_GIVEN_UP, job=plan.job.hex(), round=plan.round, reason=reason),
        )  # fmt: skip
        announced.phase = Phase.SETTLED
        if announced.why_not is not None:
            self._spool(announced, reason, dummies)
        elif dummies:
            self._state.give_up(plan.job.hex(), plan.round, self._clock.unix(), dummies)
        self._schedule(announced, self._publisher.slots(self._clock.monotonic()), dummies)

    def _spool(self, announced: Announced, reason: str, dummies: list[SpooledFragment]) -> None:
        """End a round that is being sat out; its dummies, unless the limits have changed, leave."""
        plan = announced.plan
        if not dummies:
            self._settle(announced, reason, [])
            return
        self._announcements.settle_declined(announced)
        self._state.spool_dummies(plan.job.hex(), plan.round, dummies, self._clock.unix())

    def _settle(self, announced: Announced, reason: str, dummies: list[SpooledFragment]) -> None:
        plan = announced.plan
        self._announcements.settle_declined(announced)
        log.warning(
            "declined round %d of job %s: %s", plan.round, plan.job.hex()[:8], reason,
            extra=about(event=Event.ROUND_DECLINED, job=plan.job.hex(), round=plan.round, reason=reason),
        )  # fmt: skip
        self._state.decline(plan.job.hex(), plan.round, reason, self._clock.unix(), dummies)

    def _dummies(self, plan: Plan) -> list[SpooledFragment]:
        if self.hides(plan):
            return [
                SpooledFragment.of(dummy, lets_go_on=plan.linkability == "none")
                for dummy in dummies_for(plan)
            ]
        return []

    def _schedule(self, announced: Announced, slots: Slots, dummies: list[SpooledFragment]) -> None:
        """Give dummies the times that fragments would have, had the device decided at once to take part."""
        if dummies:
            self.give_up_others(announced.plan)
            self._announcements.begin_slots(announced, slots)
            self._publisher.draw_times()
