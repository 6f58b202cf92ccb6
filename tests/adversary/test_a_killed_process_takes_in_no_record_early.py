"""A coordinator ends a training process with a plan that takes too much memory, to learn what a look is at.

Claim: which records count in a round does not depend on how long another record takes to decode, also when
    the training process has ended in between.
Parameters: a folder of pictures; one new record is as slow to decode as the test wants, others came with it.
    A real training process, killed as the system kills it where memory runs out, while a look goes on or
    after it is done.

Before, a new training process took in what a look had found by then: the records that came with a slow one
    counted at once if that was not there, and only later if it was. When it waited until what the look found
    counted, a slow record still decided, as a look ended with its process: with 20 new pictures and a slow
    one that was killed in time, the next noisy sum held 10 records, and without the slow one 30, at the price
    of one. The plan that ends the process is free.

Power: no randomness: on the code of before the new process uses what a look that was done has found.
Outcome: a look is the agent's, and its result counts from the same time on whatever training processes do.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import hostile_files as hostile
import pytest
from brokers import wait_until
from children import PATIENCE_S
from devices import WEIGHTS
from fleets import make_plan, terms
from neighbours import is_looking
from pictures import folder_of, write

from agent.rows import RowStore
from agent.training_messages import Order, WorkerError
from agent.worker import Worker

PICTURE: dict[str, Any] = {"width": 8, "height": 8, "channels": 1}
ORDER = Order(make_plan(**terms(rate=1.0)), WEIGHTS, {})


def kill(worker: Worker) -> None:
    running = worker._running
    assert running is not None
    os.kill(running._process.pid, signal.SIGKILL)
    wait_until(lambda: running.is_over, "its end")


def counted(worker: Worker) -> int:
    """How many records the last index has."""
    start = worker._start
    store = RowStore(start.settings.state_dir, start.settings.data)
    index = store.load()
    assert index is not None
    return len(store.open(index))


@pytest.mark.parametrize("is_done", [False, True])
def test_what_a_look_found_counts_at_its_time_whatever_has_ended_the_training_process(
    worker: Worker, tmp_path: Path, *, is_done: bool
) -> None:
    looks = worker._looks
    worker.prepare(ORDER).result(PATIENCE_S)
    folder_of(tmp_path / "photos", *(f"{number}/b.png" for number in range(5)), **PICTURE)
    if not is_done:
        write(tmp_path / "photos" / "0" / "slow.jpg", hostile.slow_jpeg())
    assert worker.update().result(PATIENCE_S).failure is None
    worker.look()
    if is_done:
        wait_until(lambda: not is_looking(looks), "the end of the look")
    kill(worker)
    assert counted_in_a_round(worker) == 10, "it does not count yet"
    looks.counts_after_s = looks._lasts_s()
    if not is_done:
        assert counted_in_a_round(worker) == 10, "it has not ended"
        wait_until(lambda: not is_looking(looks), "the end of the look")
    kill(worker)
    assert counted_in_a_round(worker) == 15


def counted_in_a_round(worker: Worker) -> int:
    """How many records a round reads; then a look may begin."""
    worker.prepare(ORDER).result(PATIENCE_S)
    assert worker.update().result(PATIENCE_S).failure is None
    worker.look()
    return counted(worker)


def test_a_round_that_ends_before_its_update_leaves_what_the_look_found_to_the_next_attempt(
    worker: Worker, tmp_path: Path
) -> None:
    """Whether the round takes it in was settled before the charge."""
    looks = worker._looks
    worker.prepare(ORDER).result(PATIENCE_S)
    folder_of(tmp_path / "photos", *(f"{number}/b.png" for number in range(5)), **PICTURE)
    worker.update().result(PATIENCE_S)
    worker.look()
    wait_until(lambda: not is_looking(looks), "the end of the look")
    looks.counts_after_s = 0.0
    worker.prepare(ORDER).result(PATIENCE_S)
    assert worker._running is not None
    os.kill(worker._running._process.pid, signal.SIGSTOP)
    answer = worker.update()
    kill(worker)
    assert isinstance(answer.exception(PATIENCE_S), WorkerError)
    worker.look()
    assert counted(worker) == 10
    assert looks.is_due, "no other look has begun"
    assert counted_in_a_round(worker) == 15
