"""The agent's cycle: rounds in sequence, with the phases in chronological order.

A plan arrives and is *offered*; then the model arrives. The device *admits* the round or declines it, and has
the training process *prepare* it (:mod:`agent.worker`), without a look at a record. Then it charges its
ledger. Only then are records read: at the next point of the device's own grid its slots begin, in which it
trains, and it spools the fragments of the noisy update. The publisher seals and sends them; receipts empty
the spool. Each step is durable before the next (:mod:`agent.rounds`), so that after a crash at any point the
next start continues from disk.

From the charge on, nothing that a record can cause changes whether, when, and with how many bytes the device
speaks (:mod:`agent.training`).
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, auto
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.admission import Declined, admit, require_time_left
from agent.charges import Charge, Price
from agent.limits import require_times, require_training_time, require_within
from agent.publisher import Publisher
from agent.rounds import RoundState
from agent.settings import LimitSettings
from agent.spool import UNSCHEDULED, SpooledFragment
from agent.state import AgentState
from agent.worker import Order, Prepared, Trains, Update, said
from dpagent import faults
from dpagent.clock import Clock
from dpagent.errors import DpagentError
from dpagent.faults import FaultPoint
from dpagent.learning.data.dataset import Dataset
from dpagent.notation import upwards
from dpagent.protocol.codec import MessageError, encode
from dpagent.protocol.dummies import dummies_for
from dpagent.protocol.fragments import Assembler, cut, receipt_digest, weights_from_bytes
from dpagent.protocol.messages import RECEIPT_DIGEST_BYTES, Fragment, ModelChunk, Plan, Receipts
from dpagent.protocol.sealing import seal_encoded
from dpagent.protocol.task import RoundTask
from dpagent.wording import counted

log = logging.getLogger(__name__)

_ASK_AGAIN_S: Final = 10.0
"""The agent requests a model again if a chunk is still missing after this time."""
_REST: Final = 9.0
"""After declining a plan took t seconds, the next decision waits at least this many times t: a coordinator
whose plans are slow to price takes a tenth of the board's time, not all of it."""
_POLL_S: Final = 0.02
"""How often a program looks whether training is done. Nothing that leaves depends on it."""
_ATTEMPTS: Final = 2
"""After so many attempts that ended without an update, a charged round is noise alone."""
_PATIENCE: Final = 4.0
"""A training process is ended that takes so many times longer than its slots, and than any training may."""
_IDLE_S: Final = 1_200.0
"""The training process is ended when it has had nothing to do for so long: twice as long as what a look found
takes to count (:mod:`agent.decoding`), since a look ends with the process that began it."""


class _Phase(Enum):
    """What a device has to do for the announced round."""

    DECIDE = auto()
    """Admit it, or decline it."""
    REPEAT = auto()
    """It is charged, and nothing has left: a crash came between. Run it under that charge."""
    PREPARE = auto()
    """Wait until it is prepared; then charge it, unless it is."""
    TRAIN = auto()
    """Wait for its update."""
    SETTLED = auto()
    """Nothing more: spooled, declined, or given up."""


@dataclass(slots=True)
class _Announced:
    """The last round that the coordinator announced. Times are monotonic."""

    plan: Plan
    digest: bytes
    """See :func:`_digest_of`."""
    phase: _Phase
    begins_at: float
    """No work on it begins before; once it trains, the point of the grid from which its slots are counted."""
    ask_again_at: float
    attempts: int = 0
    """How often it was run without an update."""
    failure: str | None = None
    """Why the last attempt failed."""


@dataclass(frozen=True, slots=True)
class _Admitted:
    """A round that the training process prepares."""

    announced: _Announced
    task: RoundTask
    price: Price | None
    """To be charged; None: it is charged already."""
    began_at: float
    answer: Future[Prepared]


@dataclass(frozen=True, slots=True)
class _InTraining:
    """A round that is charged, and for which records are read."""

    announced: _Announced
    task: RoundTask
    answer: Future[Update]


@dataclass(frozen=True, slots=True)
class _Model:
    """The inputs of a round besides its plan."""

    weights: bytes
    assets: dict[str, bytes]
    """By role."""


class Cycle:
    """A device's part in the rounds of its fleet.

    Args:
        dataset: the ledger's name for the device's records.
        fleet: the fleet's name.
        limits: the device's own.
        records: the device's, of which only what is declared is looked at.
        takes_graphs: whether a training graph may be of use.
        state: ledger, rounds and spool.
        worker: prepares rounds and trains.
        publisher: sends the spooled fragments.
        ask_again: requests the broker's retained messages again.
        clock: the program's.
    """

    def __init__(
        self,
        dataset: str,
        fleet: str,
        limits: LimitSettings,
        *,
        records: Dataset,
        takes_graphs: bool,
        state: AgentState,
        worker: Trains,
        publisher: Publisher,
        ask_again: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._dataset, self._fleet, self._limits = dataset, fleet, limits
        self._records, self._takes_graphs = records, takes_graphs
        self._state, self._worker, self._publisher = state, worker, publisher
        self._ask_again, self._clock = ask_again, clock
        self._assembler = Assembler()
        self._announced: _Announced | None = None
        self._declined: tuple[bytes, float] | None = None
        """Digest and deadline of the last plan that was declined, so that it is not priced at each
        announcement."""
        self._at_work: _Admitted | _InTraining | None = None
        """What the training process is at."""
        self._answers_by = math.inf
        """When it counts as one that never answers (monotonic)."""
        self._busy_until = -math.inf
        """No work on another round begins before (monotonic)."""
        self._worked_at = math.inf
        """When the training process was last asked for something; infinite if it is not there."""

    # A plan arrives: the round is offered.

    def take_plan(self, plan: Plan) -> bool:
        """Take an announcement of the coordinator.

        Returns:
            Whether it announces a new round, or the end of the job for the first time.

        Raises:
            MessageError: it is for another fleet, or for an earlier round.
        """
        if plan.fleet != self._fleet:
            raise MessageError("wrong fleet", plan.fleet)
        known = None if self._announced is None else self._announced.plan
        # Also after a restart: a broker with an older store retains an older plan, and taking that would give
        # up the fragments of the open round.
        latest = self._state.latest_round(plan.job.hex())
        if known is not None and known.job == plan.job:
            latest = max(latest, known.round)
        if plan.round < latest:
            raise MessageError("replayed", f"round {plan.round} after round {latest}")
        is_new = known is None or (known.job, known.round, known.state) != (plan.job, plan.round, plan.state)
        self._assembler.keep_for(plan)
        if plan.state == "finished":
            self._end_job(plan, is_new=is_new)
            return is_new
        if is_new:
            # Rounds of another job only when this one is charged: a broker with an older store retains plans
            # of a job that has ended.
            self._give_up(self._state.expire_earlier_rounds(plan.job.hex(), plan.round, self._clock.unix()))
        self._offer(plan, is_new=is_new)
        return is_new

    def _offer(self, plan: Plan, *, is_new: bool) -> None:
        digest, now = _digest_of(plan), self._clock.monotonic()
        before = self._announced
        if not is_new and before is not None:
            if before.phase is _Phase.TRAIN:
                return  # Its update will leave in the window of the plan that was charged.
            if before.phase is _Phase.PREPARE and before.digest == digest:
                return
        phase = self._phase_of(plan, digest)
        if is_new or before is None or before.plan != plan:
            begins_at = max(now, self._busy_until)
            self._announced = before = _Announced(plan, digest, phase, begins_at, now + _ASK_AGAIN_S)
        before.phase = phase
        if phase is _Phase.DECIDE:
            self._state.offer(plan.job.hex(), plan.round, digest, self._clock.unix())
        self._schedule(before)

    def _phase_of(self, plan: Plan, digest: bytes) -> _Phase:
        job = plan.job.hex()
        known = self._state.round(job, plan.round)
        if self._state.ledger.is_charged(self._dataset, job, plan.round):
            if known is not None and known.state is RoundState.CHARGED and known.plan == digest:
                return _Phase.REPEAT
            return _Phase.SETTLED
        if known is not None and known.state is RoundState.DECLINED and self._limits.dummy_traffic:
            return _Phase.SETTLED  # Its dummies are on disk: fragments beside them would show.
        return _Phase.SETTLED if self._declined == (digest, plan.deadline) else _Phase.DECIDE

    def _schedule(self, announced: _Announced) -> None:
        """Give pending fragments of the round new random times.

        This program or the coordinator has restarted: at their old times, all would leave at once.
        """
        try:
            require_times(announced.plan, self._limits)
            _require_key(announced.plan)
        except DpagentError:
            self._publisher.close_window()  # Not the plan that was charged.
            return
        self._publisher.open_window(announced.plan, self._publisher.grid_time(announced.begins_at))
        self._publisher.draw_times()

    def _give_up(self, expired: int) -> None:
        if expired:
            said = counted(expired, "fragment")
            log.warning("%s expired: the round closed before it counted them", said)

    def _end_job(self, plan: Plan, *, is_new: bool) -> None:
        now = self._clock.monotonic()
        self._announced = _Announced(plan, b"", _Phase.SETTLED, now, now)
        # Only its own rounds: a broker with an older store retains the end of the job before the open one.
        self._state.expire_job(plan.job.hex(), self._clock.unix())
        if is_new:
            log.info("job %s is finished, %s", plan.job.hex()[:8], self.spent())

    # The model arrives, in chunks, before or after the plan.

    def take_chunk(self, chunk: ModelChunk) -> None:
        """Take a part of the weights or of an asset."""
        self._assembler.add(chunk)

    def _model_for(self, plan: Plan) -> _Model | None:
        """Weights and assets of a plan, or None while a part of them is missing."""
        weights = self._assembler.get(plan.model.digest, 4 * plan.model.parameters)
        if weights is None:
            return None
        assets: dict[str, bytes] = {}
        for asset in plan.assets:
            if asset.role != "training-graph" or self._takes_graphs:
                data = self._assembler.get(asset.digest, asset.size)
                if data is None:
                    return None
                assets[asset.role] = data
        return _Model(weights, assets)

    # The announced round goes on as far as it can.

    def due_in_s(self) -> float:
        """Seconds until :meth:`advance` can do something of its own accord; infinite if a message must
        come."""
        announced, now = self._announced, self._clock.monotonic()
        if self._at_work is not None:
            return 0.0 if self._at_work.answer.done() else _POLL_S
        if announced is None or announced.phase is _Phase.SETTLED:
            return max(0.0, self._worked_at + _IDLE_S - now)
        if self._model_for(announced.plan) is None:
            return max(0.0, announced.ask_again_at - now)
        return max(0.0, announced.begins_at - now)

    def advance(self) -> None:
        """Take the announced round to its next phase, if it is time.

        Raises:
            StorageError: the disk fails; what is charged and not spooled is run again after a restart.
        """
        at_work, announced, now = self._at_work, self._announced, self._clock.monotonic()
        if at_work is not None:
            if at_work.answer.done():
                self._at_work = None
                if isinstance(at_work, _Admitted):
                    self._take_prepared(at_work)
                else:
                    self._take_update(at_work)
            elif now >= self._answers_by:
                log.error("the training process does not answer, and is ended")
                self._worker.end()  # With that, it has answered.
            return
        if announced is None or announced.phase is _Phase.SETTLED:
            if now >= self._worked_at + _IDLE_S:
                self.rest()
            return
        model = self._model_for(announced.plan)
        if model is None:
            # Chunks are still arriving, or one was lost: the broker has them all.
            if now >= announced.ask_again_at:
                announced.ask_again_at = now + _ASK_AGAIN_S
                self._ask_again()
            return
        if now < announced.begins_at:
            return
        if announced.phase is _Phase.DECIDE:
            self._decide(announced, model)
        elif announced.phase is _Phase.REPEAT:
            self._repeat(announced, model)

    def rest(self) -> None:
        """End the training process, until it is needed again."""
        self._worker.end()
        self._worked_at = math.inf

    # The device decides. It has read no record.

    def _decide(self, announced: _Announced, model: _Model) -> None:
        began_at = self._clock.monotonic()
        try:
            task, price = self._admit(announced.plan, model)
        except DpagentError as error:
            self._decline(announced, str(error), began_at)
        except Exception as error:
            # No plan ends the agent.
            log.debug("the details", exc_info=True)
            self._decline(announced, said(error), began_at)
        else:
            self._prepare(announced, task, price, model, began_at)

    def _admit(self, plan: Plan, model: _Model) -> tuple[RoundTask, Price]:
        """The price of a round.

        Raises:
            DpagentError: the device declines.
        """
        task = RoundTask.of(plan)
        _require_finite(model)
        price = admit(
            task, self._records, self._state.ledger, self._dataset, self._limits, now=self._clock.unix()
        )
        _require_key(plan)
        return task, price

    def _decline(self, announced: _Announced, reason: str, began_at: float) -> None:
        plan, now = announced.plan, self._clock.monotonic()
        announced.phase = _Phase.SETTLED
        self._declined = announced.digest, plan.deadline
        log.warning("declined round %d of job %s: %s", plan.round, plan.job.hex()[:8], reason)
        dummies = self._dummies(plan)
        self._state.decline(plan.job.hex(), plan.round, reason, self._clock.unix(), dummies)
        self._schedule_dummies(announced, began_at, dummies)
        self._busy_until = max(self._busy_until, now + _REST * (now - began_at))

    def _dummies(self, plan: Plan) -> list[SpooledFragment]:
        """The dummies for a round that the device sits out: none, unless its owner wants them and the plan's
        times hide them."""
        if not self._limits.dummy_traffic:
            return []
        try:
            require_times(plan, self._limits)
            _require_key(plan)
        except DpagentError:
            return []
        return _spooled(dummies_for(plan))

    def _schedule_dummies(
        self, announced: _Announced, began_at: float, dummies: list[SpooledFragment]
    ) -> None:
        """Give dummies the times that fragments would have, had the device decided at once to take part."""
        if dummies:
            self._open_slots(announced, self._publisher.grid_time(began_at), 1)
            self._publisher.draw_times()

    def _open_slots(self, announced: _Announced, begins_at: float, slots: int) -> None:
        announced.begins_at = begins_at
        self._busy_until = begins_at + slots * self._publisher.slot_s(announced.plan)
        self._publisher.open_window(announced.plan, begins_at, slots)

    def _repeat(self, announced: _Announced, model: _Model) -> None:
        """Run a charged round again: nothing of it has left."""
        task = RoundTask.of(announced.plan)
        try:
            require_within(task, self._limits)
        except DpagentError as error:  # The device's limits have changed since.
            self._give_up_round(announced, str(error))
            return
        log.info("round %d of %d: again, under the charge it has", task.plan.round, task.plan.rounds)
        self._prepare(announced, task, None, model, self._clock.monotonic())

    def _give_up_round(self, announced: _Announced, reason: str) -> None:
        plan = announced.plan
        log.warning("round %d of job %s is given up: %s", plan.round, plan.job.hex()[:8], reason)
        announced.phase = _Phase.SETTLED
        if dummies := self._dummies(plan):
            self._state.give_up(plan.job.hex(), plan.round, self._clock.unix(), dummies)
            self._schedule_dummies(announced, self._clock.monotonic(), dummies)

    # The training process prepares the round. It has read no record either.

    def _prepare(
        self, announced: _Announced, task: RoundTask, price: Price | None, model: _Model, began_at: float
    ) -> None:
        announced.phase = _Phase.PREPARE
        failure = announced.failure if announced.attempts >= _ATTEMPTS else None
        answer = self._worker.prepare(Order(announced.plan, model.weights, model.assets, failure))
        self._at_work = _Admitted(announced, task, price, began_at, answer)
        self._worked_at = self._clock.monotonic()
        self._answers_by = self._worked_at + self._limits.maximum_training_s

    def _take_prepared(self, admitted: _Admitted) -> None:
        announced, plan = admitted.announced, admitted.task.plan
        if announced is not self._announced:
            admitted.answer.exception()  # Another round has begun.
            return
        try:
            longest_s = admitted.answer.result().longest_s
            require_training_time(longest_s, self._limits)
            slots = self._publisher.slots_for(plan, longest_s)
            begins_at = self._publisher.grid_time(self._clock.monotonic())
            if admitted.price is not None:
                wait_s = begins_at - self._clock.monotonic() + slots * self._publisher.slot_s(plan)
                require_time_left(plan, self._clock.unix(), wait_s)
        except DpagentError as error:
            if admitted.price is None:
                self._try_again(announced, str(error))
            else:
                self._decline(announced, str(error), admitted.began_at)
            return
        if admitted.price is not None:
            self._charge(admitted.task, admitted.price)
        # The slots begin at a point of the grid, so that training has whole ones, whatever came before: the
        # coordinator chooses when the last chunk comes, and how long its plan takes to decide on.
        announced.phase = _Phase.TRAIN
        self._open_slots(announced, begins_at, slots)
        longest_s = max(self._limits.maximum_training_s, slots * self._publisher.slot_s(plan))
        self._answers_by = begins_at + _PATIENCE * longest_s
        faults.reached(FaultPoint.AGENT_TRAINS)
        self._at_work = _InTraining(announced, admitted.task, self._worker.update())

    def _charge(self, task: RoundTask, price: Price) -> None:
        plan, now = task.plan, self._clock.unix()
        charged_at = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")
        self._state.charge(Charge.of(task, price, self._dataset, charged_at=charged_at), now)
        log.info("round %d of %d: charged, %s", plan.round, plan.rounds, self.spent())
        job = plan.job.hex()
        self._give_up(self._state.expire_other_rounds(job, plan.round, now))
        self._state.forget_other_jobs(job)

    # The round is charged: records are read, in the training process.

    def _take_update(self, training: _InTraining) -> None:
        announced, plan = training.announced, training.task.plan
        if announced is not self._announced:
            training.answer.exception()  # Another round has begun: this one has expired.
            return
        try:
            update = training.answer.result()
            fragments = _fragments_of(training.task, update.values)
        except Exception as error:  # noqa: BLE001 - no record can cause it
            self._try_again(announced, said(error))
            return
        self._worked_at = self._clock.monotonic()
        self._state.spool_round(plan.job.hex(), plan.round, fragments, self._clock.unix(), update.failure)
        announced.phase = _Phase.SETTLED
        self._publisher.draw_times()
        if update.failure is None:
            log.info("round %d of %d: spooled", plan.round, plan.rounds)
        else:
            log.error(
                "round %d of %d: spooled noise alone, no record counts: %s",
                plan.round, plan.rounds, update.failure,
            )  # fmt: skip

    def _try_again(self, announced: _Announced, reason: str) -> None:
        """A charged round has no update: the training process has ended, or no noise can be drawn."""
        announced.attempts += 1
        announced.failure = reason
        plan = announced.plan
        log.error(
            "round %d of job %s has no update yet: %s; trying again", plan.round, plan.job.hex()[:8], reason
        )
        announced.phase = _Phase.REPEAT
        announced.begins_at = self._clock.monotonic() + _ASK_AGAIN_S

    # Receipts empty the spool.

    def take_receipts(self, receipts: Receipts) -> None:
        """Drop the fragments that the coordinator has counted.

        Raises:
            MessageError: the digests do not have the right length.
        """
        if self._announced is not None and receipts.job != self._announced.plan.job:
            return  # Receipts for an earlier job, which has no pending fragments.
        raw, size = receipts.digests, RECEIPT_DIGEST_BYTES
        if len(raw) % size:
            raise MessageError("malformed", "receipts are not whole digests")
        digests = [raw[start : start + size] for start in range(0, len(raw), size)]
        self._state.mark_counted(digests, self._clock.unix())

    def spent(self) -> str:
        """For the log: the data's spent ε, and its budget."""
        budget = self._state.ledger.budget(self._dataset)
        epsilon = self._state.ledger.epsilon_spent(self._dataset)
        spent = f"spent ε = {upwards(epsilon)} of {budget.epsilon:g} at δ = {budget.delta:g}"
        return f"{spent} on {self._dataset!r} (record level)"


def _require_key(plan: Plan) -> None:
    """See that something can be sealed to a plan's key, which shows with any fragment.

    Raises:
        Declined: 32 bytes that are not a point of the curve, or one of small order.
    """
    try:
        seal_encoded(b"", plan.fleet, plan.sealing_key)
    except ValueError as error:
        raise Declined(f"the plan's sealing key is invalid: {error}") from error


def _fragments_of(task: RoundTask, values: NDArray[np.int64]) -> list[SpooledFragment]:
    """An update as it is spooled; the times of its fragments are drawn once they are on disk."""
    return _spooled(cut(values, task.plan))


def _spooled(fragments: Iterable[Fragment]) -> list[SpooledFragment]:
    return [
        SpooledFragment(receipt_digest(fragment.id), encode(fragment), UNSCHEDULED) for fragment in fragments
    ]


def _digest_of(plan: Plan) -> bytes:
    """SHA-256 of a plan but for its deadline, which the coordinator puts off, and which nothing is charged
    for."""
    return hashlib.sha256(encode(plan.model_copy(update={"deadline": 0.0}))).digest()


def _require_finite(model: _Model) -> None:
    """See that the global weights are numbers.

    Raises:
        Declined: one is not finite.
    """
    if not np.isfinite(weights_from_bytes(model.weights)).all():
        raise Declined("the model has weights that are not finite")
