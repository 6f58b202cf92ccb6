"""The rounds of a job under the ``published`` noise cap, as plans announce them. They guarantee nothing."""

from __future__ import annotations

import math

from coordinator.settings import FleetSettings
from dpagent.privacy.mechanisms.discretised_laplace import finest_resolution, multiplier_for
from dpagent.privacy.mechanisms.job_noise import JobNoise
from dpagent.privacy.mechanisms.published import PublishedLaplace
from dpagent.protocol.terms import PublishedTerms


def published_rounds(settings: FleetSettings) -> tuple[JobNoise, tuple[float, ...]]:
    """The noise of all rounds of a parameter whose noise is never replaced, and the ε of each: infinite.

    Raises:
        ParameterError: A round's ε is out of the mechanism's range.
    """
    privacy, rounds = settings.privacy, settings.rounds
    multipliers = [multiplier_for(each) for each in privacy.spending.budgets(privacy.epsilon, rounds)]
    grid = {"resolution": finest_resolution(max(multipliers))}
    return JobNoise(PublishedLaplace, tuple(multipliers), grid), (math.inf,) * rounds


def published_terms(settings: FleetSettings) -> PublishedTerms:
    """What plans say of the cap."""
    privacy, schedule = settings.privacy, settings.privacy.spending
    return PublishedTerms(
        kind="published",
        regularisation=settings.cap.regularisation,
        epsilon=privacy.epsilon,
        step=schedule.increment(privacy.epsilon, settings.rounds),
    )
