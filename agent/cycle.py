"""The agent's cycle: rounds in sequence, with the phases in chronological order.

A plan arrives, then the model; the device admits the round or declines it; it trains; it seals the fragments
of the noisy update; it charges its ledger and spools them in one transaction; the publisher sends them;
receipts empty the spool. After a crash at any point, the next start continues from disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.admission import Declined, admit
from agent.charges import Charge, Price
from agent.publisher import Publisher
from agent.spool import UNSCHEDULED, SpooledFragment
from agent.state import AgentState
from agent.training import Trainer
from dpagent.clock import Clock
from dpagent.errors import DpagentError
from dpagent.notation import upwards
from dpagent.protocol.codec import MessageError
from dpagent.protocol.fragments import Assembler, cut, receipt_digest, weights_from_bytes
from dpagent.protocol.messages import RECEIPT_DIGEST_BYTES, ModelChunk, Plan, Receipts
from dpagent.protocol.sealing import seal
from dpagent.protocol.task import RoundTask
from dpagent.wording import counted

log = logging.getLogger(__name__)

_ASK_AGAIN_S: Final = 10.0
"""The agent requests a model again if a chunk is still missing after this time."""


@dataclass(slots=True)
class _Announced:
    """The last round that the coordinator announced."""

    plan: Plan
    arrived_at: float
    """Monotonic."""
    ask_again_at: float
    is_settled: bool
    """Whether the decision is made: charged, declined, or the job is over."""


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
        state: ledger and spool.
        trainer: the board's records and engine.
        publisher: sends the spooled fragments.
        ask_again: requests the broker's retained messages again.
        clock: the program's.
    """

    def __init__(
        self,
        dataset: str,
        fleet: str,
        *,
        state: AgentState,
        trainer: Trainer,
        publisher: Publisher,
        ask_again: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._dataset, self._fleet = dataset, fleet
        self._state, self._trainer, self._publisher = state, trainer, publisher
        self._ask_again, self._clock = ask_again, clock
        self._assembler = Assembler()
        self._announced: _Announced | None = None

    # A plan arrives.

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
        if known is not None and known.job == plan.job and plan.round < known.round:
            raise MessageError("replayed", f"round {plan.round} after round {known.round}")
        is_new = known is None or (known.job, known.round, known.state) != (plan.job, plan.round, plan.state)
        self._assembler.keep_for(plan)
        if plan.state == "finished":
            self._end_job(plan, is_new=is_new)
            return is_new
        job, now = plan.job.hex(), self._clock.monotonic()
        if is_new:
            self._announced = _Announced(plan, now, now + _ASK_AGAIN_S, is_settled=False)
            if known is None or known.job != plan.job:
                self._state.forget_other_jobs(job)
            if expired := self._state.expire_other_rounds(job, plan.round):
                said = counted(expired, "fragment")
                log.warning("%s expired: the round closed before it counted them", said)
        else:
            assert self._announced is not None
            self._announced.plan = plan
        self._announced.is_settled = self._state.ledger.is_charged(self._dataset, job, plan.round)
        self._publisher.open_window(plan, self._announced.arrived_at)
        # Pending fragments of this round get new random times: this program or the coordinator has
        # restarted. At their old times they would all leave at once.
        self._publisher.draw_times()
        return is_new

    def _end_job(self, plan: Plan, *, is_new: bool) -> None:
        now = self._clock.monotonic()
        self._announced = _Announced(plan, now, now, is_settled=True)
        self._state.expire_other_rounds(None, None)
        if is_new:
            log.info("job %s is finished, %s", plan.job.hex()[:8], self.spent())

    # The model arrives, in chunks, before or after the plan.

    def take_chunk(self, chunk: ModelChunk) -> None:
        """Take a part of the weights or of an asset."""
        self._assembler.add(chunk)

    @property
    def is_ready(self) -> bool:
        """Whether a round is ready to run on this device."""
        announced = self._announced
        return (
            announced is not None and not announced.is_settled and self._model_for(announced.plan) is not None
        )

    def advance(self) -> None:
        """Run the announced round, unless it is settled or its model is incomplete."""
        announced = self._announced
        if announced is None or announced.is_settled:
            return
        model = self._model_for(announced.plan)
        if model is None:
            # Chunks are still arriving, or one was lost: the broker has them all.
            if self._clock.monotonic() >= announced.ask_again_at:
                announced.ask_again_at = self._clock.monotonic() + _ASK_AGAIN_S
                self._ask_again()
            return
        announced.is_settled = True
        plan = announced.plan
        try:
            weights = weights_from_bytes(model.weights)
            task, price = self._admit(plan, weights)
            update = self._trainer.noisy_update(task, model.assets, weights)
            fragments = self._seal(task, update)
        except DpagentError as error:
            self._decline(plan, str(error))
        except Exception as error:
            # No plan ends the agent. No private record does: silence in every later round would reveal it.
            log.debug("the details", exc_info=True)
            self._decline(plan, f"an internal error ({type(error).__name__}: {error})")
        else:
            self._charge_and_spool(task, price, fragments)

    def _model_for(self, plan: Plan) -> _Model | None:
        """Weights and assets of a plan, or None while a part of them is missing."""
        weights = self._assembler.get(plan.model.digest, 4 * plan.model.parameters)
        if weights is None:
            return None
        assets: dict[str, bytes] = {}
        needed = self._trainer.needed_assets(plan)
        for asset in plan.assets:
            if asset.role in needed:
                data = self._assembler.get(asset.digest, asset.size)
                if data is None:
                    return None
                assets[asset.role] = data
        return _Model(weights, assets)

    # The device decides.

    def _decline(self, plan: Plan, reason: str) -> None:
        log.warning("declined round %d of job %s: %s", plan.round, plan.job.hex()[:8], reason)
        self._state.note_declined(plan.job.hex(), plan.round, reason, self._clock.unix())

    def _admit(self, plan: Plan, weights: NDArray[np.float32]) -> tuple[RoundTask, Price]:
        if not np.isfinite(weights).all():
            raise Declined("the model has weights that are not finite")
        task = RoundTask.of(plan)
        records = self._trainer.records
        records.refresh()
        price = admit(task, records.dataset, self._state.ledger, self._dataset, now=self._clock.unix())
        return task, price

    # After training, the update is sealed.

    def _seal(self, task: RoundTask, update: NDArray[np.int64]) -> list[SpooledFragment]:
        """The sealed fragments of an update; their times are drawn once they are on disk."""
        plan = task.plan
        try:
            sealed = [
                (receipt_digest(fragment.id), seal(fragment, plan.fleet, plan.sealing_key))
                for fragment in cut(update, plan)
            ]
        except ValueError as error:  # 32 bytes that are not a point of the curve
            raise Declined(f"the plan's sealing key is invalid: {error}") from error
        return [SpooledFragment(digest, message, UNSCHEDULED) for digest, message in sealed]

    # The charge and its fragments become durable together; only then may a byte leave.

    def _charge_and_spool(self, task: RoundTask, price: Price, fragments: list[SpooledFragment]) -> None:
        charged_at = datetime.fromtimestamp(self._clock.unix(), UTC).isoformat(timespec="seconds")
        charge = Charge.of(task, price, self._dataset, charged_at=charged_at)
        self._state.charge_and_spool(charge, fragments)
        self._publisher.draw_times()
        log.info("round %d of %d: charged and spooled, %s", task.plan.round, task.plan.rounds, self.spent())

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
        self._state.mark_counted([raw[start : start + size] for start in range(0, len(raw), size)])

    def spent(self) -> str:
        """For the log: the data's spent ε, and its budget."""
        budget = self._state.ledger.budget(self._dataset)
        epsilon = self._state.ledger.epsilon_spent(self._dataset)
        spent = f"spent ε = {upwards(epsilon)} of {budget.epsilon:g} at δ = {budget.delta:g}"
        return f"{spent} on {self._dataset!r} (record level)"
