"""What a job has spent, in each column: figures that hold for different units, or trust different parties."""

from __future__ import annotations

from coordinator.store import Job
from dpagent.privacy.mechanisms.two_point_budget import bit_statement, fragments_statement
from dpagent.privacy.mechanisms.two_point_rounds import TwoPointRounds
from dpagent.privacy.statement import BudgetStatement


def spent_columns(job: Job, *, rounds: int, epsilon: float, devices: int) -> tuple[BudgetStatement, ...]:
    """The guarantee of the rounds that are over, the job's own first. Figures of two columns are never added.

    Where devices add noise to their updates besides the coordinator, a second column trusts nobody. Reports
    of trained weights (``ldp-fl``) have two columns more. One is for a single bit. The other holds while
    nobody links fragments, with so many honest devices; with one, hiding among others is not claimed.
    All follows from the job as it began: settings may have changed since.

    Args:
        job: as it began.
        rounds: that are over.
        epsilon: that they have spent, by the job's own accounting.
        devices: whose fragments counted in each block of each of these rounds, at the least.
    """
    noise, delta = job.noise, job.delta
    own = noise.mechanism.job_statement(epsilon, delta)
    if job.device is not None and rounds:
        without_trust = job.device.noise.mechanism.job_statement(
            job.device.epsilon_by_round[rounds - 1], delta
        )
        return (own, without_trust)
    if not isinstance(noise, TwoPointRounds) or not rounds:
        return (own,)
    # The price of reports does not depend on how many weights there are.
    closed = [noise.at(number, noise.coordinates) for number in range(1, rounds + 1)]
    shuffled = fragments_statement(
        closed,
        block=-(-noise.coordinates // job.fragments_per_update),
        devices=max(1, devices),
        local_epsilon=epsilon,
        delta=delta,
    )
    return (own, shuffled, bit_statement(max(each.bit_epsilon for each in closed)))
