"""A release of two-point reports, as a round asks for it: random bits of weights that a device trained.

See :mod:`dpagent.privacy.mechanisms.two_point` for the mechanism. The ranges of the layers are a function of
the plan and of the public weights that devices train from, as they were sent: so devices and coordinator
agree on them, and no message names them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, PlanError
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.local_sgd import LocalSgd
from dpagent.privacy.clipping import MAX_NORM
from dpagent.privacy.events import Event
from dpagent.privacy.mechanisms.layer_ranges import adapted_ranges
from dpagent.privacy.mechanisms.two_point import TwoPoint, TwoPointReport, group_edges
from dpagent.privacy.mechanisms.two_point_rounds import TwoPointRound, TwoPointRounds
from dpagent.privacy.methods import Method
from dpagent.protocol.local_training import require_local_training
from dpagent.protocol.messages import Plan
from dpagent.protocol.terms import ReportTerms


@dataclass(frozen=True, slots=True)
class Reports:
    """One round's reports. Public; private data are arguments of the functions that use it.

    Attributes:
        plan: its source.
        terms: of the plan.
        layers: names and sizes of the model's tensors, each of which has a range of its own.
        rounds: the reports of all rounds.
        mechanism: what those of this round cost.
        training: on the device, before anything is drawn.
    """

    plan: Plan
    terms: ReportTerms
    layers: tuple[tuple[str, int], ...]
    rounds: TwoPointRounds
    mechanism: TwoPointRound
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
        layers = tuple((block.name, block.size) for block in spec.parameter_shapes)
        return cls(plan, terms, layers, rounds, mechanism, training)

    @property
    def values(self) -> int:
        """Reports of an update."""
        return self.mechanism.coordinates

    @property
    def blocks(self) -> int:
        """Fragments of an update."""
        return -(-self.values // self.plan.wire.block)

    def two_point(self, weights: NDArray[np.float32]) -> TwoPoint:
        """The mechanism for a round that begins with these public weights, (parameters,), as they were sent.

        Raises:
            ParameterError: a weight is not finite.
        """
        ranges = adapted_ranges(
            self.layers, weights, floor=self.terms.ranges.floor, margin=self.terms.ranges.margin
        )
        return self.mechanism.mechanism(ranges)

    @property
    def reserved_epsilon(self) -> None:
        """None: what the job costs follows from its rounds."""
        return

    def require_derived(self, weights: NDArray[np.float32]) -> None:
        """See that the public weights, (parameters,) as they were sent, give a range for each layer.

        Raises:
            ParameterError: they do not.
        """
        self.two_point(weights)

    @property
    def events(self) -> tuple[Event, ...]:
        """The events of this round and all later ones of the job, in order.

        Raises:
            PlanError: a later round has parameters that no device could run.
        """
        dimension = self.plan.model.parameters
        try:
            later = [
                self.rounds.at(number, dimension).event
                for number in range(self.plan.round + 1, self.rounds.rounds + 1)
            ]
        except ParameterError as error:
            raise PlanError(f"A later round of the job cannot be run: {error}") from error
        return (self.mechanism.event, *later)

    @property
    def pinned(self) -> dict[str, Any]:
        """The terms that determine the job's price."""
        return self.terms.model_dump(exclude={"ranges", "training"})

    def update_of(self, report: TwoPointReport) -> NDArray[np.int64]:
        """A device's report as the values of its update, (coordinates,)."""
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
