"""A release of two-point reports, as a round asks for it: random bits of the change by a device's training.

See :mod:`dpagent.privacy.mechanisms.two_point` for the mechanism. A device reports the change of
its weights by training; the plan says how far it may go, tensor by tensor.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, PlanError
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.local_sgd import LocalSgd
from dpagent.privacy.events import Event
from dpagent.privacy.mechanisms.layer_ranges import LayerRange
from dpagent.privacy.mechanisms.mechanism import Mechanism
from dpagent.privacy.mechanisms.two_point import TwoPoint, TwoPointReport, group_edges
from dpagent.privacy.mechanisms.two_point_rounds import TwoPointRound, TwoPointRounds
from dpagent.privacy.methods import Method
from dpagent.privacy.noise.entropy import Entropy
from dpagent.privacy.ranges import MAX_NORM
from dpagent.protocol.local_training import require_local_training
from dpagent.protocol.messages import Plan
from dpagent.protocol.terms import ReportTerms


@dataclass(frozen=True, slots=True)
class Reports:
    """One round's reports. Public; private data are arguments of the functions that use it.

    Attributes:
        plan: its source.
        terms: of the plan.
        rounds: the reports of all rounds.
        mechanism: what those of this round cost.
        two_point: how they are drawn, of changes, (parameters,).
        training: on the device, before anything is drawn.
    """

    plan: Plan
    terms: ReportTerms
    rounds: TwoPointRounds
    mechanism: TwoPointRound
    two_point: TwoPoint
    training: LocalSgd

    @classmethod
    def of(cls, plan: Plan, terms: ReportTerms, spec: ModelSpec) -> Reports:
        """Derive the release that ``terms`` of ``plan`` ask for.

        Raises:
            DpagentError: no device could run it; the text says why.
        """
        rounds = TwoPointRounds(tuple(terms.noise_multipliers), terms.coordinates)
        mechanism = rounds.at(plan.round, spec.parameter_count)
        training = LocalSgd(
            terms.training.steps, terms.training.batch, terms.training.learning_rate, MAX_NORM
        )
        tensors = spec.parameter_shapes
        if len(terms.radii) != len(tensors):
            raise PlanError(
                f"The plan has radii for {len(terms.radii)} tensors; the model has {len(tensors)}."
            )
        ranges = (
            LayerRange(tensor.name, tensor.size, 0.0, radius)
            for tensor, radius in zip(tensors, terms.radii, strict=True)
        )
        return cls(plan, terms, rounds, mechanism, mechanism.mechanism(tuple(ranges)), training)

    @property
    def values(self) -> int:
        """Reports of an update."""
        return self.mechanism.coordinates

    @property
    def blocks(self) -> int:
        """Fragments of an update."""
        return -(-self.values // self.plan.wire.block)

    @property
    def reserved_epsilon(self) -> None:
        """None: what the job costs follows from its rounds."""
        return

    def require_derived(self, weights: NDArray[np.float32]) -> None:
        """Nothing of the round follows from the public weights."""

    @property
    def events(self) -> tuple[Event, ...]:
        """The events of this round and all later ones of the job, in order.

        Raises:
            PlanError: a later round has parameters that no device could run.
        """
        return tuple(each.event for each in self.mechanisms)

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """Those of the same rounds.

        Raises:
            PlanError: as of :attr:`events`.
        """
        dimension = self.plan.model.parameters
        try:
            later = [
                self.rounds.at(number, dimension)
                for number in range(self.plan.round + 1, self.rounds.rounds + 1)
            ]
        except ParameterError as error:
            raise PlanError(f"A later round of the job cannot be run: {error}") from error
        return (self.mechanism, *later)

    @property
    def pinned(self) -> dict[str, Any]:
        """The terms that determine the job's price."""
        return self.terms.as_dict(exclude={"radii", "training"})

    def update_of(
        self,
        trained: NDArray[np.float32],
        weights: NDArray[np.float32],
        *,
        entropy: Entropy = os.urandom,
    ) -> NDArray[np.int64]:
        """What a device sends of its trained weights, (coordinates,): private already.

        A change that is not finite counts as none.

        Args:
            trained: (parameters,) after training.
            weights: (parameters,) before it.
            entropy: of the reports; to be replaced in tests and simulations only.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            return self.encoded(self.two_point.report(trained - weights, entropy=entropy))

    def encoded(self, report: TwoPointReport) -> NDArray[np.int64]:
        """A report as the values of an update, (coordinates,)."""
        starts = group_edges(self.mechanism.dimension, self.values, 0, self.values)[:-1]
        return 2 * (report.positions - starts) + report.bits

    def tally(self, sums: dict[int, NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ones and reports of each weight, (parameters,) each.

        Args:
            sums: by block position, the sum of what :func:`~dpagent.protocol.fragments.read_block` gives.
        """
        edges = group_edges(self.mechanism.dimension, self.values, 0, self.values)
        ones, counts = (np.zeros(self.mechanism.dimension, np.int64) for _ in range(2))
        for position, total in sums.items():
            first = position * self.plan.wire.block
            start, stop = edges[first], edges[min(first + self.plan.wire.block, self.values)]
            ones[start:stop], counts[start:stop] = np.split(total, 2)
        return ones, counts

    def require_consistent(self, spec: ModelSpec, method: Method) -> None:
        """Refuse terms that exclude each other.

        Raises:
            PlanError: naming them.
        """
        require_local_training(self.mechanism.name, spec, method)
