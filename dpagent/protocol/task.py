"""The task of a device in one round, derived once from a plan.

A plan is a message; a :class:`RoundTask` is its meaning: the model, the method, and the release that the
devices are asked for. Admission, training and the ledger on a device, the coordinator's planning and
aggregation, and the simulation all use it, so they all interpret a plan in the same way.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TypeAlias

import cbor2
import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DpagentError, PlanError
from dpagent.learning.models.description import from_description
from dpagent.learning.models.spec import ModelSpec
from dpagent.privacy.methods import Method, method_named
from dpagent.protocol.codec import MessageError, read_cbor
from dpagent.protocol.messages import Plan
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.own_noise import OwnNoise
from dpagent.protocol.reports import Reports
from dpagent.protocol.terms import NoisySumTerms, ReportTerms, UpdateTerms
from dpagent.protocol.updates import Updates
from dpagent.protocol.weights import weights_from_bytes

Release: TypeAlias = NoisySum | Reports | Updates
"""What a device makes of its records and sends."""
Priced: TypeAlias = Release | OwnNoise
"""What has a guarantee of its own, and a price."""


@dataclass(frozen=True, slots=True)
class RoundTask:
    """One round as a device runs it. Public; private data are arguments of the functions that use it.

    Attributes:
        plan: its source; this record does not check the signature.
        method: how the fleet trains.
        spec: the model.
        release: what a device makes of its records and sends.
    """

    plan: Plan
    method: Method
    spec: ModelSpec
    release: Release

    @classmethod
    def of(cls, plan: Plan) -> RoundTask:
        """Derive the task of a plan.

        Raises:
            PlanError: no device could run it; the text says why.
        """
        spec = _model_of(plan)
        try:
            method, release = method_named(plan.method), _release_of(plan, spec)
        except DpagentError as error:
            raise PlanError(f"Round {plan.round}: {error}") from error
        release.require_consistent(spec, method)
        return cls(plan, method, spec, release)

    def weights_from(self, data: bytes) -> NDArray[np.float32]:
        """The weights that devices train from, (parameters,), from the bytes that the plan names."""
        return weights_from_bytes(data, self.plan.model.parameters, self.plan.model.precision)

    @property
    def priced(self) -> tuple[Priced, ...]:
        """Each guarantee of the round: the release's own; before it, where devices add noise to updates
        besides, the one that trusts nobody. A device charges each in an account of its own."""
        release = self.release
        own_noise = release.own_noise if isinstance(release, Updates) else None
        return (release,) if own_noise is None else (own_noise, release)

    @property
    def schedule_digest(self) -> str:
        """SHA-256 of everything that determines the job's price."""
        plan = self.plan
        terms = {"release": self.release.pinned, "delta": plan.delta, "parameters": plan.model.parameters}
        return hashlib.sha256(cbor2.dumps(terms, canonical=True)).hexdigest()


def _release_of(plan: Plan, spec: ModelSpec) -> Release:
    match plan.release:
        case NoisySumTerms() as terms:
            return NoisySum.of(plan, terms, spec)
        case ReportTerms() as terms:
            return Reports.of(plan, terms, spec)
        case UpdateTerms() as terms:
            return Updates.of(plan, terms)


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
