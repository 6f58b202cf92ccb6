"""What a job has spent, in each column: figures that hold for different units, or trust different parties."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from coordinator.job import Job
from coordinator.reader import RoundRecord, least_counted_in
from dpagent.privacy.mechanisms.truncated_laplace import TruncatedLaplace
from dpagent.privacy.mechanisms.two_point_budget import bit_statement, fragments_statement
from dpagent.privacy.mechanisms.two_point_rounds import TwoPointRounds
from dpagent.privacy.statement import BudgetStatement, Scope, implies

ENDS_THERE: Final = (
    "The job ends after these rounds whatever came of them. Ended in the light of that, it costs what all of "
    "its rounds do."
)
"""Of a figure for the rounds so far: tight composition of a part is no bound at a moment that is chosen by
what came before (``docs/privacy.md``, section 3)."""


def spent_columns(job: Job, *, rounds: int, epsilon: float, devices: int) -> tuple[BudgetStatement, ...]:
    """The guarantee of the rounds that are over, the job's own first. Figures of two columns are never added.

    Where devices add noise to their updates besides the coordinator, a second column trusts nobody. Reports
    of trained weights (``ldp-fl``) have two columns more. One is for a single bit. The other holds while
    nobody links fragments, with so many honest devices; with one, hiding among others is not claimed, nor
    where the tokens of members link the fragments of a round (``linkability: round``).
    All follows from the job as it began: settings may have changed since.

    Args:
        job: as it began.
        rounds: that are over.
        epsilon: that they have spent, by the job's own accounting.
        devices: whose fragments counted in each block of each of these rounds, at the least.
    """
    columns = _spent(job, rounds, epsilon, devices)
    # What a bounded cap costs is added up, which is a bound whenever the job ends. By their number alone,
    # rounds that were passed over at the end, which cost nothing, would make a part of the job the whole.
    if epsilon >= job.epsilon_by_round[-1] or job.noise.mechanism is TruncatedLaplace:
        return columns
    return tuple(replace(each, assumptions=(*each.assumptions, ENDS_THERE)) for each in columns)


def _spent(job: Job, rounds: int, epsilon: float, devices: int) -> tuple[BudgetStatement, ...]:
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
    bit = bit_statement(max(each.bit_epsilon for each in closed))
    if job.linkability == "round":
        return (own, bit)  # Its tokens link a device's fragments of a round: none hides among others.
    shuffled = fragments_statement(
        closed,
        block=-(-noise.coordinates // job.fragments_per_update),
        devices=max(1, devices),
        local_epsilon=epsilon,
        delta=delta,
    )
    return (own, shuffled, bit)


def spent_in(job: Job, rounds: Sequence[RoundRecord]) -> tuple[BudgetStatement, ...]:
    """What a job has spent so far, in each column; nothing before its first round is over.

    A round that was given up counts: devices may have been charged for it, and have sent.

    Args:
        job: as it began.
        rounds: of the job, so far.
    """
    over = [each for each in rounds if each.is_over]
    if not over:
        return ()
    return spent_columns(
        job,
        rounds=max(each.number for each in over),
        epsilon=max(each.epsilon or 0.0 for each in over),
        devices=least_counted_in(over),
    )


def promised_by(job: Job) -> tuple[BudgetStatement, ...]:
    """What a job costs whoever takes part in all of its rounds, the job's own guarantee first; also if it is
    cancelled after a look at what came of its rounds (see :mod:`agent.accounts`)."""
    own = job.noise.mechanism.job_statement(job.epsilon_by_round[-1], job.delta)
    if job.device is None:
        return (own,)
    device = job.device
    return own, device.noise.mechanism.job_statement(device.epsilon_by_round[-1], job.delta)


def together(jobs: Iterable[tuple[str, Job]]) -> list[tuple[list[str], BudgetStatement]]:
    """What jobs cost together, for whoever takes part in all of them: the sum in each column (basic
    composition, which holds for jobs chosen after those before them; Rogers, Roth, Ullman, Vadhan, *Privacy
    odometers and filters*, NeurIPS 2016). A job with a figure that implies one of a column counts there too,
    as in ledgers.

    Args:
        jobs: that have begun, by name.

    Returns:
        The names of the jobs that have a figure in it, and their sum, for each column.
    """
    promised = [(name, promised_by(job)) for name, job in jobs]
    scopes = dict.fromkeys(each.scope for _, columns in promised for each in columns)
    return [_sum_in(scope, promised) for scope in scopes]


def _sum_in(
    scope: Scope, promised: Sequence[tuple[str, Sequence[BudgetStatement]]]
) -> tuple[list[str], BudgetStatement]:
    column: list[tuple[str, BudgetStatement]] = []
    for name, columns in promised:
        own = [each for each in columns if each.scope == scope]
        if found := own or [each for each in columns if implies(each.scope, scope)]:
            column.append((name, found[0]))
    return (
        [name for name, _ in column],
        BudgetStatement(
            *scope,
            " + ".join(dict.fromkeys(each.mechanism for _, each in column)),
            sum(each.epsilon for _, each in column),
            min(1.0, sum(each.delta for _, each in column)),
            tuple(dict.fromkeys(sentence for _, each in column for sentence in each.assumptions)),
        ),
    )
