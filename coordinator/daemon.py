"""The coordinator: a loop that reads like the round in ``architecture``.

It announces a round, opens, checks and counts fragments in batches, answers with receipts,
and closes the round at the deadline or when every device's fragments are in. All state is
in its database: killed anywhere, it goes on from there, and announces the open round again
so that devices resend what it may have missed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter

import numpy as np
from pydantic import ValidationError

from coordinator.aggregation import mean_release, take_step
from coordinator.keys import load_opener, load_signer
from coordinator.models import ModelFiles
from coordinator.planning import (
    gradient_steps,
    new_job,
    plan_round,
    require_every_round_fits,
    require_sendable,
)
from coordinator.settings import FleetSettings, require_same_job
from coordinator.store import Job, OpenedFragment, OpenRound, RoundResult, Store
from dpagent.errors import PlanError
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.opening import open_dataset
from dpagent.privacy.clipping import adapted_norm
from dpagent.privacy.covariance import SecondMoments
from dpagent.protocol.codec import MessageError
from dpagent.protocol.fragments import (
    block_count,
    chunked,
    content_digest,
    read_block,
    receipt_digest,
    weights_to_bytes,
)
from dpagent.protocol.messages import RECEIPTS_PER_MESSAGE, AssetTerms, Plan, Receipts
from dpagent.protocol.topics import Topics
from dpagent.storage import StateDirectory, disk_errors
from dpagent.transport.session import (
    Acknowledged,
    Connected,
    Disconnected,
    MqttSession,
    Received,
    Subscription,
)

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
        self._spec = settings.model.spec()
        self._models = ModelFiles(settings, self._spec, _load_test_data(settings))
        self._optimiser = settings.optimiser.optimiser()
        require_sendable(self._spec, self._models.assets)
        # A schedule falls over the steps, whose first has the rate it starts from.
        self._learning_rate = settings.optimiser.learning_rates(gradient_steps(settings, self._spec))
        self._topics = Topics(settings.fleet)
        self._session = MqttSession(
            settings.mqtt,
            client_id=f"dpagent-coordinator-{settings.fleet}",
            subscriptions=[Subscription(self._topics.fragments)],
            persistent=True,
        )
        self._plan: Plan | None = None
        self._assets_are_out = False
        # Last, because from here on the directory is held.
        self._directory = StateDirectory(settings.state_dir)
        try:
            self._signer = load_signer(settings.keys_dir, settings.fleet)
            self._opener = load_opener(settings.keys_dir, settings.fleet)
            self._store = Store(settings.state_dir)
            with disk_errors(self._store.file):
                self._job = self._begin_or_resume()
                self._weights, self._state, self._clip_norm = self._store.model()
        except BaseException:
            self._directory.close()
            raise

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
                log.info("the job is finished; the model is in %s", self._models.final)
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
            state = np.zeros((self._optimiser.rows, len(weights)))
            self._store.begin(job, weights, state, self._settings.privacy.clip_norm)
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
            clip_norm=self._clip_norm,
            assets=self._asset_terms(),
        )

    def _asset_terms(self) -> list[AssetTerms]:
        return [
            AssetTerms.model_validate({"role": role, "digest": content_digest(data), "size": len(data)})
            for role, data in self._models.assets.items()
        ]

    def _announce(self) -> None:
        """Publish the model and then the plan, both retained. Without a connection, later."""
        if self._plan is None or not self._session.connected:
            return
        if not self._assets_are_out:
            self._announce_assets()
        for chunk in chunked(weights_to_bytes(self._weights)):
            self._session.publish(
                self._topics.model_chunk(chunk.index), self._signer.sign(chunk, "model"), retain=True
            )
        self._session.publish(self._topics.plan, self._signer.sign(self._plan, "plan"), retain=True)

    def _announce_assets(self) -> None:
        """Publish what all rounds need, once a connection."""
        for role, data in self._models.assets.items():
            for chunk in chunked(data):
                self._session.publish(
                    self._topics.asset_chunk(role, chunk.index),
                    self._signer.sign(chunk, "model"),
                    retain=True,
                )
        self._assets_are_out = True

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
                    self._assets_are_out = False
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
        position, values = read_block(fragment, plan.wire, plan.dimension)
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
        blocks = block_count(self._plan.dimension, self._plan.wire.block)
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
        if plan.second_moments is not None:
            self._close_projection(plan, plan.second_moments)
            return
        clipping = plan.clipping(self._spec.layer_sizes)
        release = mean_release(plan, self._store.sums(plan.round), clipping.radius)
        clip_norm = self._clip_norm
        if clipping.count_weight:
            wanted = self._settings.privacy.clipping
            clip_norm = adapted_norm(
                clip_norm, clipping.share_within(release[-1]), quantile=wanted.quantile, rate=wanted.rate
            )
        gradient = clipping.gradient(release)
        learning_rate = self._learning_rate.at(plan.step)
        step = take_step(plan, gradient, self._weights, self._state, self._optimiser, learning_rate)
        accuracy = self._models.accuracy(step.weights)
        if self._settings.keep_models == "all":
            self._models.write(self._models.of_round(plan.round), step.weights, self._job, plan.round)
        epsilon = self._job.epsilon_by_round[plan.round - 1]
        self._store.close_round(
            plan.round, step.weights, step.state, clip_norm,
            RoundResult(accuracy, step.clamped, step.kept, plan.noise_multiplier, epsilon),
        )  # fmt: skip
        self._weights, self._state, self._clip_norm = step.weights, step.state, clip_norm
        self._plan = None
        shown = "not evaluated" if accuracy is None else f"accuracy {accuracy:.2%}"
        log.info("round %d of %d: %s, ε = %.3f", plan.round, plan.rounds, shown, epsilon)

    def _close_projection(self, plan: Plan, moments: SecondMoments) -> None:
        """Take the fleet's leading directions as a part of the model from here on; the weights stay."""
        release = mean_release(plan, self._store.sums(plan.round), moments.radius)
        self._models.set_projection(moments.matrix(release))
        epsilon = self._job.epsilon_by_round[plan.round - 1]
        self._store.close_round(
            plan.round, self._weights, self._state, self._clip_norm,
            RoundResult(None, 0, 1.0, plan.noise_multiplier, epsilon),
        )  # fmt: skip
        self._plan, self._assets_are_out = None, False
        log.info("round %d of %d: directions of the projection, ε = %.3f", plan.round, plan.rounds, epsilon)

    def _finish(self) -> bool:
        """Export the model with its privacy statement, tell the fleet, mark the job as finished.

        Returns:
            Whether the fleet could be told; if not, the job is not over yet.
        """
        self._models.write(self._models.final, self._weights, self._job, self._settings.rounds)
        if not self._say_goodbye():
            return False
        self._store.finish()
        log.info("the job is finished; the model is in %s", self._models.final)
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
            clip_norm=self._clip_norm,
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
    return None if settings.test_data is None else open_dataset(settings.test_data)
