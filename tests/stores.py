"""A coordinator's database with one job, for tests that need no coordinator."""

from __future__ import annotations

import numpy as np
from fleets import DIGITS

from coordinator.database.opening import open_database
from coordinator.database.settings import StorePlace
from coordinator.job import Job
from coordinator.model_state import ModelState
from coordinator.planning import new_job
from coordinator.queue import Queue
from coordinator.settings import FIRST_JOB, FleetSettings
from coordinator.store import Store
from dpagent.privacy.mechanisms.job_noise import JobNoise

NOISE = JobNoise.chosen("discrete-gaussian", [3.0, 2.0, 1.0])
BLANK_MODEL = ModelState(
    np.zeros(DIGITS.parameter_count, np.float32), np.zeros((1, DIGITS.parameter_count)), 1.0, ()
)
JOB = Job(b"j" * 16, {"rounds": 3, "privacy": {"epsilon": 0.1}}, NOISE, (0.1, 0.2, 0.4))


def open_store(place: StorePlace, job: Job = JOB, settings: str = "{}") -> Store:
    """The store of the first job, which is put into the queue if it is empty."""
    database = open_database(place)
    queue = Queue(database)
    jobs = queue.jobs() or [queue.add(FIRST_JOB, job, settings, 0.0)]
    return Store(database, jobs[0].number)


def begin_job(settings: FleetSettings, model: ModelState) -> Store:
    """The store of the job of a ``fleet.yaml``, which has begun."""
    settings.state_dir.mkdir(mode=0o700)
    store = open_store(settings.state_dir, new_job(settings), settings.job().stored())
    begin(store, model)
    return store


def begin(store: Store, model: ModelState) -> None:
    assert Queue(store.database).begin(store.number, model, 5.0)
