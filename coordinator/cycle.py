"""The coordinator's cycle: rounds in sequence, with the phases in chronological order.

The coordinator opens and announces a round; it opens, checks, counts and acknowledges fragments; when all
devices' fragments are in and honest ones have had their time, or at the deadline, it closes the round: mean,
cap, step, evaluation, all stored in one transaction. All state is in the database: after a crash at any
point, the next start continues the open round, and announces it again so that devices resend missing
fragments.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator import passed_rounds
from coordinator.aggregation import Step, median_of_means
from coordinator.announcer import Announcer
from coordinator.columns import spent_columns
from coordinator.dead_ends import DeadEnds, Halt
from coordinator.intake import Intake
from coordinator.job import Job
from coordinator.measurements import Traffic
from coordinator.models import ModelFiles
from coordinator.planning import Planner
from coordinator.round_end import Progress, RoundEnd, Verdict
from coordinator.seats import Sums
from coordinator.settings import FleetSettings
from coordinator.stepping import Stepper
from coordinator.store import OpenRound, RoundResult, Shown, Store
from dpagent import faults
from dpagent.clock import Clock
from dpagent.faults import FaultPoint
from dpagent.learning.inference.evaluation import Evaluation
from dpagent.notation import upwards
from dpagent.privacy.covariance import SecondMoments
from dpagent.privacy.mechanisms.bounded import CapNotMetError
from dpagent.protocol.codec import encode
from dpagent.protocol.messages import Plan
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.task import Release, RoundTask
from dpagent.protocol.weights import weights_to_bytes
from dpagent.structured_log import Event, Fields, about
from dpagent.wording import counted

if TYPE_CHECKING:
    from coordinator.token_office import TokenOffice

log = logging.getLogger(__name__)


class Cycle:
    """The rounds of one job.

    Args:
        settings: ``fleet.yaml``.
        job: with its terms at the start.
        store: the job's database.
        planner: makes plans.
        stepper: steps the model.
        models: the job's files and its evaluation.
        intake: takes fragments.
        announcer: publishes to the fleet.
        tokens: of members, where fragments have to carry one.
        clock: the program's.
    """

    def __init__(
        self,
        settings: FleetSettings,
        job: Job,
        *,
        store: Store,
        planner: Planner,
        stepper: Stepper,
        models: ModelFiles,
        intake: Intake,
        announcer: Announcer,
        tokens: TokenOffice | None,
        clock: Clock,
    ) -> None:
        self._settings, self._job = settings, job
        self._store, self._planner, self._stepper, self._models = store, planner, stepper, models
        self._intake, self._announcer, self._tokens, self._clock = intake, announcer, tokens, clock
        self._dead_ends = DeadEnds(
            tokens, models.name, rounds=settings.rounds, minimum=settings.round.minimum_devices,
            first_round=models.first_round,
        )  # fmt: skip
        self._model = store.model()
        self._task: RoundTask | None = None
        self._end = RoundEnd(
            settings, store=store, tokens=tokens, dead_ends=self._dead_ends,
            own_receipts=announcer.own_receipts, clock=clock,
        )  # fmt: skip
        self._traffic_before = announcer.traffic()
        self._is_spent = False
        self._deadline_s = settings.round.deadline_s

    @property
    def _sent(self) -> bytes:
        """The weights as devices get them: a function of the exact ones, so that a restart sends the same."""
        return weights_to_bytes(self._model.weights, self._settings.model.precision)

    @property
    def is_over(self) -> bool:
        """Whether all rounds of the job are closed, or what is left of its ε meets no further cap."""
        return self._is_spent or self._store.over_rounds() >= self._settings.rounds

    @property
    def is_open(self) -> bool:
        """Whether a round is open."""
        return self._task is not None

    @property
    def blocks(self) -> int:
        """Blocks of an update in the open round; 0 without one."""
        return 0 if self._task is None else self._task.release.blocks

    def activity(self) -> str:
        """What the coordinator does, in a line for its operator."""
        if self._task is None:
            return "between rounds"
        return f"round {self._task.plan.round} of {self._settings.rounds} is open"

    def advance(self) -> None:
        """Close or extend the open round when due, and open the next one if none is open."""
        if self._task is not None:
            progress = self.progress()
            match progress.verdict:
                case Verdict.COLLECT:
                    pass
                case Verdict.CLOSE:
                    if self._end.receipts_have_left(self._task.plan):
                        self._close(progress)
                case Verdict.EXTEND:
                    self._extend(progress)
                case Verdict.GIVE_UP:
                    self._stop(progress)
                    return
        if self._task is None and not self.is_over and self._may_go_on():
            self.open()

    # A round is opened and announced.

    def open(self) -> None:
        """Open the next round, or continue the open one after a restart, and announce it.

        The job is over where its ``bounded`` cap leaves no further round.
        """
        self._write_latest()
        now = self._end.begin()
        current = self._store.open_round()
        number = self._store.over_rounds() + 1 if current is None else current.number
        opened_at = now if current is None else current.opened_at
        current = OpenRound(number, opened_at, now + self._deadline_s)
        if self._models.add_export(self._job, number):
            self._announcer.assets_changed()
        try:
            task = self._task_of(current)
        except CapNotMetError as error:
            log.error("the job ends after %s. %s", counted(number - 1, "round"), error)
            self._is_spent = True
            return
        key = None
        if self._tokens is not None:
            self._tokens.open(number)
            key = self._tokens.round_key(number)
        keys = None if self._tokens is None else self._tokens.encoded_keys()
        shown = Shown(self._settings.devices, encode(task.plan), keys)
        opened = self._store.start_round(number, opened_at, current.deadline, shown)
        if opened is None:
            log.info("round %d is not opened: the job is paused or cancelled", number)
            return
        self._end.announced_at = opened.announced_at and min(opened.announced_at, now)
        self._end.opened_at = opened.opened_at
        self._task = task
        self._intake.begin(task, key)
        self.announce()

    def _task_of(self, current: OpenRound) -> RoundTask:
        """The task of a round that opens, or goes on.

        Raises:
            CapNotMetError: What is left of ε meets no cap of it.
        """
        return self._planner.task(
            current,
            self._sent,
            clip_norm=self._model.clip_norm,
            radii=self._model.radii,
            spent=self._store.epsilon_spent(),
            assets=self._models.assets,
        )

    def change_deadline(self, deadline_s: float) -> None:
        """Give rounds another deadline, in seconds; an open one has all of it from now on, and is announced
        again."""
        self._deadline_s = deadline_s
        if self._task is not None:
            self.open()

    def change_minimum(self, minimum: int) -> None:
        """Let rounds close with so many devices, the open one too."""
        self._dead_ends.minimum = minimum

    def give_up(self) -> None:
        """Give up the open round by its operator's order; the job is paused.

        Boards that have not begun must not begin: to them the plan says that its time is over, and the round
        is given up when the broker has taken that. Until then the order waits.
        """
        current = self._store.open_round()
        if current is None:
            return
        # Before the round began, also by a board's clock that is behind, or by ours that was set back.
        ended = min(current.opened_at, self._clock.unix())
        task = self._task_of(replace(current, deadline=ended))
        if self._announcer.end_round(task.plan):
            # The key first: a job that is paused is not taken up after a crash in between, to erase it.
            if self._tokens is not None:
                self._tokens.give_up(current.number)
            self._give_up(current)

    def announce(self) -> None:
        """Publish the open round, if there is one; without a connection, on the next one."""
        if self._task is None:
            return
        plan = self._task.plan
        if self._tokens is not None:
            self._tokens.announce()
        is_out = self._announcer.announce(plan, self._sent, self._models.assets)
        if is_out and self._end.announced_at is None:
            self._end.announced_at = self._end.now()
            self._store.mark_announced(plan.round, self._end.announced_at)

    def take_fragments(self, payloads: Sequence[bytes]) -> None:
        """Count each valid fragment exactly once, and send receipts."""
        self._intake.take(payloads)

    def take_announcement(self, plan: Plan) -> None:
        """Look at a plan that the broker has from this fleet's coordinator, which may be this program."""
        number = self._store.over_rounds() + 1
        if plan.job == self._job.id and plan.round > max(number, self._store.passed_round()):
            self._store.note_passed_round(plan.round)
            log.error("this coordinator is at round %d. %s", number, passed_rounds.in_words(plan.round))

    def progress(self) -> Progress:
        """The progress of the open round, and its next step."""
        assert self._task is not None
        return self._end.progress(self._task)

    # It has too few fragments at its deadline.

    def _extend(self, progress: Progress) -> None:
        """Keep the round open for another deadline, and announce it again."""
        assert self._task is not None
        if (passed := self._store.passed_round()) >= self._task.plan.round:
            log.error("round %d has no end. %s", self._task.plan.round, passed_rounds.in_words(passed))
        log.warning(
            "round %d has %d of %s at its deadline, but only %d of one block, fewer than the %d needed; "
            "it stays open for another %g s. %s",
            self._task.plan.round, progress.counted, counted(progress.expected, "fragment"),
            progress.scarcest, self._dead_ends.minimum, self._deadline_s, self._dead_ends.why_few(),
            extra=self._about(Event.ROUND_EXTENDED, self._task.plan.round),
        )  # fmt: skip
        self.open()

    def _stop(self, progress: Progress) -> None:
        """Give up the open round, which will not close, and pause the job.

        Raises:
            PlanError: No later round can do without it.
        """
        current = self._store.open_round()
        assert current is not None
        assert self._tokens is not None
        number = current.number
        halt = self._dead_ends.halt(number, is_open=True, gone=self._end.gone(number, progress.scarcest))
        # The key first: a job that is paused is not taken up after a crash in between, to erase it.
        self._tokens.give_up(number)
        self._give_up(current, halt)
        self._say_halted(halt)

    def _may_go_on(self) -> bool:
        """Whether the next round may open. If it is known that it would not close, the job is paused.

        Raises:
            PlanError: No later round can do without it.
        """
        number = self._store.over_rounds() + 1
        if self._store.open_round() is not None or self._dead_ends.why(number) is None:
            return True
        halt = self._dead_ends.halt(number, is_open=False)
        self._store.halt(halt, self._clock.unix())
        self._say_halted(halt)
        return False

    def _say_halted(self, halt: Halt) -> None:
        log.error(
            "job %s is paused: %s", self._models.name, halt.trouble,
            extra=about(event=Event.JOB_PAUSED, job=self._job.id.hex(), job_name=self._models.name,
                        reason=halt.trouble),
        )  # fmt: skip

    # The round is closed: mean, cap, step, evaluation, all in one transaction.

    def _close(self, progress: Progress) -> None:
        assert self._task is not None
        task = self._task
        faults.reached(FaultPoint.COORDINATOR_CLOSES)
        if progress.scarcest < self._settings.devices:
            at_deadline = self._end.now() >= task.plan.deadline
            log.log(
                logging.WARNING if at_deadline else logging.INFO,
                "round %d closes%s with %d of %s, at least %d of every block%s",
                task.plan.round, " at its deadline" if at_deadline else "", progress.counted,
                counted(progress.expected, "fragment"), progress.scarcest,
                "" if at_deadline else ": all other members have declined it, or were refused",
            )  # fmt: skip
        self._store.stop_counting(task.plan.round, self._clock.unix(), seats=self._settings.seats)
        sums = self._store.sums(task.plan.round, groups=self._end.groups(task.plan.round))
        match task.release:
            case NoisySum(second_moments=SecondMoments() as moments) as release:
                self._take_directions(release, moments, sums)
            case release:
                self._take_step(release, sums)
        self._task = None
        self._traffic_before = self._announcer.traffic()
        self._intake.end()

    def _take_directions(self, release: NoisySum, moments: SecondMoments, groups: Sequence[Sums]) -> None:
        """Add the fleet's leading directions to the model; the weights do not change."""
        self._models.set_projection(moments.matrix(median_of_means(release, groups)))
        self._announcer.assets_changed()
        self._keep(release, Step(self._model), None, self._models.assets["projection"])

    def _take_step(self, release: Release, groups: Sequence[Sums]) -> None:
        """Step the model, and evaluate it."""
        step = self._stepper.step(release, self._model, groups)
        self._keep(release, step, self._models.evaluate(step.model.weights))

    def _keep(
        self,
        release: Release,
        step: Step,
        evaluation: Evaluation | None,
        projection: bytes | None = None,
    ) -> None:
        """Close the round.

        Nothing of the step may be seen before it is in the database: where the coordinator adds noise, a
        crash would have the next start draw other noise for the same updates, and two answers show them.
        """
        number, epsilon = release.plan.round, self._planner.epsilon_after(release)
        follows = self._settings.privacy.clipping.kind == "quantile"
        result = RoundResult(
            evaluation, step.clamped, step.kept, release.mechanism.noise_multiplier, epsilon,
            step.out_of_range, self._model.clip_norm if follows else None, self._traffic(),
        )  # fmt: skip
        self._store.close_round(
            number, step.model, result, closed_at=self._clock.unix(), projection=projection
        )
        if follows:
            self._stepper.tell_of_norm(self._model.clip_norm, step.model.clip_norm)
        self._model = step.model
        accuracy = result.accuracy
        shown = "not evaluated" if accuracy is None else f"accuracy {accuracy:.2%}"
        spent = f"ε = {upwards(epsilon)}" if math.isfinite(epsilon) else "no guarantee"
        figures = Fields()
        if accuracy is not None:
            figures["accuracy"] = accuracy
        if math.isfinite(epsilon):
            figures["epsilon"] = epsilon
        log.info(
            "round %d of %d: %s, %s", number, release.plan.rounds, shown, spent,
            extra=self._about(Event.ROUND_CLOSED, number, figures),
        )  # fmt: skip

    def _about(self, event: Event, number: int, more: Fields | None = None) -> dict[str, Any]:
        """As ``extra`` of a line about a round."""
        fields: Fields = {
            "event": event, "job": self._job.id.hex(), "round": number, "rounds": self._settings.rounds,
        }  # fmt: skip
        return about(**(fields if more is None else fields | more))

    def _traffic(self) -> Traffic:
        """Since the round was opened, or went on after a restart."""
        before, now = self._traffic_before, self._announcer.traffic()
        return Traffic(now.received - before.received, now.published - before.published)

    def _write_latest(self) -> None:
        """Write the model of the round that closed last, unless it is there: from the database, so that a
        crash in between leaves no other model."""
        number = self._store.last_closed()
        file = self._models.of_round(number)
        if self._settings.keep_models == "all" and number >= self._models.first_round and not file.exists():
            self._write_model(file, number)

    def _write_model(self, file: Path, rounds: int) -> None:
        spent = spent_columns(
            self._job,
            rounds=rounds,
            epsilon=self._store.epsilon_of_model(),
            devices=self._store.least_counted(),
        )
        self._models.write(file, self._model.weights, self._job, rounds, spent)

    # The job is over, or cancelled.

    def finish(self) -> bool:
        """Export the model with its privacy statement, and announce the end of the job.

        Returns:
            Whether the broker took the announcement; if not, the job is not over yet.
        """
        has_model = self._export()
        if not self._say_goodbye(self._models.finished() if has_model else {}):
            return False
        where = f"the model is in {self._models.final}" if has_model else "no round of it made a model"
        log.info(
            "the job is finished; %s", where,
            extra=about(event=Event.JOB_OVER, job=self._job.id.hex(), reason="finished"),
        )  # fmt: skip
        return True

    def cancel(self, *, sends_model: bool) -> bool:
        """Give up the open round, export the model of those before it, and announce the end of the job.

        Args:
            sends_model: whether devices get that model.

        Returns:
            Whether the broker took the announcement; if not, the job is not over yet.
        """
        over = self._store.over_rounds()
        if (current := self._store.open_round()) is not None:
            self._give_up(current)
        has_model = self._export()
        if sends_model and not has_model:
            log.warning("no round has stepped the model, so there is none to send")
        if not self._say_goodbye(self._models.finished() if has_model and sends_model else {}):
            return False
        log.info(
            "the job is cancelled after %s", counted(over, "round"),
            extra=about(event=Event.JOB_OVER, job=self._job.id.hex(), reason="cancelled"),
        )  # fmt: skip
        return True

    def _export(self) -> bool:
        """Write the model of the last round that was closed; return whether any has stepped it."""
        self._write_latest()
        if (number := self._store.last_closed()) < self._models.first_round:
            return False
        self._write_model(self._models.final, number)
        return True

    def _give_up(self, current: OpenRound, halt: Halt | None = None) -> None:
        """Give up the open round of a job that is over, or that is paused for a reason."""
        task = self._task or self._task_of(current)
        counts = self._store.counts(current.number)
        self._store.give_up_round(
            current.number,
            noise_multiplier=task.release.mechanism.noise_multiplier,
            epsilon=self._planner.epsilon_after(task.release),
            least=min(counts.get(position, 0) for position in range(task.release.blocks)),
            given_up_at=self._clock.unix(),
            halt=halt,
        )
        self._task = None
        self._intake.end()
        log.warning(
            "round %d is given up; devices that were charged for it stay so", current.number,
            extra=self._about(Event.ROUND_GIVEN_UP, current.number),
        )  # fmt: skip

    def _say_goodbye(self, model: Mapping[str, bytes]) -> bool:
        """Announce the end of the job, and what came of it; return whether the broker took that."""
        if self._tokens is not None:
            self._tokens.finish()
        if not self._store.last_round():
            return True  # Nobody has heard of it.
        now = self._clock.unix()
        # Of an earlier round than the last one, devices would not believe it.
        last = self._planner.task(
            OpenRound(self._store.last_round(), now, now),
            self._sent,
            clip_norm=self._model.clip_norm,
            radii=self._model.radii,
            assets=model,
            state="finished",
        )
        if self._announcer.say_goodbye(last.plan, model):
            return True
        log.warning("the broker did not accept the announcement that the job is over; trying again")
        return False
