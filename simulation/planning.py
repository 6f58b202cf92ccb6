"""Plans of a job that never begins: the coordinator's announcements for a run, tried beforehand."""

from __future__ import annotations

from coordinator.job import Job
from coordinator.planning import Planner, job_noise
from coordinator.settings import FleetSettings
from dpagent.learning.models.spec import ModelSpec


def trial_job(fleet: FleetSettings, spec: ModelSpec) -> Job:
    """The job with its noise, under an id that no real job has. Its model need not lie in a file yet.

    Raises:
        PlanError: No noise meets the target.
    """
    return Job(bytes(16), {}, *job_noise(fleet, spec))


def trial_planner(fleet: FleetSettings, spec: ModelSpec, job: Job) -> Planner:
    """The coordinator's planner, with a key that nobody can open a seal of."""
    return Planner(fleet, spec, job, bytes(32))
