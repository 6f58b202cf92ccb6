"""What a job has spent, in each column: figures that hold for different units, or trust different parties."""

from __future__ import annotations

from coordinator.report_planning import report_wire
from coordinator.settings import FleetSettings
from coordinator.store import Job
from dpagent.privacy.mechanisms.two_point_budget import bit_statement, fragments_statement
from dpagent.privacy.mechanisms.two_point_rounds import TwoPointRounds
from dpagent.privacy.statement import BudgetStatement


def spent_columns(
    settings: FleetSettings, job: Job, *, rounds: int, epsilon: float
) -> tuple[BudgetStatement, ...]:
    """The guarantee of the rounds that are over, the job's own first. Figures of two columns are never added.

    Reports of trained weights (``ldp-fl``) have two columns more. One is for a single bit. The other holds
    while nobody links fragments, with as many honest devices as a round needs to close:
    ``round.minimum_devices``; with one, hiding among others is not claimed.

    Args:
        settings: ``fleet.yaml``.
        job: as it began.
        rounds: that are over.
        epsilon: that they have spent, by the job's own accounting.
    """
    noise, delta = job.noise, settings.privacy.delta
    own = noise.mechanism.job_statement(epsilon, delta)
    if not isinstance(noise, TwoPointRounds) or not rounds:
        return (own,)
    spec = settings.model.spec()
    closed = [noise.at(number, spec.parameter_count) for number in range(1, rounds + 1)]
    shuffled = fragments_statement(
        closed,
        block=report_wire(settings, noise, spec).block,
        devices=settings.round.minimum_devices,
        local_epsilon=epsilon,
        delta=delta,
    )
    return (own, shuffled, bit_statement(max(each.bit_epsilon for each in closed)))
