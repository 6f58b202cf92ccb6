"""The agent's cycle: rounds in sequence, with the phases in chronological order.

A plan arrives and is *offered*; then the model arrives (:mod:`agent.announcements`), and a receipt of what
left for the round before. The device has the round *priced* (:mod:`agent.pricing`), admits or declines it,
and has the training process *prepare* it (:mod:`agent.worker`), without a look at a record. Then it charges
its ledger. Only then are records read: it trains, in slots that begin at the next point of the device's own
grid, and it spools the fragments of the noisy update. The publisher seals and sends them; receipts empty the
spool. Each step is durable before the next (:mod:`agent.rounds`), so that after a crash at any point the next
start continues from disk.

From the charge on, nothing that a record can cause changes whether, when, and with how many bytes the device
speaks (:mod:`agent.training`). An update that is ready sooner is not taken before the end of the time that
its training has: so what an announcement finds in between does not tell how long training took.

While the governor (:mod:`agent.governor`) holds training back, nothing here goes on: no round is decided on,
whether the device would take part or sit out, nothing is charged, training stands still, and no update is
taken, done or not. A round that is charged gets as many slots more as its pauses last. What is spooled leaves
at its times, and receipts are heeded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from agent.announcements import Announced, Announcements, Model, Phase
from agent.charges import Charge
from agent.data_form import DataForm
from agent.declined import TooLate
from agent.energy import EnergyMeter
from agent.errand import ErrandError
from agent.governor import Governor
from agent.limit_settings import LimitSettings
from agent.limits import require_time_left, require_training_time
from agent.marked_log import PRIVATE
from agent.price_questions import PriceQuestions
from agent.pricing import Prices
from agent.publisher import Publisher, Slots
from agent.sitting_out import Decision, SittingOut
from agent.spooling import RETRY_S, Spooling, try_again
from agent.state import AgentState
from agent.tokens import Tokens, wish_of
from agent.training_messages import Order, UsedProcessError
from agent.underway import Admitted, Deciding, InTraining
from agent.worker import Trains, spent_on
from dpagent import faults
from dpagent.clock import Clock
from dpagent.errors import DpagentError
from dpagent.faults import FaultPoint
from dpagent.protocol.issuing import Wish
from dpagent.protocol.messages import Plan
from dpagent.structured_log import Event, about

log = logging.getLogger(__name__)

_POLL_S: Final = 0.02
"""How often a program looks whether training is done. Nothing that leaves depends on it."""
_ATTEMPTS: Final = 2
"""After so many attempts that ended without an update, a charged round is noise alone."""
_PATIENCE: Final = 4.0
"""A training process is ended that takes so many times longer than its slots, and than any training may."""
_BESIDE_OTHERS: Final = 2.0
"""A preparation counts as one that takes so many times its processor time, where other programs want the same
cores for no longer than that. A look at the data is none of them: it stands still from the decision on until
the update is taken."""


class Cycle:
    """A device's part in the rounds of its fleet.

    Args:
        announcements: the coordinator's.
        dataset: the ledger's name for the device's records.
        limits: the device's own.
        form: of the device's records, which is declared.
        state: ledger, rounds and spool.
        prices: says whether a round may run, and what it costs.
        worker: prepares rounds and trains.
        publisher: sends the spooled fragments.
        tokens: that fragments carry, where a plan asks for them.
        governor: says when the board may train.
        meter: measures the energy of rounds.
        clock: the program's.
        stays_s: how long the training process stays when it has nothing to do, in seconds.
    """

    def __init__(
        self,
        announcements: Announcements,
        dataset: str,
        limits: LimitSettings,
        *,
        form: DataForm,
        state: AgentState,
        prices: Prices,
        worker: Trains,
        publisher: Publisher,
        tokens: Tokens,
        governor: Governor,
        meter: EnergyMeter,
        clock: Clock,
        stays_s: float = 0.0,
    ) -> None:
        self._announcements, self._governor, self._meter = announcements, governor, meter
        self._limits, self._stays_s = limits, stays_s
        self._state, self._worker, self._publisher, self._clock = state, worker, publisher, clock
        self._tokens = tokens
        self._sitting_out = SittingOut(
            announcements, limits, state=state, publisher=publisher, is_member=tokens.is_member, clock=clock
        )
        self._questions = PriceQuestions(
            dataset, limits, form, state=state, prices=prices, tokens=tokens, sitting_out=self._sitting_out,
            clock=clock,
        )  # fmt: skip
        self._spooling = Spooling(
            state, publisher=publisher, tokens=tokens, sitting_out=self._sitting_out, clock=clock
        )
        self._at_work: Deciding | Admitted | InTraining | None = None
        """What the pricing or the training process is at, or would be."""
        self._answers_by = math.inf
        """When it counts as one that never answers (monotonic)."""
        self._worked_at = math.inf
        """When the training process was last asked for something; infinite if it is not there."""
        self._held_since: float | None = None
        """Since when the governor holds training back (monotonic); None: it does not."""

    # The announced round goes on as far as it can.

    def due_in_s(self) -> float:
        """Seconds until :meth:`advance` can do something of its own accord; infinite if a message must
        come."""
        announced, now = self._announcements.current, self._clock.monotonic()
        if self._held_since is not None:
            return self._governor.due_in_s()
        if self._at_work is not None:
            if isinstance(self._at_work, InTraining) and now < self._at_work.over_at:
                return self._at_work.over_at - now
            return 0.0 if self._at_work.answer.done() else _POLL_S
        idle_s = max(0.0, self._worked_at + self._stays_s - now)
        if announced is None or announced.phase is Phase.SETTLED:
            return idle_s
        is_fetched = self._announcements.too_large(announced.plan) is None
        if is_fetched and self._announcements.model_for(announced.plan) is None:
            return min(idle_s, max(0.0, announced.ask_again_at - now))
        if self._sitting_out.waits(announced):
            return idle_s
        if announced.phase is Phase.DECIDE and self._tokens.is_awaited(announced.plan):
            return idle_s  # An answer is an event of its own.
        return max(0.0, announced.begins_at - now)

    def advance(self) -> None:
        """Take the announced round to its next phase, if it is time.

        Raises:
            StorageError: the disk fails; what is charged and not spooled is run again after a restart.
        """
        try:
            self._advance()
        finally:
            if self._at_work is None:
                self._worker.resume_look()

    def _advance(self) -> None:
        self._meter.sample()
        self._questions.tend()
        if self._is_held():
            return
        at_work, announced = self._at_work, self._announcements.current
        if at_work is not None:
            if self.due_in_s() == 0:
                self._at_work = None
                self._take(at_work)
            elif self._clock.monotonic() >= self._answers_by:
                self._end_unanswered(at_work)
            return
        self._end_idle()
        if announced is None or announced.phase is Phase.SETTLED:
            return
        if (reason := self._announcements.too_large(announced.plan)) is not None:
            self._refuse_model(announced, reason)
            return
        model = self._announcements.model_for(announced.plan)
        if model is None:
            self._announcements.wait_for_model(announced)
        elif self._clock.monotonic() < announced.begins_at:
            pass
        elif announced.phase is Phase.DECIDE:
            if not self._sitting_out.waits_for_receipt(announced):
                self._decide(announced, model)
        elif announced.phase is Phase.REPEAT:
            self._repeat(announced, model)

    def _end_unanswered(self, at_work: Deciding | Admitted | InTraining) -> None:
        """End a process that does not answer; with that, it has, or once the system lets go of it."""
        self._answers_by = math.inf
        if isinstance(at_work, Deciding):
            log.error("the pricing process does not answer, and is ended")
            self._questions.end()
        else:
            log.error("the training process does not answer, and is ended")
            self._worker.end()

    def _take(self, at_work: Deciding | Admitted | InTraining) -> None:
        """Take what the pricing or the training process has answered."""
        if isinstance(at_work, Deciding):
            self._take_price(at_work)
            return
        match at_work:
            case Admitted(announced=announced, answer=answer) if (
                announced is self._announcements.current and isinstance(answer.exception(), UsedProcessError)
            ):
                self._begin_again_later(at_work)
            case Admitted():
                self._take_prepared(at_work)
            case InTraining(announced):
                self._worker.resume_look()  # Before another begins.
                self._note_energy(announced.plan)
                if self._spooling.take(at_work):
                    self._worked_at = self._clock.monotonic()
                    self._look()
                self._announcements.training_is_over(announced)

    def _note_energy(self, plan: Plan) -> None:
        """Keep what the board has taken since the charge, for its owner."""
        if (energy := self._meter.end()) is not None:
            log.info("round %d of %d: %s", plan.round, plan.rounds, energy, extra=PRIVATE)
            self._state.note_energy(plan.job.hex(), plan.round, energy)

    def rest(self) -> None:
        """End pricing and training, until they are needed again."""
        self._questions.end()
        self._end_training()

    def _end_training(self) -> None:
        self._worker.end()
        self._worked_at = math.inf

    def _end_idle(self) -> None:
        """End the training process, if it has had nothing to do for long."""
        if self._clock.monotonic() >= self._worked_at + self._stays_s:
            self._end_training()

    def _look(self) -> None:
        """Look at the data, for later rounds, once a training process that does not stay has ended: the board
        has memory for one of them."""
        self._end_idle()
        self._worker.look()

    # The governor holds training back.

    def _is_held(self) -> bool:
        """Whether nothing goes on now."""
        at_work, announced, now = self._at_work, self._announcements.current, self._clock.monotonic()
        waits = announced is not None and announced.phase is not Phase.SETTLED and now >= announced.begins_at
        if at_work is None and not waits:
            self._governor.settle()
            self._held_since = None
            return False
        if self._governor.why_not(begins=at_work is None) is None:
            if self._held_since is not None:
                self._go_on(now - self._held_since)
            return False
        if self._held_since is None:
            self._held_since = now
            match at_work:
                case Deciding() | Admitted():
                    self._begin_again_later(at_work)
                case InTraining(announced):
                    self._worker.pause()
                    announced.fixed_until = math.inf  # Until it is known when its slots end.
        match at_work:
            case None:
                self._end_idle()
            case InTraining() if now >= at_work.over_at and self._spooling.is_replaced(at_work):
                self._at_work = None
                self.rest()
                self._take(at_work)
        return True

    def _begin_again_later(self, admitted: Deciding | Admitted) -> None:
        """Give up a preparation, to begin it in a new process: its trials take their time by the clock, or
        are not to be made in one that has worked. It has read no record."""
        self._at_work, announced = None, admitted.announced
        if isinstance(admitted, Deciding):
            self._questions.end()
        else:
            self.rest()
        announced.phase = Phase.REPEAT if admitted.is_decided else Phase.DECIDE
        if not admitted.is_decided:
            announced.why_not = None

    def _go_on(self, held_s: float) -> None:
        """Training goes on, and has so much longer for its answer. Its slots become as many whole ones more
        as all its pauses last, whether it was done by then or not."""
        self._held_since = None
        if (training := self._at_work) is None:
            return
        assert isinstance(training, InTraining)  # a preparation is given up
        self._worker.resume()
        self._answers_by += held_s
        plan, slots, paused_s = training.plan, training.slots, training.paused_s + held_s
        more = math.ceil(paused_s / self._publisher.slot_s(plan))
        slots = slots._replace(number=slots.number + more)
        self._announcements.put_off(training.announced, slots)
        over_at = self._publisher.training_ends_at(plan, slots)
        self._at_work = replace(training, over_at=over_at, paused_s=paused_s)

    # The device decides. It has read no record.

    def _decide(self, announced: Announced, model: Model, *, is_decided: bool = False) -> None:
        if not is_decided and self._tokens.is_awaited(announced.plan):
            return
        self._worker.hold_look()
        so_far, plan = self._sitting_out.decision(), announced.plan
        if is_decided:
            is_rehearsal = announced.why_not is not None
            answer = self._questions.keeps_to_limits(plan, model, is_rehearsal=is_rehearsal)
        else:
            answer = self._questions.price(plan, model)
        announced.phase = Phase.PREPARE
        self._answers_by = self._clock.monotonic() + self._limits.maximum_training_s
        deciding = Deciding(announced, plan, model, so_far(), answer, is_decided)
        if answer.done():
            self._take_price(deciding)
        else:
            self._at_work = deciding

    def _take_price(self, deciding: Deciding) -> None:
        announced, verdict, decision = deciding.announced, deciding.answer.result(), deciding.decision
        decision = decision._replace(
            priced_s=decision.priced_s + verdict.spent_s, started_s=verdict.started_s
        )
        if announced is not self._announcements.current:  # Another round has begun.
            self._sitting_out.rest(deciding.plan, decision)
            return
        announced.phase = Phase.REPEAT if deciding.is_decided else Phase.DECIDE
        error, why_not = verdict.why_not, None if verdict.why_not is None else str(verdict.why_not)
        if deciding.is_decided:
            self._go_on_or_give_up(deciding, error)
            return
        if isinstance(error, TooLate):
            self._sitting_out.decline_late(announced, str(error), decision)
            return
        wish = Wish.TAKES_PART if error is None else wish_of(error)
        if error is None and (refusal := self._tokens.refusal(announced.plan)) is not None:
            why_not = str(refusal)  # Of this round; rounds ahead are asked for as it would be now.
        asked_from = self._announcements.on_any_grid(decision.began_at)
        reason = None if wish is Wish.TAKES_PART else why_not
        if self._tokens.ask(announced.plan, wish, reason, asked_from):
            # It is decided on again when the answer is there, and no sooner.
            self._announcements.wait_until(self._tokens.begins_at(asked_from))
        elif why_not is None:
            self._prepare(announced, verdict.charges, deciding.model, decision)
        else:
            self._sit_out(announced, deciding.model, why_not, decision)

    def _go_on_or_give_up(self, deciding: Deciding, why_not: DpagentError | None) -> None:
        """Run a charged round again, if it keeps to the device's limits, which may have changed since. One
        that is sat out is rehearsed again, once it has waited for that answer as long."""
        announced, plan = deciding.announced, deciding.plan
        if isinstance(why_not, ErrandError):  # Whether it keeps to them is not known.
            job = plan.job.hex()[:8]
            log.error("round %d of job %s is not begun again yet; trying again", plan.round, job)
            log.error("why round %d is not begun again: %s", plan.round, why_not, extra=PRIVATE)
            announced.begins_at = self._clock.monotonic() + RETRY_S
            return
        if announced.why_not is None:
            if why_not is not None:
                self._sitting_out.give_up(announced, str(why_not))
                return
            log.info("round %d of %d: again, under the charge it has", plan.round, plan.rounds)
        self._questions.kept_to = announced.digest
        self._prepare(announced, (), deciding.model, Decision(self._clock.monotonic()), is_decided=True)

    def _refuse_model(self, announced: Announced, reason: str) -> None:
        """Sit out a round whose model is not fetched."""
        if (now := self._clock.monotonic()) < announced.begins_at:
            return
        if announced.phase is Phase.REPEAT:  # The device's limits have changed since.
            self._sitting_out.give_up(announced, reason)
            return
        self._sitting_out.probe(announced)
        if self._tokens.is_awaited(announced.plan):
            pass
        elif self._tokens.ask(
            announced.plan, Wish.LIMITS, reason, asked_from := self._announcements.on_any_grid(now)
        ):
            self._announcements.wait_until(self._tokens.begins_at(asked_from))
        else:
            self._sitting_out.decline(announced, reason, Decision(now))

    def _sit_out(self, announced: Announced, model: Model, reason: str, decision: Decision) -> None:
        """Decline a round; where dummies hide that, once it is known how many slots training would take."""
        if self._sitting_out.hides(announced.plan):
            announced.why_not = reason
            self._prepare(announced, (), model, decision)
            return
        self._sitting_out.decline(announced, reason, decision)

    def _repeat(self, announced: Announced, model: Model) -> None:
        """Run a charged round again, or the rehearsal of one that is sat out: nothing of it has left."""
        if announced.why_not is None or self._sitting_out.hides(announced.plan):
            self._decide(announced, model, is_decided=True)
        else:  # The device's limits have changed since.
            self._sitting_out.give_up(announced, announced.why_not)

    # The training process prepares the round. It has read no record either.

    def _prepare(
        self, announced: Announced, charges: tuple[Charge, ...], model: Model, decision: Decision,
        *, is_decided: bool = False,
    ) -> None:  # fmt: skip
        self._worker.hold_look()
        announced.phase = Phase.PREPARE
        failure = announced.failure if announced.attempts >= _ATTEMPTS else None
        is_rehearsal = announced.why_not is not None
        answer = self._worker.prepare(
            Order(announced.plan, model.weights, model.assets, failure, is_rehearsal=is_rehearsal)
        )
        self._worked_at = self._clock.monotonic()
        self._answers_by = self._worked_at + self._limits.maximum_training_s
        self._at_work = Admitted(
            announced, announced.plan, charges, decision, self._worked_at, answer, is_decided
        )

    def _take_prepared(self, admitted: Admitted) -> None:
        announced, plan = admitted.announced, admitted.plan
        share = self._governor.processor_share
        decision = admitted.decision._replace(prepared_s=spent_on(admitted.answer) / share)
        if announced is not self._announcements.current:  # Another round has begun.
            self._sitting_out.rest(plan, decision)
            return
        why_not = announced.why_not
        try:
            longest_s, took_s, _ = (seconds / share for seconds in admitted.answer.result())
            require_training_time(longest_s, self._limits)
            slots = self._slots(admitted, longest_s, took_s)
            if not admitted.is_decided:
                ends_at = slots.begins_at + slots.number * self._publisher.slot_s(plan)
                # Its deadline may have been put off meanwhile.
                require_time_left(announced.plan, self._clock.unix(), ends_at - self._clock.monotonic())
        except TooLate as error:
            self._sitting_out.decline_late(announced, why_not or str(error), decision)
            return
        except DpagentError as error:
            if admitted.is_decided:
                try_again(announced, str(error), self._clock)
            else:
                self._sitting_out.decline(announced, why_not or str(error), decision)
            return
        if not admitted.is_decided:
            if why_not is None:
                self._charge(plan, admitted.charges)
            else:
                self._sitting_out.begin(announced, why_not)
            self._questions.kept_to = announced.digest
        self._sitting_out.give_up_others(plan)
        # The slots begin at a point of the grid, so that training has whole ones, whatever came before: the
        # coordinator chooses when the last chunk comes, and how long its plan takes to decide on.
        announced.phase = Phase.TRAIN
        self._announcements.begin_slots(announced, slots)
        over_at = self._publisher.training_ends_at(plan, slots)
        longest_s = max(self._limits.maximum_training_s, slots.number * self._publisher.slot_s(plan))
        self._answers_by = slots.begins_at + _PATIENCE * longest_s
        if why_not is None:
            faults.reached(FaultPoint.AGENT_TRAINS)
        self._meter.begin()
        self._at_work = InTraining(announced, plan, self._worker.update(), slots, over_at)

    def _slots(self, admitted: Admitted, longest_s: float, took_s: float) -> Slots:
        """The time that training has, or would have had the device admitted the round."""
        began_at = admitted.decision.began_at
        prepared_at = max(self._clock.monotonic(), admitted.asked_at + _BESIDE_OTHERS * took_s)
        if admitted.announced.why_not is not None:
            # A plan that is declined may have been slow to price; one that is run is priced once. But each
            # waits until the pricing process has started.
            prepared_at -= admitted.asked_at - began_at - admitted.decision.started_s
        number = self._publisher.slots_for(admitted.plan, longest_s)
        return self._publisher.slots(began_at, number, prepared_at=prepared_at)

    def _charge(self, plan: Plan, charges: Sequence[Charge]) -> None:
        now = self._clock.unix()
        charged_at = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")
        self._state.charge([replace(each, charged_at=charged_at) for each in charges], now)
        spent = "; ".join(self._state.ledger.spending(each.dataset) for each in charges)
        log.info(
            "round %d of %d: charged, %s", plan.round, plan.rounds, spent,
            extra=about(event=Event.ROUND_CHARGED, job=plan.job.hex(), round=plan.round, rounds=plan.rounds),
        )  # fmt: skip
