"""A release of a noisy sum, as a round asks for it: of clipped gradients, or of second moments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, PlanError
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.augmentation import Augmentation
from dpagent.norm import Norm
from dpagent.privacy.caps import ClampCap
from dpagent.privacy.clipping import Clipping
from dpagent.privacy.covariance import FLOAT64_SLACK, SecondMoments
from dpagent.privacy.events import Event
from dpagent.privacy.mechanisms.bounded import BoundedCap, BoundedJob
from dpagent.privacy.mechanisms.job_noise import JobNoise
from dpagent.privacy.mechanisms.mechanism import Mechanism, PlannedMechanism, Query
from dpagent.privacy.mechanisms.published import PublishedCap, PublishedLaplace
from dpagent.privacy.mechanisms.truncated_laplace import TruncatedLaplace
from dpagent.privacy.methods import Method
from dpagent.privacy.schedules import Schedule
from dpagent.privacy.statement import Trust
from dpagent.protocol.messages import Plan
from dpagent.protocol.sizes import block_count
from dpagent.protocol.terms import BoundedTerms, CapTerms, NoisySumTerms, PublishedTerms, SamplingTerms

_DRAWN_BY: Final = {"bounded": TruncatedLaplace.name, "published": PublishedLaplace.name}
"""The mechanism of a cap that is part of the drawing of noise."""


@dataclass(frozen=True, slots=True)
class NoisySum:
    """One round's noisy sum. Public; private data are arguments of the functions that use it.

    Attributes:
        plan: its source.
        terms: of the plan.
        clipping: how each record's gradient is clipped.
        noise: of the whole job; with a ``bounded`` cap of this round alone.
        mechanism: of this round.
        augmentation: views of each record, or None.
    """

    plan: Plan
    terms: NoisySumTerms
    clipping: Clipping
    noise: JobNoise
    mechanism: PlannedMechanism
    augmentation: Augmentation | None

    @classmethod
    def of(cls, plan: Plan, terms: NoisySumTerms, spec: ModelSpec) -> NoisySum:
        """Derive the release that ``terms`` of ``plan`` ask for.

        Args:
            plan: the round's.
            terms: of it.
            spec: the model.

        Raises:
            DpagentError: no device could run it; the text says why.
        """
        clipping = _clipping_of(plan, terms, spec)
        augmentation = None
        if terms.augmentation is not None:
            augmentation = Augmentation(**terms.augmentation.as_dict())
            augmentation.check_fits(spec.input_shape)
        announced = terms.mechanism
        noise = JobNoise.announced(announced.name, announced.noise_multipliers, announced.parameters)
        number = 1 if isinstance(terms.cap, BoundedTerms) else plan.round
        mechanism = noise.at(number, _query(terms, second_moments_of(plan, terms) or clipping))
        return cls(plan, terms, clipping, noise, mechanism, augmentation)

    @property
    def second_moments(self) -> SecondMoments | None:
        """The sum of a round that asks for second moments in place of gradients, or None."""
        return second_moments_of(self.plan, self.terms)

    @property
    def sampling(self) -> SamplingTerms:
        """The lots."""
        return self.terms.sampling

    @property
    def dimension(self) -> int:
        """Coordinates of the sum."""
        return self.mechanism.dimension

    @property
    def blocks(self) -> int:
        """Fragments of an update: ⌈dimension / block⌉."""
        return block_count(self.dimension, self.plan.wire.block)

    @property
    def gradient_step(self) -> int:
        """Which step the model takes with this round, from 1; 0 for a round of second moments."""
        return self.plan.round - (self.terms.projection is not None)

    @property
    def wire_unit(self) -> float:
        """What one unit of an update's integers stands for, in gradient units."""
        return self.mechanism.granularity * self.terms.step

    @property
    def device_cap(self) -> ClampCap | None:
        """The noise cap that each device applies to its own noisy mean, or None."""
        return self._cap("device")

    @property
    def coordinator_cap(self) -> ClampCap | None:
        """The noise cap that the coordinator applies to the fleet's noisy mean, or None."""
        return self._cap("coordinator")

    @property
    def published_cap(self) -> PublishedCap | None:
        """Algorithm 1 of Luo, Xu and Guan, which each device runs in place of adding noise, or None."""
        cap, mechanism = self.terms.cap, self.mechanism
        if not isinstance(cap, PublishedTerms):
            return None
        return PublishedCap(
            epsilon=cap.epsilon,
            rounds=self.noise.rounds,
            step=cap.step,
            sensitivity=mechanism.clip_norm / self.sampling.expected_lot,
            regularisation=cap.regularisation,
            allow_unproven=True,
        )

    @property
    def reserved_epsilon(self) -> float | None:
        """ε that the job reserves, where its rounds are not known before, or nothing is proven of them; None
        where it follows from them."""
        if not self.mechanism.is_private:
            return math.inf
        return self.terms.cap.epsilon if isinstance(self.terms.cap, BoundedTerms) else None

    def require_derived(self, weights: NDArray[np.float32]) -> None:
        """See that noise of a ``bounded`` cap is what the weights and the schedule give.

        No guarantee rests on that: the ledger charges the noise that is announced.

        Args:
            weights: (parameters,) as they were sent.

        Raises:
            PlanError: it is not, or there is none.
        """
        cap, mechanism = self.terms.cap, self.mechanism
        if not (isinstance(cap, BoundedTerms) and isinstance(mechanism, TruncatedLaplace)):
            return
        asked = cap.schedule
        job = BoundedJob(
            epsilon=cap.epsilon,
            delta=self.plan.delta,
            rounds=cap.rounds,
            schedule=Schedule(asked.kind, asked.step, asked.ratio, tuple(asked.weights)),
            cap=BoundedCap(cap.regularisation, cap.floor),
            expected_lot=self.sampling.expected_lot,
        )
        derived = job.round(
            self.plan.round,
            _query(self.terms, self.clipping),
            weights,
            spent=cap.spent,
            resolution=mechanism.grid.resolution,
        )
        derived.require_announced(mechanism)

    @property
    def events(self) -> tuple[Event, ...]:
        """The events of this round and all later ones of the job that are known, in order.

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
        if self.reserved_epsilon is not None:
            return (self.mechanism,)
        query = _query(self.terms, self.clipping)
        try:
            later = [
                self.noise.at(number, query) for number in range(self.plan.round + 1, self.noise.rounds + 1)
            ]
        except ParameterError as error:
            raise PlanError(f"A later round of the job cannot be run: {error}") from error
        return (self.mechanism, *later)

    @property
    def pinned(self) -> dict[str, Any]:
        """The terms that determine the job's price: the mechanism, for all rounds, and the sum.

        A clip norm that follows a quantile is not part of them: the noise follows the norm.
        """
        pinned = self.terms.as_dict(exclude={"augmentation", "cap", "step"})
        if isinstance(self.terms.cap, BoundedTerms):
            pinned["cap"] = self.terms.cap.as_dict(exclude={"spent"})
            del pinned["mechanism"]["noise_multipliers"], pinned["mechanism"]["parameters"]["bound_units"]
        if self.terms.clipping.count_weight:
            del pinned["clipping"]["norms"]
        return pinned

    def _cap(self, where: str) -> ClampCap | None:
        cap = self.terms.cap
        if not isinstance(cap, CapTerms) or cap.kind != "clamp" or cap.where != where:
            return None
        return ClampCap(regularisation=cap.regularisation, floor=cap.floor)

    def require_consistent(self, spec: ModelSpec, method: Method) -> None:
        """Refuse terms that exclude each other.

        Raises:
            PlanError: naming them.
        """
        terms = self.terms
        mechanisms = tuple(method.mechanisms.values())
        if not isinstance(terms.cap, CapTerms):
            mechanisms = (_DRAWN_BY[terms.cap.kind],) if terms.cap.kind in method.caps else ()
        if self.mechanism.trust is not Trust.NONE:
            # Its price is for devices whose whole update is clipped, not for records.
            raise PlanError(f"Noise of mechanism {self.mechanism.name} is for the coordinator to add.")
        if self.mechanism.name not in mechanisms:
            raise PlanError(
                f"Method {method.name}, cap {terms.cap.kind} and mechanism {self.mechanism.name} do not go "
                f"together; expected {' or '.join(mechanisms) or 'another cap'}."
            )
        if self.mechanism.norm is not Norm.L2:
            self._require_one_norm_for_all()
        if self.published_cap is not None and self.sampling.local_steps > 1:
            raise PlanError(f"A round of Algorithm 1 has one step; the plan has {self.sampling.local_steps}.")
        if self.device_cap is not None and self.clipping.count_weight:
            raise PlanError("A cap on the device and a clip norm that follows a quantile exclude each other.")
        if self.device_cap is not None and len(self.clipping.norms) > 1:
            raise PlanError("A cap on the device and a clip norm for each layer exclude each other.")
        values = None if spec.projection is None else math.prod(spec.shape_before_projection)
        if values != (None if terms.projection is None else terms.projection.values):
            raise PlanError(
                f"The model projects {values or 'no'} values of a record; the plan has another number."
            )
        if self.second_moments is not None and terms.clipping.accumulation_slack < FLOAT64_SLACK:
            raise PlanError(
                f"The plan allows for an error of {terms.clipping.accumulation_slack:.3g} of a sum; second "
                f"moments need {FLOAT64_SLACK:.3g}."
            )
        if self.augmentation is not None and spec.front_end:
            raise PlanError("The plan asks for views of records whose features are computed once.")

    def _require_one_norm_for_all(self) -> None:
        """Refuse what is bounded in L2 alone, for a mechanism that needs another norm.

        Raises:
            PlanError: naming it.
        """
        for is_asked, what in (
            (len(self.clipping.norms) > 1, "a clip norm for each layer"),
            (self.clipping.count_weight > 0, "a clip norm that follows a quantile"),
            (self.terms.projection is not None, "a model with a projection, whose first round sums moments,"),
        ):
            if is_asked:
                raise PlanError(
                    f"Mechanism {self.mechanism.name} needs records clipped in {self.mechanism.norm}; {what}"
                    " is bounded in L2."
                )


def second_moments_of(plan: Plan, terms: NoisySumTerms) -> SecondMoments | None:
    """The sum that the first round of a job with a projection asks for, or None."""
    if terms.projection is None or plan.round > 1:
        return None
    return SecondMoments(terms.projection.values, terms.projection.record_norm)


def _clipping_of(plan: Plan, terms: NoisySumTerms, spec: ModelSpec) -> Clipping:
    clipping = terms.clipping
    sizes = (plan.model.parameters,) if len(clipping.norms) == 1 else spec.layer_sizes
    return Clipping(sizes, tuple(clipping.norms), tuple(clipping.shares), clipping.count_weight)


def _query(terms: NoisySumTerms, summed: Clipping | SecondMoments) -> Query:
    return Query(
        clip_norm=summed.radius,
        accumulation_slack=terms.clipping.accumulation_slack,
        dimension=summed.dimension,
        sampling_rate=terms.sampling.rate,
        steps=terms.sampling.local_steps,
    )
