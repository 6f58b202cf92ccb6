"""The rounds of a virtual fleet: planned, charged, computed, stepped and evaluated, one after the other."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace

from coordinator.aggregation import Step, median_of_means
from coordinator.models import ModelFiles
from coordinator.settings import FleetSettings
from dpagent.privacy.mechanisms.bounded import CapNotMetError
from dpagent.privacy.noise.entropy import Entropy
from dpagent.protocol.codec import encode
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.sealing import sealed_bytes
from dpagent.protocol.task import RoundTask
from dpagent.wording import counted
from simulation.job_rounds import JobRounds
from simulation.training_loop import without_noise
from simulation.virtual.checkpoint import Checkpoint, RoundDone
from simulation.virtual.crew import Crew
from simulation.virtual.devices import GroupSums, RoundOrder
from simulation.virtual.insecure import insecure_entropy
from simulation.virtual.ledger import VirtualLedger

log = logging.getLogger(__name__)


class VirtualRounds(JobRounds):
    """The rounds of a run from where it is.

    Args:
        fleet: The coordinator's settings.
        checkpoint: Where the run is.
        crew: The workers.
        models: The coordinator's files of the job.
        insecure_noise_seed: Of all lots and noise; None: from the operating system.
        tell: Is told the round, and how many of its devices are done.
    """

    def __init__(
        self,
        fleet: FleetSettings,
        checkpoint: Checkpoint,
        crew: Crew,
        models: ModelFiles,
        insecure_noise_seed: int | None,
        tell: Callable[[int, int], None],
    ) -> None:
        super().__init__(fleet, models.spec, checkpoint.job)
        self._checkpoint, self._crew, self._models = checkpoint, crew, models
        self._seed, self._tell = insecure_noise_seed, tell
        self._model = checkpoint.model
        self._norm_before: float | None = None
        """The clip norm of the last round, where it follows a quantile."""
        self._spent = checkpoint.rounds[-1].epsilon if checkpoint.rounds else 0.0
        if self._spec.front_end:
            self._compute_features(with_projection=bool(checkpoint.rounds))

    def next(self, ledger: VirtualLedger) -> Checkpoint:
        """Run the next round; the checkpoint after it.

        Raises:
            DpagentError: It cannot run.
        """
        began, number = time.monotonic(), len(self._checkpoint.rounds) + 1
        self._norm_before = None
        try:
            task, sent = self._plan(number, self._models.assets)
        except CapNotMetError as error:
            log.warning("the job ends after %s. %s", counted(number - 1, "round"), error)
            return replace(self._checkpoint, is_over=True)
        ledger.charge(task)  # Before a record is read.
        order = RoundOrder(task.plan, sent, self._fleet, insecure_noise_seed=self._seed)
        found = self._crew.compute(order, lambda devices: self._tell(number, devices))
        if self._fleet.privacy.clipping.kind == "quantile":
            self._norm_before = self._model.clip_norm
        step, accuracy = self._stepped(task, found)
        self._spent = self._planner.epsilon_after(task.release)
        counts = [found.sums[each][0] if each in found.sums else 0 for each in range(task.release.blocks)]
        done = RoundDone(
            accuracy=accuracy,
            clamped=step.clamped,
            kept=step.kept,
            out_of_range=step.out_of_range,
            clip_norm=self._norm_before,
            noise_multiplier=task.release.mechanism.noise_multiplier,
            epsilon=self._spent,
            seconds=time.monotonic() - began,
            counted=sum(counts),
            rejected=found.rejected.total(),
            least_counted=min(counts),
            bytes_up=task.release.blocks * sealed_bytes(task.plan),
            bytes_down=len(sent) + len(encode(task.plan)),
        )
        self._model = step.model
        self._checkpoint = replace(
            self._checkpoint,
            rounds=(*self._checkpoint.rounds, done),
            model=step.model,
            is_over=number >= self._fleet.rounds,
        )
        return self._checkpoint

    def tell_of_norm(self) -> None:
        """As of ``coordinator.stepping.Stepper``, of the last round, once its checkpoint is kept."""
        if self._norm_before is not None:
            self._stepper.tell_of_norm(self._norm_before, self._model.clip_norm)

    def _stepped(self, task: RoundTask, found: GroupSums) -> tuple[Step, float | None]:
        """The model after a round, and its accuracy."""
        release = task.release
        if isinstance(release, NoisySum) and (moments := release.second_moments) is not None:
            self._models.set_projection(moments.matrix(median_of_means(release, [found.sums])))
            self._compute_features(with_projection=True)
            return Step(self._model), None
        step = self._stepper.step(
            release, self._model, [found.sums], entropy=self._entropy(release.plan.round)
        )
        return step, self._models.accuracy(step.model.weights)

    def _entropy(self, number: int) -> Entropy:
        """Of the coordinator's noise."""
        return os.urandom if self._seed is None else insecure_entropy(self._seed, number, 0, "noise")

    def _compute_features(self, *, with_projection: bool) -> None:
        before = self._spec.projection is not None and not with_projection
        self._crew.compute_features(self._spec, self._models.front_end_assets, before_projection=before)


class PlainRounds(JobRounds):
    """The same training without noise, for comparison. It gives no privacy.

    Args:
        fleet: The coordinator's settings.
        checkpoint: Of a run that is over; its projection is used.
        crew: The workers, with the features of that run.
        models: The coordinator's files of the job.
    """

    def __init__(self, fleet: FleetSettings, checkpoint: Checkpoint, crew: Crew, models: ModelFiles) -> None:
        super().__init__(without_noise(fleet), models.spec, checkpoint.job)
        self._checkpoint, self._crew, self._models = checkpoint, crew, models
        if checkpoint.baseline_model is not None:
            self._model = checkpoint.baseline_model

    def next(self) -> Checkpoint:
        """Run the next round; the checkpoint after it."""
        number, accuracy = len(self._checkpoint.baseline) + 1, None
        if number >= self.first_round:
            task, sent = self._plan(number, self._models.assets)
            self._spent = self._planner.epsilon_after(task.release)
            found = self._crew.compute(RoundOrder(task.plan, sent, self._fleet, with_noise=False))
            assert found.exact is not None
            mean = found.exact / found.devices
            if isinstance(task.release, NoisySum):
                step = self._stepper.step_by_mean(task.release, self._model, mean)
            else:
                distance = task.weights_from(sent) - mean
                step = self._stepper.step_by_distance(task.release, self._model, distance)
            self._model = step.model
            accuracy = self._models.accuracy(self.weights)
        self._checkpoint = replace(
            self._checkpoint,
            baseline=(*self._checkpoint.baseline, accuracy),
            baseline_model=self._model,
        )
        return self._checkpoint
