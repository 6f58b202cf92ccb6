"""A coordinator ends a training process with a plan that takes too much memory, to learn what a look is at.

Claim: which records count in a round does not depend on how long another record takes to decode, also when
    the training process has ended in between.
Parameters: a folder of pictures; one new record is as slow to decode as the test wants, another came with it.
    A real training process, killed as the system kills it where memory runs out.

Before, a new training process took in what a look had found by then: the records that came with a slow one
    counted at once if that was not there, and only later if it was. The plan that ends the process is free.

Power: no randomness: on the code of before the new process uses its records at once, whatever they are.
Outcome: until what the last look finds counts, it reads no record: the plan is declined, or the charged round
    is noise alone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from brokers import wait_until
from devices import KEY, WEIGHTS, started_trainer
from fleets import make_plan, terms, write_agent
from pictures import folder_of

from agent import worker as worker_module
from agent.profile import load_profile
from agent.settings import load_agent_settings
from agent.worker import Order, Worker, WorkerError

PATIENCE_S = 60.0
ORDER = Order(make_plan(**terms(rate=1.0)), WEIGHTS, {})


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    folder_of(
        tmp_path / "photos", *(f"{number}/a.png" for number in range(10)), width=8, height=8, channels=1
    )
    data: dict[str, Any] = {
        "path": str(tmp_path / "photos"), "kind": "images", "dtype": "uint8",
        "images": {"size": [8, 8], "mode": "grey", "folder": "."},
    }  # fmt: skip
    settings = load_agent_settings(write_agent(tmp_path, None, KEY, engine="numpy", data=data))
    started_trainer(settings)
    worker = Worker(settings, load_profile("generic-linux"))
    yield worker
    worker.end()


def kill(worker: Worker) -> None:
    running = worker._running
    assert running is not None
    os.kill(running._process.pid, signal.SIGKILL)
    wait_until(lambda: running.is_over, "its end")


def test_a_new_process_reads_no_record_before_what_a_look_found_counts(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.prepare(ORDER).result(PATIENCE_S)
    kill(worker)
    worker.prepare(ORDER).result(PATIENCE_S)  # There was no look yet.
    assert worker.update().result(PATIENCE_S).failure is None
    worker.prepare(ORDER).result(PATIENCE_S)
    kill(worker)
    with pytest.raises(WorkerError, match="started again"):
        worker.prepare(ORDER).result(PATIENCE_S)
    noise = Order(ORDER.plan, ORDER.weights, ORDER.assets, failure="it ended twice")
    worker.prepare(noise).result(PATIENCE_S)
    assert worker.update().result(PATIENCE_S).failure == "it ended twice"
    monkeypatch.setattr(worker_module, "COUNTS_AFTER_S", 0.0)
    worker.prepare(noise).result(PATIENCE_S)
    worker.update().result(PATIENCE_S)
    worker.end()
    worker.prepare(ORDER).result(PATIENCE_S)
