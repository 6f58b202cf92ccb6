"""The coordinator's side of a job's rounds, without messages, databases and waiting: plan, step, price."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from coordinator.job import Job
from coordinator.planning import gradient_steps
from coordinator.settings import FleetSettings
from coordinator.stepping import Stepper
from coordinator.store import OpenRound
from dpagent.learning.models.spec import ModelSpec
from dpagent.protocol.task import RoundTask
from dpagent.protocol.weights import weights_to_bytes
from simulation.planning import trial_planner


class JobRounds:
    """Plans the rounds of a job, and keeps its model and what it has spent.

    Args:
        fleet: The coordinator's settings.
        spec: The model.
        job: With its noise.
    """

    def __init__(self, fleet: FleetSettings, spec: ModelSpec, job: Job) -> None:
        self._fleet, self._spec = fleet, spec
        self._planner = trial_planner(fleet, spec, job)
        self._stepper = Stepper(fleet, spec)
        self._model, self._spent = self._stepper.initial(), 0.0

    @property
    def weights(self) -> NDArray[np.float32]:
        """(parameters,) after the last round."""
        return self._model.weights

    @property
    def first_round(self) -> int:
        """The first round that steps the model: 2 where the first one only finds a projection."""
        return 1 + self._fleet.rounds - gradient_steps(self._fleet, self._spec)

    def _plan(self, number: int, assets: Mapping[str, bytes] | None = None) -> tuple[RoundTask, bytes]:
        """The task of a round, and the weights as devices get them.

        Raises:
            CapNotMetError: What is left of ε meets no cap of this round.
            PlanError: No device would accept the plan.
        """
        sent = weights_to_bytes(self.weights, self._fleet.model.precision)
        task = self._planner.task(
            OpenRound(number, 0, 0),
            sent,
            clip_norm=self._model.clip_norm,
            radii=self._model.radii,
            spent=self._spent,
            assets=assets,
        )
        return task, sent
