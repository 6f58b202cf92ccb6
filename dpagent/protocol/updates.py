"""A release of whole updates, as a round asks for it: the change of a device's weights, and where the clip
norm follows a quantile, the device's vote on it (:mod:`dpagent.privacy.update_clipping`).

The coordinator adds noise to their sum (:mod:`dpagent.privacy.mechanisms.central`). So the device trusts it:
to add that noise, once, and to let nobody see an update or a sum without it. If the plan asks for it, the
device adds noise of its own besides (:mod:`dpagent.protocol.own_noise`). Then it need not trust the
coordinator: the round has a second guarantee, which trusts nobody.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpagent.blank_rows import blank_all_but
from dpagent.errors import PlanError
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.local_sgd import LocalSgd
from dpagent.privacy.events import Event
from dpagent.privacy.mechanisms.central import CentralMechanism
from dpagent.privacy.mechanisms.job_noise import JobNoise
from dpagent.privacy.mechanisms.mechanism import Mechanism, Query
from dpagent.privacy.methods import Method
from dpagent.privacy.noise.entropy import Entropy
from dpagent.privacy.ranges import MAX_NORM
from dpagent.privacy.update_clipping import UpdateClipping
from dpagent.protocol.codec import MessageError
from dpagent.protocol.fragments import require_place
from dpagent.protocol.local_training import require_local_training
from dpagent.protocol.messages import Fragment, Plan
from dpagent.protocol.own_noise import OwnNoise, mechanisms_from
from dpagent.protocol.sizes import block_count
from dpagent.protocol.terms import UpdateTerms
from dpagent.protocol.update_packing import read_update


@dataclass(frozen=True, slots=True)
class Updates:
    """One round's updates. Public; private data are arguments of the functions that use it.

    Attributes:
        plan: its source.
        terms: of the plan.
        clipping: of this round.
        noise: of the coordinator, for the whole job.
        mechanism: of this round.
        own_noise: of each device besides, or None.
        training: on the device, before anything is clipped.
    """

    plan: Plan
    terms: UpdateTerms
    clipping: UpdateClipping
    noise: JobNoise
    mechanism: CentralMechanism
    own_noise: OwnNoise | None
    training: LocalSgd

    @classmethod
    def of(cls, plan: Plan, terms: UpdateTerms) -> Updates:
        """Derive the release that ``terms`` of ``plan`` ask for.

        Raises:
            DpagentError: no device could run it; the text says why.
        """
        announced = terms.mechanism
        noise = JobNoise.announced(announced.name, announced.noise_multipliers, announced.parameters)
        if not issubclass(noise.mechanism, CentralMechanism):
            raise PlanError(
                f"Noise of mechanism {announced.name} is not for the coordinator to add to updates."
            )
        clipping = UpdateClipping(
            noise.mechanism.norm, terms.clip_norm, plan.model.parameters, terms.count_weight
        )
        query = query_of_update(clipping)
        mechanism = noise.at(plan.round, query)
        assert isinstance(mechanism, CentralMechanism)
        own_noise = None
        if terms.device_noise is not None:
            own_noise = OwnNoise.of(terms.device_noise, plan.round, query, noise)
        largest = mechanism.sensitivity_units if own_noise is None else own_noise.mechanism.largest_units
        if terms.largest != largest:
            raise PlanError(
                f"Values of an update have up to {largest} units; the plan makes room for {terms.largest}."
            )
        return cls(
            plan,
            terms,
            clipping,
            noise,
            mechanism,
            own_noise,
            LocalSgd(**terms.training.as_dict(), largest_gradient=MAX_NORM),
        )

    @property
    def dimension(self) -> int:
        """Values of an update: one for each weight, and the vote if there is one."""
        return self.clipping.dimension

    @property
    def blocks(self) -> int:
        """Fragments of an update."""
        return block_count(self.dimension, self.plan.wire.block)

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
        return mechanisms_from(self.plan.round, query_of_update(self.clipping), self.noise)

    @property
    def pinned(self) -> dict[str, Any]:
        """The terms that determine the job's price.

        A clip norm that follows a quantile is not part of them: the noise follows the norm.
        """
        pinned = self.terms.as_dict(exclude={"training", "expected_devices", "largest"})
        if self.terms.count_weight:
            del pinned["clip_norm"]
        return pinned

    @property
    def largest_vote(self) -> int | None:
        """Bound on the magnitude of the last value, in grid units, where that is a vote; else None.

        It has room for the rounding of a vote to float32 and to the grid.
        """
        if not self.terms.count_weight:
            return None
        return math.ceil(self.clipping.largest_vote * (1 + 2.0**-20) / self.mechanism.granularity)

    def update_of(
        self,
        trained: NDArray[np.float32],
        weights: NDArray[np.float32],
        *,
        entropy: Entropy = os.urandom,
    ) -> NDArray[np.int64]:
        """What a device sends of its trained weights, (dimension,). Private, unless it adds noise of its own.

        A change that is not finite counts as none, and so does its vote.

        Args:
            trained: (dimension,) after training.
            weights: (dimension,) before it.
            entropy: of noise of its own; to be replaced in tests and simulations only.
        """
        change = trained.astype(np.float64) - weights
        is_finite = np.count_nonzero(np.isfinite(change)) == len(change)
        blank_all_but(np.array([is_finite]), change[np.newaxis])
        clipped = self.clipping.clip(change)[np.newaxis].astype(np.float32)
        update = self.mechanism.constrain(clipped).total
        if self.own_noise is None:
            return update
        return self.own_noise.mechanism.add_clamped(update, entropy=entropy)

    def read(self, fragment: Fragment) -> NDArray[np.int64]:
        """The values of a fragment, (block,), which is no dummy; see
        :func:`~dpagent.protocol.update_packing.read_update`.

        Raises:
            MessageError: the update has no such block, or the payload is not one of an honest update.
        """
        require_place(fragment, self.plan.wire, self.blocks)
        try:
            return read_update(
                fragment.payload,
                fragment.position,
                self.plan.wire.block,
                dimension=self.dimension,
                largest=self.terms.largest,
                norm=self.mechanism.norm if self.own_noise is None else None,
                largest_vote=self.largest_vote if self.own_noise is None else None,
            )
        except ValueError as error:
            raise MessageError("bad values", str(error)) from error

    def total_of(self, sums: Mapping[int, tuple[int, NDArray[np.int64]]]) -> NDArray[np.int64]:
        """The exact sum of the counted updates, (dimension,) in grid units. Private until it has noise.

        Args:
            sums: by block position, the number of counted fragments and their integer sum. A block without
                fragments is zero.
        """
        block = self.plan.wire.block
        total = np.zeros(self.blocks * block, np.int64)
        for position, (_, part) in sums.items():
            total[position * block : (position + 1) * block] = part
        return total[: self.dimension]

    def mean_of(self, noisy: NDArray[np.int64]) -> NDArray[np.float64]:
        """A sum with noise as the mean over the public number of devices, (dimension,)."""
        return np.asarray(noisy * (self.mechanism.granularity / self.terms.expected_devices))

    def require_consistent(self, spec: ModelSpec, method: Method) -> None:
        """Refuse terms that exclude each other.

        Raises:
            PlanError: naming them.
        """
        require_local_training(self.mechanism.name, spec, method)


def query_of_update(clipping: UpdateClipping) -> Query:
    """What a round asks of a device: one update, of every device that takes part."""
    return Query(clipping.radius, None, clipping.dimension, sampling_rate=1.0)
