"""From what a round counted to the next model, for every release: post-processing, but for the noise that the
coordinator adds to updates."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregation import Step, median_of_means, take_step
from coordinator.model_state import ModelState
from coordinator.planning import gradient_steps
from coordinator.report_planning import first_radii
from coordinator.report_step import take_report_step
from coordinator.seats import Sums
from coordinator.settings import FleetSettings
from coordinator.update_step import take_update_step
from dpagent.learning.models.spec import ModelSpec
from dpagent.privacy.clipping import adapted_norm
from dpagent.privacy.noise.entropy import Entropy
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.reports import Reports
from dpagent.protocol.task import Release
from dpagent.protocol.updates import Updates

log = logging.getLogger(__name__)


class Stepper:
    """Steps the model of a job.

    Args:
        settings: ``fleet.yaml``.
        spec: the model.

    Raises:
        PlanError: No round of the job steps the model.
    """

    def __init__(self, settings: FleetSettings, spec: ModelSpec) -> None:
        self._settings, self._spec = settings, spec
        self._optimiser = settings.optimiser.optimiser()
        # The learning rate decays over the gradient steps, from its initial value at the first.
        self._learning_rate = settings.optimiser.learning_rates(gradient_steps(settings, spec))

    def initial(self) -> ModelState:
        """The model before the first round."""
        weights = self._spec.initial_weights(self._settings.model.seed)
        moments = np.zeros((self._optimiser.rows, len(weights)))
        radii = first_radii(self._settings, self._spec)
        return ModelState(weights, moments, self._settings.privacy.clip_norm, radii)

    def step(
        self,
        release: Release,
        model: ModelState,
        groups: Sequence[Sums],
        *,
        entropy: Entropy = os.urandom,
    ) -> Step:
        """Step by the sums of a round.

        Args:
            release: the round's; not one of second moments.
            model: before the round.
            groups: counts and integer sums by block, for each group of fragments; reports and updates have
                one group.
            entropy: of noise that is added here; to be replaced in tests and simulations only.
        """
        match release:
            case NoisySum():
                return self.step_by_mean(release, model, median_of_means(release, groups))
            case Reports():
                (sums,) = groups
                return self._step_by_reports(release, model, sums)
            case Updates():
                (sums,) = groups
                return self.step_by_update(release, model, release.total_of(sums), entropy=entropy)
            case _:
                assert_never(release)

    def step_by_mean(self, release: NoisySum, model: ModelState, mean: NDArray[np.float64]) -> Step:
        """Step by the fleet's mean, (dimension,), noisy or not."""
        clipping = release.clipping
        step = take_step(
            release,
            clipping.gradient(mean),
            model,
            self._optimiser,
            self._learning_rate.at(release.gradient_step),
        )
        if not clipping.count_weight:
            return step
        norm = self._next_norm(model.clip_norm, clipping.share_within(float(mean[-1])))
        return replace(step, model=replace(step.model, clip_norm=norm))

    def step_by_distance(
        self, release: Reports | Updates, model: ModelState, distance: NDArray[np.float64]
    ) -> Step:
        """Step by the model's distance from the devices' mean weights, (parameters,), if it is known."""
        number = release.plan.round
        rate = self._learning_rate.at(number)
        return Step(model.stepped(self._optimiser, distance, number=number, learning_rate=rate))

    def step_by_update(
        self,
        release: Updates,
        model: ModelState,
        total: NDArray[np.int64],
        *,
        entropy: Entropy = os.urandom,
    ) -> Step:
        """Step by the sum of all updates, (dimension,), which gets its noise here."""
        rate = self._learning_rate.at(release.plan.round)
        step = take_update_step(release, total, model, self._optimiser, rate, entropy=entropy)
        if step.share_within is None:
            return Step(step.model)
        norm = self._next_norm(model.clip_norm, step.share_within)
        return Step(replace(step.model, clip_norm=norm))

    def _next_norm(self, norm: float, share_within: float) -> float:
        """The clip norm of the next round, which follows the quantile within its bounds."""
        privacy = self._settings.privacy
        wanted, bounds = privacy.clipping, privacy.clip_norms
        return adapted_norm(norm, share_within, quantile=wanted.quantile, rate=wanted.rate, bounds=bounds)

    def tell_of_norm(self, before: float, found: float) -> None:
        """Tell the operator where the clip norm has come to one of its bounds. It follows from noise that is
        drawn with the step: only once that is kept.

        Args:
            before: norm of the round.
            found: norm of the next one.
        """
        bounds = self._settings.privacy.clip_norms
        if found in bounds and found != before:
            log.warning(
                "the clip norm has come to %g, the %s that privacy.clip_norm and clipping.span allow, and "
                "goes no further; choose another clip_norm for the next job, unless dishonest devices have "
                "brought it there", found, "least" if found == bounds[0] else "most",
            )  # fmt: skip

    def _step_by_reports(self, release: Reports, model: ModelState, sums: Sums) -> Step:
        number = release.plan.round
        step = take_report_step(
            release, sums, model, self._optimiser, self._learning_rate.at(number),
            adapts=self._settings.privacy.two_point.adapts,
        )  # fmt: skip
        log.info(
            "round %d: reports of %d of %d weights; the mean over the devices has a standard error of %.2g",
            number, step.reported, release.mechanism.dimension, step.standard_error,
        )  # fmt: skip
        if step.out_of_range:
            log.warning(
                "round %d: on the devices, changes of %s lie at the ends of their ranges; raise "
                "privacy.two_point.radius in the next job, or lower privacy.local_training",
                number, ", ".join(step.out_of_range),
            )  # fmt: skip
        return Step(step.model, out_of_range=step.out_of_range)
