"""The store of a job with rounds that were given up."""

from __future__ import annotations

import numpy as np
from stores import BLANK_MODEL, begin_job

from coordinator.dead_ends import Halt
from coordinator.measurements import Traffic
from coordinator.settings import FleetSettings
from coordinator.store import RoundResult, Store
from dpagent.learning.inference.evaluation import Evaluation


def keep_gapped_rounds(settings: FleetSettings) -> None:
    """Six rounds: 1 and 4 closed, 2 given up, 3 passed over with it, 5 given up, and 6 to come."""
    store = begin_job(settings, BLANK_MODEL)
    _close(store, 1, 0.5, 0.6)
    _give_up(store, 2, 0.7, range(3, 4))
    _close(store, 4, 1.1, 0.8)
    _give_up(store, 5, 1.5, range(0))
    store.database.close()


def _close(store: Store, number: int, epsilon: float, accuracy: float) -> None:
    right = round(accuracy * 100)
    evaluation = Evaluation(np.array([[right, 100 - right], [100 - right, right]]), 1 - accuracy)
    store.start_round(number, 10.0 * number, 10.0 * number + 9)
    result = RoundResult(evaluation, 0, 1.0, 3.0, epsilon, traffic=Traffic(700, 900))
    store.close_round(number, BLANK_MODEL, result, closed_at=10.0 * number + 5)


def _give_up(store: Store, number: int, epsilon: float, passed_over: range) -> None:
    """As at a deadline, and as if its operator had let the job go on."""
    store.start_round(number, 10.0 * number, 10.0 * number + 9)
    store.give_up_round(
        number, noise_multiplier=3.0, epsilon=epsilon, least=1, given_up_at=10.0 * number + 9,
        halt=Halt("too few", passed_over),
    )  # fmt: skip
    with store.database.transaction():
        store.database.execute("UPDATE jobs SET paused = 0, trouble = NULL")
