"""A fleet's training in one process: the product's own steps, without messages, ledgers and waiting.

A round is planned, summed, aggregated and stepped by the functions that coordinator and agents run; no
fragment is lost. With noise, each device's part equals its agent's message, to the bit, and gives the same
gradient. Without noise, the lots' clipped sums are added up as they are, for the demo's
comparison. Such a run gives no privacy. The seed sets the initial weights; lots and noise come from the
operating system's entropy, as they always do.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent.noisy_sums import clipped_sum, noisy_gradients, published_step
from coordinator.aggregation import median_of_means
from coordinator.seats import Sums
from coordinator.settings import FleetSettings
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.engine import Engine
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.privacy.mechanisms.published import PublishedState
from dpagent.protocol.fragments import cut, read_tally
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.reports import Reports
from dpagent.protocol.updates import Updates
from simulation.job_rounds import JobRounds
from simulation.planning import trial_job


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The effect of the coordinator's cap in a round.

    Attributes:
        clamped: Coordinates beyond their bound.
        shortened: Whether the capped gradient had to be shortened to the ball of a mean of clipped gradients.
    """

    clamped: int
    shortened: bool


class TrainingLoop(JobRounds):
    """A fleet in one process.

    Args:
        fleet: The coordinator's settings.
        spec: The model.
        shards: The devices' records; behind a front end, their features.
        test: The test data, or their features.
        noise: Whether devices add noise.

    """

    def __init__(
        self, fleet: FleetSettings, spec: ModelSpec, shards: Sequence[Dataset], test: Dataset, *, noise: bool
    ) -> None:
        fleet = fleet if noise else without_noise(fleet)
        super().__init__(fleet, spec, trial_job(fleet, spec))
        self._shards, self._test, self._noise = shards, test, noise
        self._engine = NumpyEngine(spec.head, norm=fleet.privacy.gradient_norm)
        self._received = self._model.weights
        self._states: list[PublishedState] = []
        """Of each device, under the ``published`` cap."""

    def round(self, number: int) -> RoundResult:
        """Run a round that steps the model, :attr:`first_round` or a later one, in order."""
        task, sent = self._plan(number)
        self._received = task.weights_from(sent)
        self._spent = self._planner.epsilon_after(task.release)
        match task.release:
            case NoisySum() as release:
                return self._step(release)
            case Reports() as reports:
                return self._step_by_reports(reports)
            case Updates() as updates:
                return self._step_by_updates(updates)

    def _step(self, release: NoisySum) -> RoundResult:
        clipping = release.clipping
        mean = self._noisy_mean(release) if self._noise else self._exact_mean(release)
        step = self._stepper.step_by_mean(release, self._model, mean)
        self._model = step.model
        norm = step.kept * float(np.linalg.norm(clipping.gradient(mean)))
        # A shortened vector ends on the ball; no other has exactly that norm.
        return RoundResult(step.clamped, math.isclose(norm, clipping.reference, rel_tol=1e-9))

    def _step_by_reports(self, release: Reports) -> RoundResult:
        trained = [release.training.train(self._engine, self._received, shard) for shard in self._shards]
        if self._noise:
            step = self._stepper.step(release, self._model, [self._counted(release, trained)])
        else:
            distance = self._received - np.mean(trained, axis=0, dtype=np.float64)
            step = self._stepper.step_by_distance(release, self._model, distance)
        self._model = step.model
        return RoundResult(0, shortened=False)

    def _step_by_updates(self, release: Updates) -> RoundResult:
        trained = [release.training.train(self._engine, self._received, shard) for shard in self._shards]
        if self._noise:
            update = np.sum([release.update_of(each, self._received) for each in trained], axis=0)
            self._model = self._stepper.step_by_update(release, self._model, update).model
        else:
            distance = self._received - np.mean(trained, axis=0, dtype=np.float64)
            self._model = self._stepper.step_by_distance(release, self._model, distance).model
        return RoundResult(0, shortened=False)

    def _counted(self, release: Reports, trained: Sequence[NDArray[np.float32]]) -> Sums:
        """What the coordinator adds up of the fragments of all devices."""
        plan = release.plan
        sums: Sums = {}
        for weights in trained:
            for fragment in cut(release.update_of(weights, self._received), plan):
                tally = read_tally(fragment, plan, release.terms, release.blocks)
                count, total = sums.get(fragment.position, (0, np.zeros_like(tally)))
                sums[fragment.position] = (count + 1, total + tally)
        return sums

    def accuracy(self) -> float:
        """Share of the test records that the model gets right, from 0 to 1."""
        right = sum(
            int(np.count_nonzero(self._engine.logits(self.weights, inputs).argmax(axis=1) == labels))
            for inputs, labels in self._test.batches()
        )
        return right / len(self._test)

    def _noisy_mean(self, release: NoisySum) -> NDArray[np.float64]:
        """As the coordinator decodes it from the integer sums of the fragments, dealt to its groups."""
        updates = self._updates(release)
        dealt: list[Sums] = [{} for _ in range(self._fleet.aggregation.dealt)]
        block = release.plan.wire.block
        for place in range(release.blocks):
            parts = [update[place * block : (place + 1) * block] for update in updates]
            random.SystemRandom().shuffle(parts)
            for number, group in enumerate(dealt):
                if own := parts[number :: len(dealt)]:
                    group[place] = (len(own), np.sum(own, axis=0))
        return median_of_means(release, dealt)

    def _updates(self, release: NoisySum) -> list[NDArray[np.int64]]:
        """What each device sends, (dimension,) in wire units."""
        if (cap := release.published_cap) is not None:
            self._states = self._states or [cap.start(release.dimension)] * len(self._shards)
            sums = (clipped_sum(release, self._received, shard, self._engine) for shard in self._shards)
            steps = [
                published_step(release, self._received, total, state)
                for total, state in zip(sums, self._states, strict=True)
            ]
            self._states = [state for _, state in steps]
            return [values for values, _ in steps]
        return [noisy_gradients(release, self._received, shard, self._engine) for shard in self._shards]

    def _exact_mean(self, release: NoisySum) -> NDArray[np.float64]:
        """The same without noise and rounding."""
        mean = np.zeros(release.dimension)
        for shard in self._shards:
            mean += exact_gradient(release, self._received, shard, self._engine)
        return mean / len(self._shards)


def without_noise(fleet: FleetSettings) -> FleetSettings:
    """The settings of a job without noise: there is none to bound or to replace, and no price."""
    if fleet.cap.kind not in ("bounded", "published"):
        return fleet
    return fleet.with_values({"cap": fleet.cap.with_values({"kind": "none"})})


def exact_gradient(
    release: NoisySum, weights: NDArray[np.float32], shard: Dataset, engine: Engine
) -> NDArray[np.float64]:
    """A device's part in the mean, (dimension,), without noise and rounding. Private.

    Args:
        release: of the round.
        weights: (parameters,) as they were sent.
        shard: the device's records, as the engine takes them.
        engine: computes their gradients.
    """
    part = clipped_sum(release, weights, shard, engine) / release.sampling.expected_lot
    if release.device_cap is not None:
        part, _ = release.device_cap.apply(part, weights, radius=release.clipping.radius)
    return part
