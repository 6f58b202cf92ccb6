"""The task of a device in one round, derived once from a plan.

A plan is a message; a :class:`RoundTask` is its meaning: the model, the requested sum,
the mechanism, the cap, the wire form. Admission, training and the ledger on a device, the
coordinator's planning and aggregation, and the simulation all use it, so they all interpret
a plan in the same way.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import cbor2
import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DpagentError, ParameterError, PlanError
from dpagent.learning.models.description import from_description
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.augmentation import Augmentation
from dpagent.norm import Norm
from dpagent.privacy.caps import ClampCap
from dpagent.privacy.clipping import Clipping
from dpagent.privacy.covariance import FLOAT64_SLACK, SecondMoments
from dpagent.privacy.events import Event
from dpagent.privacy.mechanisms.job_noise import JobNoise
from dpagent.privacy.mechanisms.mechanism import PlannedMechanism, Query
from dpagent.privacy.methods import Method, method_named
from dpagent.protocol.codec import MessageError, read_cbor
from dpagent.protocol.fragments import block_count
from dpagent.protocol.messages import Plan
from dpagent.protocol.weights import weights_from_bytes


@dataclass(frozen=True, slots=True)
class RoundTask:
    """One round as a device runs it. Public; private data are arguments of the functions that use it.

    Attributes:
        plan: its source; this record does not check the signature.
        method: how the fleet trains.
        spec: the model.
        clipping: how each record's gradient is clipped.
        noise: of the whole job.
        mechanism: of this round.
        augmentation: views of each record, or None.
    """

    plan: Plan
    method: Method
    spec: ModelSpec
    clipping: Clipping
    noise: JobNoise
    mechanism: PlannedMechanism
    augmentation: Augmentation | None

    @classmethod
    def of(cls, plan: Plan) -> RoundTask:
        """Derive the task of a plan.

        Raises:
            PlanError: no device could run it; the text says why.
        """
        spec = _model_of(plan)
        try:
            clipping = _clipping_of(plan, spec)
            augmentation = None
            if plan.augmentation is not None:
                augmentation = Augmentation(**plan.augmentation.model_dump())
                augmentation.check_fits(spec.input_shape)
            terms, method = plan.mechanism, method_named(plan.method)
            noise = JobNoise.announced(terms.name, terms.noise_multipliers, terms.parameters)
            mechanism = noise.at(plan.round, _query(plan, second_moments_of(plan) or clipping))
        except DpagentError as error:
            raise PlanError(f"Round {plan.round}: {error}") from error
        task = cls(plan, method, spec, clipping, noise, mechanism, augmentation)
        task._require_consistent()
        return task

    @property
    def second_moments(self) -> SecondMoments | None:
        """The sum of a round that asks for second moments in place of gradients, or None."""
        return second_moments_of(self.plan)

    @property
    def dimension(self) -> int:
        """Coordinates of an update."""
        return self.mechanism.dimension

    @property
    def gradient_step(self) -> int:
        """Which step the model takes with this round, from 1; 0 for a round of second moments."""
        return self.plan.round - (self.plan.projection is not None)

    @property
    def wire_unit(self) -> float:
        """What one unit of an update's integers stands for, in gradient units."""
        return self.mechanism.granularity * self.plan.wire.step

    def weights_from(self, data: bytes) -> NDArray[np.float32]:
        """The weights that the round's gradients are taken at, (parameters,), from the bytes that the plan
        names."""
        return weights_from_bytes(data, self.plan.model.parameters, self.plan.model.precision)

    @property
    def blocks(self) -> int:
        """Fragments of an update: ⌈dimension / block⌉."""
        return block_count(self.dimension, self.plan.wire.block)

    @property
    def device_cap(self) -> ClampCap | None:
        """The noise cap that each device applies to its own noisy mean, or None."""
        return self._cap("device")

    @property
    def coordinator_cap(self) -> ClampCap | None:
        """The noise cap that the coordinator applies to the fleet's noisy mean, or None."""
        return self._cap("coordinator")

    @property
    def events(self) -> tuple[Event, ...]:
        """The events of this round and all later ones of the job, in order.

        Raises:
            PlanError: a later round has parameters that no device could run.
        """
        query = _query(self.plan, self.clipping)
        try:
            later = [
                self.noise.at(number, query).event
                for number in range(self.plan.round + 1, self.noise.rounds + 1)
            ]
        except ParameterError as error:
            raise PlanError(f"A later round of the job cannot be run: {error}") from error
        return (self.mechanism.event, *later)

    @property
    def schedule_digest(self) -> str:
        """SHA-256 of everything that determines the job's price: its mechanism, for all rounds, and its sum.

        A clip norm that follows a quantile is not part of it: the noise follows the norm.
        """
        plan = self.plan
        clipping = plan.clipping.model_dump()
        if plan.clipping.count_weight:
            del clipping["norms"]
        terms = {
            "mechanism": plan.mechanism.model_dump(),
            "clipping": clipping,
            "sampling": plan.sampling.model_dump(),
            "delta": plan.delta,
            "parameters": plan.model.parameters,
            "projection": None if plan.projection is None else plan.projection.model_dump(),
        }
        return hashlib.sha256(cbor2.dumps(terms, canonical=True)).hexdigest()

    def _cap(self, where: str) -> ClampCap | None:
        cap = self.plan.cap
        if cap.kind != "clamp" or cap.where != where:
            return None
        return ClampCap(regularisation=cap.regularisation, floor=cap.floor)

    def _require_consistent(self) -> None:
        """Refuse terms that exclude each other.

        Raises:
            PlanError: naming them.
        """
        plan, spec = self.plan, self.spec
        if self.mechanism.name not in self.method.mechanisms.values():
            raise PlanError(
                f"Method {self.method.name} and mechanism {self.mechanism.name} do not go together; expected "
                f"{' or '.join(self.method.mechanisms.values())}."
            )
        if self.mechanism.norm is not Norm.L2:
            self._require_one_norm_for_all()
        if self.device_cap is not None and self.clipping.count_weight:
            raise PlanError("A cap on the device and a clip norm that follows a quantile exclude each other.")
        if self.device_cap is not None and len(self.clipping.norms) > 1:
            raise PlanError("A cap on the device and a clip norm for each layer exclude each other.")
        values = None if spec.projection is None else math.prod(spec.shape_before_projection)
        if values != (None if plan.projection is None else plan.projection.values):
            raise PlanError(
                f"The model projects {values or 'no'} values of a record; the plan has another number."
            )
        if self.second_moments is not None and plan.clipping.accumulation_slack < FLOAT64_SLACK:
            raise PlanError(
                f"The plan allows for an error of {plan.clipping.accumulation_slack:.3g} of a sum; second "
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
            (self.plan.projection is not None, "a model with a projection, whose first round sums moments,"),
        ):
            if is_asked:
                raise PlanError(
                    f"Mechanism {self.mechanism.name} needs records clipped in {self.mechanism.norm}; {what}"
                    " is bounded in L2."
                )


def dimension_of(plan: Plan) -> int:
    """Coordinates of an update, also for a device that cannot run the round."""
    if (moments := second_moments_of(plan)) is not None:
        return moments.dimension
    return plan.model.parameters + (plan.clipping.count_weight > 0)


def second_moments_of(plan: Plan) -> SecondMoments | None:
    """The sum that the first round of a job with a projection asks for, or None."""
    if plan.projection is None or plan.round > 1:
        return None
    return SecondMoments(plan.projection.values, plan.projection.record_norm)


def _model_of(plan: Plan) -> ModelSpec:
    terms = plan.model
    try:
        # As strictly as a message: a value that refers to itself would take exponential time to refuse.
        spec = from_description(read_cbor(terms.description), where="the model")
    except (DpagentError, MessageError) as error:
        raise PlanError(f"The model cannot be built: {error}") from error
    if spec.digest() != terms.architecture or spec.parameter_count != terms.parameters:
        raise PlanError(
            f"The model {spec.name} is built differently here; install the coordinator's version of dpagent."
        )
    return spec


def _clipping_of(plan: Plan, spec: ModelSpec) -> Clipping:
    terms = plan.clipping
    sizes = (plan.model.parameters,) if len(terms.norms) == 1 else spec.layer_sizes
    return Clipping(sizes, tuple(terms.norms), tuple(terms.shares), terms.count_weight)


def _query(plan: Plan, summed: Clipping | SecondMoments) -> Query:
    return Query(
        clip_norm=summed.radius,
        accumulation_slack=plan.clipping.accumulation_slack,
        dimension=summed.dimension,
        sampling_rate=plan.sampling.rate,
        steps=plan.sampling.local_steps,
    )
