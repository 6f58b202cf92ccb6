"""The coordinator: a loop that reads like the round in ``architecture``.

It announces a round, opens, checks and counts fragments in batches, answers with receipts,
and closes the round at the deadline or when every device's fragments are in. All state is
in its database: killed anywhere, it goes on from there, and announces the open round again
so that devices resend what it may have missed.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from coordinator.aggregation import mean_gradient, take_step
from coordinator.keys import load_opener, load_signer
from coordinator.planning import new_job, plan_round, require_every_round_fits
from coordinator.settings import FleetSettings, require_same_job
from coordinator.store import Job, OpenedFragment, OpenRound, RoundResult, Store
from dpagent.errors import PlanError
from dpagent.learning import Dataset, MomentumSgd, built_in, check_fits, load_idx, load_npz
from dpagent.learning.evaluation import OnnxEvaluator
from dpagent.learning.onnx_export import export_onnx
from dpagent.privacy import DiscretisedGaussian
from dpagent.protocol.codec import MessageError
from dpagent.protocol.fragments import block_count, chunk_model, read_block, receipt_digest, weights_to_bytes
from dpagent.protocol.messages import RECEIPTS_PER_MESSAGE, Plan, Receipts
from dpagent.protocol.topics import Topics
from dpagent.storage import StateDirectory, disk_errors, write_atomically
from dpagent.transport import Acknowledged, Connected, Disconnected, MqttSession, Received, Subscription

log = logging.getLogger(__name__)

_IDLE_S = 0.25
_BATCH = 256
_FAREWELL_S = 5.0


class Coordinator:
    """The daemon of one fleet and one job.

    Args:
        settings: ``fleet.yaml``, with paths resolved.

    Raises:
        ConfigurationError, DataError, PlanError, StateInUseError, StorageError: It cannot
            start; the text says why.
    """

    def __init__(self, settings: FleetSettings) -> None:
        self._settings = settings
        self._spec = built_in(settings.model.name)
        self._test = _load_test_data(settings)
        if self._test is not None:
            check_fits(self._test, self._spec)
        self._optimiser = MomentumSgd(settings.optimiser.learning_rate, settings.optimiser.momentum)
        self._topics = Topics(settings.fleet)
        self._session = MqttSession(
            settings.mqtt,
            client_id=f"dpagent-coordinator-{settings.fleet}",
            subscriptions=[Subscription(self._topics.fragments)],
            persistent=True,
        )
        self._plan: Plan | None = None
        # Last, because from here on the directory is held.
        self._directory = StateDirectory(settings.state_dir)
        try:
            self._signer = load_signer(settings.keys_dir, settings.fleet)
            self._opener = load_opener(settings.keys_dir, settings.fleet)
            self._store = Store(settings.state_dir)
            with disk_errors(self._store.file):
                self._job = self._begin_or_resume()
                self._weights, self._velocity = self._store.model()
        except BaseException:
            self._directory.close()
            raise

    @property
    def model_file(self) -> Path:
        """Where the finished model is exported."""
        return self._settings.state_dir / "model.onnx"

    def run(self, stop: threading.Event) -> bool:
        """Run rounds until the job is finished or ``stop`` is set.

        Returns:
            Whether the job is finished.

        Raises:
            BrokerError: The broker refuses us.
            StorageError: The disk fails; what was receipted is safe.
        """
        try:
            if self._store.is_finished():
                log.info("the job is finished; the model is in %s", self.model_file)
                return True
            # The network's errors stay in the session; what comes up here is the disk's.
            with disk_errors(self._store.file), self._session:
                while not stop.is_set():
                    if self._store.closed_rounds() >= self._settings.rounds:
                        if self._finish():
                            return True
                        continue
                    if self._plan is None:
                        self._open_round()
                    self._take_fragments()
                    if self._is_round_over():
                        self._close_round()
            return False
        finally:
            self._store.close()
            self._directory.close()

    def _begin_or_resume(self) -> Job:
        terms = self._settings.job_terms()
        job = self._store.job()
        if job is None:
            job = new_job(self._settings)
            # A plan that no device would accept must fail here, not on a thousand boards.
            weights = self._spec.initial_weights(self._settings.model.seed)
            try:
                plan_round(
                    self._settings, job, OpenRound(1, 0, 0), self._spec, weights_to_bytes(weights),
                    self._opener.public_key,
                )  # fmt: skip
            except ValidationError as error:
                problem = error.errors(include_url=False)[0]
                where = ".".join(str(part) for part in problem["loc"]) or "plan"
                raise PlanError(f"No device would accept this plan: {where}: {problem['msg']}.") from error
            require_every_round_fits(self._settings, job, self._spec)
            self._store.begin(job, weights)
            log.info(
                "job %s begins: %d rounds, ε = %.4g",
                job.id.hex()[:8],
                self._settings.rounds,
                job.epsilon_by_round[-1],
            )
        else:
            require_same_job(job.terms, terms, self._settings.state_dir)
            log.info("job %s goes on after round %d", job.id.hex()[:8], self._store.closed_rounds())
        return job

    def _open_round(self) -> None:
        """Open the next round, or take up the one that was open when we were stopped."""
        now = time.time()
        current = self._store.open_round()
        number = self._store.closed_rounds() + 1 if current is None else current.number
        opened_at = now if current is None else current.opened_at
        current = self._store.start_round(number, opened_at, now + self._settings.round.deadline_s)
        self._plan = self._make_plan(current)
        self._announce()

    def _make_plan(self, current: OpenRound) -> Plan:
        return plan_round(
            self._settings,
            self._job,
            current,
            self._spec,
            weights_to_bytes(self._weights),
            self._opener.public_key,
        )

    def _announce(self) -> None:
        """Publish the model and then the plan, both retained. Without a connection, later."""
        if self._plan is None or not self._session.connected:
            return
        for chunk in chunk_model(weights_to_bytes(self._weights)):
            self._session.publish(
                self._topics.model_chunk(chunk.index), self._signer.sign(chunk, "model"), retain=True
            )
        self._session.publish(self._topics.plan, self._signer.sign(self._plan, "plan"), retain=True)

    def _take_fragments(self) -> None:
        """Wait for messages, then open, check, count and receipt them as one batch."""
        batch: list[OpenedFragment] = []
        rejected: list[str] = []
        for number in range(_BATCH):
            event = self._session.next_event(_IDLE_S if number == 0 else 0)
            if event is None:
                break
            match event:
                case Connected():
                    log.info("connected to %s", self._settings.mqtt.url)
                    self._announce()
                case Disconnected(reason):
                    log.warning("%s; trying again", reason)
                case Received(_, payload):
                    try:
                        batch.append(self._open(payload))
                    except MessageError as error:
                        log.debug("rejected a fragment: %s", error)
                        rejected.append(error.reason)
                case Acknowledged():
                    pass
        # One line a batch and reason: a flood of rubbish must not flood the log.
        for reason, count in Counter(rejected).items():
            log.warning("rejected %d messages: %s", count, reason)
            self._store.reject(reason, count)
        if batch:
            self._count(batch)

    def _open(self, payload: bytes) -> OpenedFragment:
        """Open and check a fragment.

        Raises:
            MessageError: It is not a fragment of this job that could be counted.
        """
        fragment = self._opener.open(payload)
        plan = self._plan
        if plan is None or fragment.job != plan.job:
            raise MessageError("wrong job", fragment.job.hex())
        if fragment.round > plan.round:
            raise MessageError("wrong round", f"{fragment.round} while round {plan.round} is open")
        if fragment.round < plan.round:
            # Too late to count, whatever its size was in its own round.
            return OpenedFragment(fragment.id, fragment.round, 0, np.zeros(0, np.int64), time.time())
        position, values = read_block(fragment, plan.wire, plan.model.parameters)
        return OpenedFragment(fragment.id, fragment.round, position, values, time.time())

    def _count(self, batch: list[OpenedFragment]) -> None:
        assert self._plan is not None
        counted = self._store.count(batch, self._plan.round)
        if counted.late:
            log.info("%d messages came after their round was over", counted.late)
        digests = [receipt_digest(identity) for identity in (*counted.fresh, *counted.repeated)]
        for start in range(0, len(digests), RECEIPTS_PER_MESSAGE):
            receipts = Receipts(
                version=1, kind="receipts", job=self._job.id, round=self._plan.round,
                digests=b"".join(digests[start : start + RECEIPTS_PER_MESSAGE]),
            )  # fmt: skip
            # Without a connection the receipt is lost: the device resends and is answered then.
            self._session.publish(self._topics.receipts, self._signer.sign(receipts, "receipts"))

    def _is_round_over(self) -> bool:
        """Whether every position has every device's fragment, or the deadline has passed."""
        assert self._plan is not None
        counts = self._store.counts(self._plan.round)
        blocks = block_count(self._plan.model.parameters, self._plan.wire.block)
        # A sum over blocks would let many fragments of one block stand in for none of another.
        scarcest = min(counts.get(position, 0) for position in range(blocks))
        if scarcest >= self._settings.devices:
            return True
        if time.time() < self._plan.deadline:
            return False
        if scarcest >= self._settings.round.minimum_devices:
            log.warning(
                "round %d closes at its deadline with %d of %d fragments, at least %d of every block",
                self._plan.round, sum(counts.values()), blocks * self._settings.devices, scarcest,
            )  # fmt: skip
            return True
        log.warning(
            "round %d has %d of %d fragments at its deadline, but of some block only %d, "
            "fewer than the %d needed; it stays open for another %g s. Devices may be away or have declined: "
            "`dpagent budget show` on a board says why",
            self._plan.round, sum(counts.values()), blocks * self._settings.devices, scarcest,
            self._settings.round.minimum_devices, self._settings.round.deadline_s,
        )  # fmt: skip
        self._plan = None
        self._open_round()
        return False

    def _close_round(self) -> None:
        """Mean, cap, step, evaluate, store."""
        assert self._plan is not None
        plan = self._plan
        gradient = mean_gradient(plan, self._store.sums(plan.round))
        step = take_step(plan, gradient, self._weights, self._velocity, self._optimiser)
        accuracy = None
        if self._test is not None:
            accuracy = OnnxEvaluator(export_onnx(self._spec, step.weights, metadata={})).accuracy(self._test)
        epsilon = self._job.epsilon_by_round[plan.round - 1]
        self._store.close_round(
            plan.round, step.weights, step.velocity,
            RoundResult(accuracy, step.clamped, step.kept, plan.noise_multiplier, epsilon),
        )  # fmt: skip
        self._weights, self._velocity = step.weights, step.velocity
        self._plan = None
        shown = "not evaluated" if accuracy is None else f"accuracy {accuracy:.2%}"
        log.info("round %d of %d: %s, ε = %.3f", plan.round, plan.rounds, shown, epsilon)

    def _finish(self) -> bool:
        """Export the model with its privacy statement, tell the fleet, mark the job as finished.

        Returns:
            Whether the fleet could be told; if not, the job is not over yet.
        """
        privacy = self._settings.privacy
        statement = DiscretisedGaussian.job_statement(privacy.epsilon, privacy.delta)
        metadata = {
            "dpagent.job": self._job.id.hex(),
            "dpagent.privacy": statement.sentence(),
            "dpagent.privacy_statement": json.dumps(statement.as_dict(), ensure_ascii=False),
            "dpagent.epsilon_spent": repr(self._job.epsilon_by_round[-1]),
        }
        write_atomically(self.model_file, export_onnx(self._spec, self._weights, metadata=metadata))
        if not self._say_goodbye():
            return False
        self._store.finish()
        log.info("the job is finished; the model is in %s", self.model_file)
        return True

    def _say_goodbye(self) -> bool:
        """Announce the end of the job; whether the broker took it within a few seconds."""
        now = time.time()
        last = OpenRound(self._settings.rounds, now, now)
        plan = plan_round(
            self._settings,
            self._job,
            last,
            self._spec,
            weights_to_bytes(self._weights),
            self._opener.public_key,
            state="finished",
        )
        message = self._signer.sign(plan, "plan")
        handle: int | None = None
        until = time.monotonic() + _FAREWELL_S
        while time.monotonic() < until:
            if handle is None:
                handle = self._session.publish(self._topics.plan, message, retain=True)
            event = self._session.next_event(0.2)
            if handle is not None and event == Acknowledged(handle):
                return True
        log.warning("the broker did not take the last message, that the job is over; trying again")
        return False


def _load_test_data(settings: FleetSettings) -> Dataset | None:
    if settings.test_data is None:
        return None
    if settings.test_data.kind == "idx":
        return load_idx(settings.test_data.path, "test")
    return load_npz(settings.test_data.path)
