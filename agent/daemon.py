"""The agent: a loop that reads like the round in ``architecture``.

One thread, one queue. A plan arrives; the device decides; it trains, charges its ledger and
spools the fragments in one transaction; it publishes them at random times in the window;
receipts empty the spool. Whatever happens in between, the next start goes on from disk.
"""

from __future__ import annotations

import logging
import math
import os
import random
import threading
import time
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from agent.accounts import Budget, Charge
from agent.decision import Declined, decide, schedule_digest
from agent.profile import check_board, load_profile
from agent.settings import AgentSettings
from agent.spool import UNSCHEDULED, SpooledFragment
from agent.state import AgentState
from agent.training import Trainer
from dpagent.errors import ConfigurationError, DataError, ParameterError
from dpagent.protocol.codec import MessageError
from dpagent.protocol.fragments import Assembler, cut, receipt_digest, weights_from_bytes
from dpagent.protocol.messages import RECEIPT_DIGEST_BYTES, ModelChunk, Plan, Receipts
from dpagent.protocol.sealing import seal
from dpagent.protocol.signing import Verifier
from dpagent.protocol.topics import Topics
from dpagent.storage import disk_errors
from dpagent.transport.session import (
    Acknowledged,
    Connected,
    Disconnected,
    MqttSession,
    Received,
    Subscription,
)

log = logging.getLogger(__name__)

_IDLE_S = 0.5
_RESEND_S = 5.0
"""A fragment without a receipt goes again after this, times 1 to 2 at random."""
_ASK_AGAIN_S = 10.0
"""A model of which a chunk is still missing after this is asked for again."""
_SLOT_MARGIN = 0.25
"""Publication does not begin in a slot that opens within this fraction of one."""
_BURST = 10
_COUNT_S = 2.0
"""Counters of rejections are written no more often than this."""
_BATCH = 256
"""Messages handled before training and publishing get their turn."""


class Agent:
    """The daemon on one device.

    Args:
        settings: ``agent.yaml``, with paths resolved.

    Raises:
        ConfigurationError, DataError, LedgerError, StateInUseError, StorageError: The
            device cannot start; the text says why.
    """

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._profile = load_profile(settings.profile)
        check_board(self._profile)
        os.nice(max(0, self._profile.niceness - os.nice(0)))
        self._verifier = Verifier(settings.coordinator_key, settings.fleet)
        self._topics = Topics(settings.fleet)
        self._trainer = Trainer(settings, self._profile)
        self._session = MqttSession(
            settings.mqtt,
            # A fresh name each time: the broker can tell connections apart, not devices.
            client_id=os.urandom(10).hex(),
            subscriptions=[
                Subscription(topic)
                for topic in (
                    self._topics.plan,
                    self._topics.model_chunks,
                    self._topics.asset_chunks,
                    self._topics.receipts,
                )
            ],
            persistent=False,
        )
        # Last, because from here on the directory is held.
        self._state = AgentState(
            settings.state_dir, settings.data.name, Budget(settings.budget.epsilon, settings.budget.delta)
        )
        self._random = random.SystemRandom()
        self._assembler = Assembler()
        self._assets: dict[bytes, bytes] = {}
        self._plan: Plan | None = None
        self._plan_arrived_at = 0.0
        self._ask_again_at = 0.0
        self._must_train = False
        self._allowance = float(_BURST)
        self._allowance_at = time.monotonic()
        self._reported_bytes = (0, 0)
        self._rejected = 0
        self._counted_at = 0.0
        self._warned: set[str] = set()

    def run(self, stop: threading.Event) -> None:
        """Serve until ``stop`` is set.

        Raises:
            BrokerError: The broker refuses us.
            StorageError: The disk fails; nothing was released that is not charged.
        """
        log.info("agent of fleet %s, %s", self._settings.fleet, self._spent())
        try:
            # The network's errors stay in the session; what comes up here is the disk's.
            with self._session, disk_errors(self._state.file):
                while not stop.is_set():
                    self._take_events()
                    self._train()
                    self._publish()
                    if self._rejected and time.monotonic() >= self._counted_at + _COUNT_S:
                        self._count_traffic()
        finally:
            self._count_traffic()
            self._state.close()

    def _take_events(self) -> None:
        """Handle what has arrived; wait for it only when nothing else is due."""
        for number in range(_BATCH):
            event = self._session.next_event(self._patience() if number == 0 else 0)
            if event is None:
                break
            match event:
                case Connected():
                    log.info("connected to %s", self._settings.mqtt.url)
                    self._redraw_times()
                case Disconnected(reason):
                    log.warning("%s; trying again", reason)
                case Received(topic, payload):
                    self._receive(topic, payload)
                case Acknowledged():
                    pass  # A PUBACK is not a delivery: only a receipt counts.

    def _patience(self) -> float:
        if self._must_train and self._plan is not None and self._has_all_of(self._plan):
            return 0.0
        due_at = self._state.spool.next_due_at()
        if due_at is None or not self._session.has_room:
            return _IDLE_S  # A connection or a PUBACK is an event of its own.
        until_allowed_s = (1.0 - self._allowance) / self._settings.limits.messages_per_second
        return min(_IDLE_S, max(due_at - time.monotonic(), until_allowed_s, 0.001))

    def _receive(self, topic: str, payload: bytes) -> None:
        try:
            if topic == self._topics.plan:
                self._receive_plan(self._verifier.open(payload, Plan, "plan"))
            elif topic == self._topics.receipts:
                self._receive_receipts(self._verifier.open(payload, Receipts, "receipts"))
            else:
                self._assembler.add(self._verifier.open(payload, ModelChunk, "model"))
        except MessageError as error:
            # Once a reason and round: a flood of rubbish must not flood the log or wear the disk.
            if error.reason not in self._warned:
                log.warning("rejected a message on %s: %s", topic, error)
                self._warned.add(error.reason)
            self._rejected += 1

    def _receive_plan(self, plan: Plan) -> None:
        if plan.fleet != self._settings.fleet:
            raise MessageError("wrong fleet", plan.fleet)
        known = self._plan
        if known is not None and known.job == plan.job and plan.round < known.round:
            raise MessageError("replayed", f"round {plan.round} after round {known.round}")
        job = plan.job.hex()
        is_new = known is None or (known.job, known.round, known.state) != (plan.job, plan.round, plan.state)
        self._plan = plan
        self._assembler.keep_for(plan)
        if plan.state == "finished":
            self._state.expire_other_rounds(None, None)
            self._must_train = False
            if is_new:
                log.info("job %s is finished, %s", job[:8], self._spent())
            return
        if is_new:
            self._plan_arrived_at = time.monotonic()
            self._ask_again_at = self._plan_arrived_at + _ASK_AGAIN_S
            if known is None or known.job != plan.job:
                self._state.forget_other_jobs(job)
            self._warned.clear()
            expired = self._state.expire_other_rounds(job, plan.round)
            if expired:
                log.warning("%d fragments expired: their round closed before they were counted", expired)
            self._count_traffic()
        # What is pending of this round goes at new random times: we were started again, or the
        # coordinator was and may lack something. At their old times all would leave at once.
        self._redraw_times()
        self._must_train = not self._state.ledger.is_charged(self._settings.data.name, job, plan.round)

    def _receive_receipts(self, receipts: Receipts) -> None:
        if self._plan is not None and receipts.job != self._plan.job:
            return  # Of an earlier job: nothing of it is pending.
        raw, size = receipts.digests, RECEIPT_DIGEST_BYTES
        if len(raw) % size:
            raise MessageError("malformed", "receipts are not whole digests")
        self._state.mark_counted([raw[start : start + size] for start in range(0, len(raw), size)])

    def _train(self) -> None:
        plan = self._plan
        if not self._must_train or plan is None:
            return
        data, assets = self._weights_of(plan), self._assets_of(plan)
        if data is None or assets is None:
            # Chunks are on their way, or one was lost: the broker has them all.
            if time.monotonic() >= self._ask_again_at:
                self._ask_again_at = time.monotonic() + _ASK_AGAIN_S
                self._session.ask_again()
            return
        self._must_train = False
        job, weights = plan.job.hex(), weights_from_bytes(data)
        try:
            if not np.isfinite(weights).all():
                raise Declined("the model has weights that are not finite")
            records = self._trainer.records
            records.refresh()
            price = decide(
                plan, records.dataset, self._state.ledger, self._settings.data.name, now=time.time()
            )
            mechanism, update = self._trainer.release(plan, assets, weights)
            fragments = self._sealed(plan, update)
        except (Declined, ConfigurationError, ParameterError, DataError) as error:
            log.warning("declined round %d of job %s: %s", plan.round, job[:8], error)
            self._state.note_declined(job, plan.round, str(error))
            return
        charge = Charge(
            dataset=self._settings.data.name, job=job, round=plan.round, mechanism=plan.mechanism.name,
            noise_multiplier=plan.noise_multiplier, sampling_rate=plan.mechanism.sampling_rate,
            steps=plan.mechanism.local_steps, clip_norm=mechanism.clip_norm,
            granularity=mechanism.granularity, dimension=mechanism.dimension,
            statistical_distance=mechanism.statistical_distance, schedule=schedule_digest(plan),
            job_epsilon=price.job_epsilon, delta=plan.mechanism.delta,
            cumulative_epsilon=price.cumulative_epsilon, cumulative_delta=price.cumulative_delta,
            charged_at=datetime.now(UTC).isoformat(timespec="seconds"), loss_grid=price.loss_grid,
            accumulation_slack=mechanism.accumulation_slack,
        )  # fmt: skip
        self._state.release(charge, fragments)
        self._redraw_times()
        log.info("round %d of %d: charged and spooled, %s", plan.round, plan.rounds, self._spent())

    def _weights_of(self, plan: Plan) -> bytes | None:
        return self._assembler.get(plan.model.digest, 4 * plan.model.parameters)

    def _assets_of(self, plan: Plan) -> dict[str, bytes] | None:
        """What the round needs besides the weights, by role, or None while some of it is missing."""
        for asset in plan.assets:
            if asset.role in self._trainer.needed_assets(plan) and asset.digest not in self._assets:
                data = self._assembler.get(asset.digest, asset.size)
                if data is None:
                    return None
                self._assets[asset.digest] = data
        wanted = {asset.digest: asset.role for asset in plan.assets}
        self._assets = {digest: data for digest, data in self._assets.items() if digest in wanted}
        return {wanted[digest]: data for digest, data in self._assets.items()}

    def _has_all_of(self, plan: Plan) -> bool:
        return self._weights_of(plan) is not None and self._assets_of(plan) is not None

    def _sealed(self, plan: Plan, update: NDArray[np.int64]) -> list[SpooledFragment]:
        """The fragments of an update, sealed; their times are drawn once they are on disk."""
        try:
            sealed = [
                (receipt_digest(fragment.id), seal(fragment, plan.fleet, plan.sealing_key))
                for fragment in cut(update, plan)
            ]
        except ValueError as error:  # 32 bytes that are no point of the curve
            raise Declined(f"nothing can be sealed to the plan's key: {error}") from error
        return [SpooledFragment(digest, message, UNSCHEDULED) for digest, message in sealed]

    def _draw_times(self, plan: Plan, count: int) -> list[float]:
        """Independent monotonic times in the jitter window, which opens whole slots after the plan came.

        How long training took depends on the lot, and the lot is private; as long as it fits
        the first slot, nothing of that shows. A window that is about to open is let pass: what
        is left to do before publishing must not show either.
        """
        elapsed = (time.monotonic() - self._plan_arrived_at) / plan.compute_slot_s
        slots = math.floor(elapsed + _SLOT_MARGIN) + 1
        opens_at = self._plan_arrived_at + slots * plan.compute_slot_s
        return [opens_at + self._random.uniform(0.0, plan.jitter_window_s) for _ in range(count)]

    def _redraw_times(self) -> None:
        """Give everything pending a random time: after its release, and after an interruption."""
        if self._plan is not None:
            pending = self._state.spool.pending()
            self._state.reschedule(zip(self._draw_times(self._plan, len(pending)), pending, strict=True))

    def _publish(self) -> None:
        if not self._session.has_room or self._plan is None:
            return
        limit = self._take_allowance()
        now = time.monotonic()
        resend_at: dict[bytes, float] = {}
        for fragment in self._state.spool.due(now, limit):
            # What the session cannot send at once it would send later, in a burst.
            if not self._session.has_room:
                break
            if self._session.publish(self._topics.fragments, fragment.message) is None:
                break
            self._allowance -= 1
            resend_at[fragment.digest] = now + _RESEND_S * self._random.uniform(1.0, 2.0)
        if resend_at:
            self._state.mark_sent(resend_at, time.time())

    def _take_allowance(self) -> int:
        """How many messages the rate limit lets go now (token bucket)."""
        now = time.monotonic()
        rate = self._settings.limits.messages_per_second
        self._allowance = min(float(_BURST), self._allowance + rate * (now - self._allowance_at))
        self._allowance_at = now
        return int(self._allowance)

    def _count_traffic(self) -> None:
        up, down = self._session.bytes_up, self._session.bytes_down
        known_up, known_down = self._reported_bytes
        self._state.add_to_counters(
            bytes_up=up - known_up, bytes_down=down - known_down, rejected=self._rejected
        )
        self._rejected = 0
        self._counted_at = time.monotonic()
        self._reported_bytes = (up, down)

    def _spent(self) -> str:
        name = self._settings.data.name
        budget = self._state.ledger.budget(name)
        epsilon = self._state.ledger.epsilon_spent(name)
        spent = f"spent ε = {epsilon:.3f} of {budget.epsilon:g} at δ = {budget.delta:g}"
        return f"{spent} on {name!r} (record level)"
