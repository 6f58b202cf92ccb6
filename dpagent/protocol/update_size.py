"""The size of an update, by the plan alone: also of a round that the device cannot run."""

from __future__ import annotations

from dpagent.privacy.ranges import moments_dimension
from dpagent.protocol.messages import Plan
from dpagent.protocol.sizes import block_count
from dpagent.protocol.terms import NoisySumTerms, ReportTerms, UpdateTerms


def values_of(plan: Plan) -> int:
    """Values of an update."""
    match plan.release:
        case NoisySumTerms() as terms:
            return sum_dimension(plan, terms)
        case ReportTerms() as terms:
            return terms.coordinates
        case UpdateTerms(count_weight=weight):
            return plan.model.parameters + (weight > 0)


def blocks_of(plan: Plan) -> int:
    """Fragments of an update."""
    return block_count(values_of(plan), plan.wire.block)


def sum_dimension(plan: Plan, terms: NoisySumTerms) -> int:
    """Coordinates of a noisy sum. The first round of a job with a projection asks for second moments."""
    if terms.projection is not None and plan.round == 1:
        return moments_dimension(terms.projection.values)
    return plan.model.parameters + (terms.clipping.count_weight > 0)
