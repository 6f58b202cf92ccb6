"""What training comes to goes into the spool: the fragments of an update, or the dummies of a rehearsal.

It is taken at the end of the slots that training has, however soon it was ready (:mod:`agent.cycle`). From
there on everything that leaves has its times.
"""

from __future__ import annotations

import logging
from typing import Final

from agent.announcements import Announced, Phase
from agent.marked_log import PRIVATE
from agent.publisher import Publisher
from agent.rounds import RoundState
from agent.sitting_out import SittingOut
from agent.spool import SpooledFragment
from agent.state import AgentState
from agent.tokens import Tokens
from agent.underway import InTraining
from dpagent.clock import Clock
from dpagent.errors import said
from dpagent.structured_log import Event, about

log = logging.getLogger(__name__)

RETRY_S: Final = 10.0
"""The next attempt at a round begins after this time."""


class Spooling:
    """Takes what the training process answers.

    Args:
        state: ledger, rounds and spool.
        publisher: sends what is spooled.
        tokens: that fragments carry, where a plan asks for them.
        sitting_out: ends rounds that are sat out.
        clock: the program's.
    """

    def __init__(
        self,
        state: AgentState,
        *,
        publisher: Publisher,
        tokens: Tokens,
        sitting_out: SittingOut,
        clock: Clock,
    ) -> None:
        self._state, self._publisher, self._tokens = state, publisher, tokens
        self._sitting_out, self._clock = sitting_out, clock

    def is_replaced(self, training: InTraining) -> bool:
        """Whether another round has replaced one that trains: nothing of it will leave."""
        plan = training.announced.plan
        known = self._state.round(plan.job.hex(), plan.round)
        return known is None or known.state not in (RoundState.CHARGED, RoundState.SITTING_OUT)

    def take(self, training: InTraining) -> bool:
        """Spool what came of training, once it is over.

        Returns:
            Whether the round is over with that; else it is tried again.

        Raises:
            StorageError: the disk fails.
        """
        if training.announced.why_not is not None:
            return self._take_rehearsal(training, training.announced.why_not)
        return self._take_update(training)

    def _take_update(self, training: InTraining) -> bool:
        announced, plan = training.announced, training.plan
        # Also if a plan of another job came in between: the coordinator may come back to this one.
        known = self._state.round(plan.job.hex(), plan.round)
        if known is None or known.state is not RoundState.CHARGED:
            training.answer.exception()  # A later round, or the end of the job, has been announced.
            announced.phase = Phase.SETTLED
            return True
        try:
            update = training.answer.result()
            carried = self._tokens.carried(update.fragments, plan)
            fragments = [
                SpooledFragment.of(fragment, lets_go_on=plan.linkability == "none") for fragment in carried
            ]
        except Exception as error:  # noqa: BLE001 - no record can cause it
            try_again(announced, said(error), self._clock)
            return False
        self._state.spool_round(plan.job.hex(), plan.round, fragments, self._clock.unix(), update.failure)
        announced.phase = Phase.SETTLED
        self._publisher.draw_times()
        log.info(
            "round %d of %d: spooled", plan.round, plan.rounds,
            extra=about(event=Event.ROUND_SPOOLED, job=plan.job.hex(), round=plan.round, rounds=plan.rounds),
        )  # fmt: skip
        if update.failure is not None:
            log.error("no record counts in round %d: %s", plan.round, update.failure, extra=PRIVATE)
        return True

    def _take_rehearsal(self, rehearsal: InTraining, why_not: str) -> bool:
        """Dummies leave as an update would, and no sooner where the training process has to do its work
        again."""
        announced = rehearsal.announced
        if self._sitting_out.is_open(announced.plan):
            try:
                rehearsal.answer.result()
            except Exception as error:  # noqa: BLE001 - as with an update
                try_again(announced, said(error), self._clock)
                return False
        self._sitting_out.decline_after(announced, why_not)
        return True


def try_again(announced: Announced, reason: str, clock: Clock) -> None:
    """Let a round be tried again that has no update: the training process has ended, or no noise can be
    drawn.

    Args:
        announced: the round.
        reason: for the owner of the device.
        clock: the program's.
    """
    announced.attempts += 1
    announced.failure = reason
    plan = announced.plan
    log.error("round %d of job %s has no update yet; trying again", plan.round, plan.job.hex()[:8])
    log.error("why round %d has no update yet: %s", plan.round, reason, extra=PRIVATE)
    announced.phase = Phase.REPEAT
    announced.begins_at = clock.monotonic() + RETRY_S
