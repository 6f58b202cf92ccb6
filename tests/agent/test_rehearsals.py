"""What the training process does for a round that its device sits out: an update's work, on no record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brokers import wait_until
from children import PATIENCE_S
from devices import KEY, WEIGHTS, started_trainer, values_in, worker_of
from fleets import DIGITS, make_task, published_plan, report_plan, terms, update_plan, write_agent
from numpy.typing import NDArray
from test_training import features_task

from agent.records import Records
from agent.settings import load_agent_settings
from agent.training import Trainer
from agent.training_messages import Order, WorkerError
from dpagent.learning.front_end.features import FrontEnd
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.protocol.task import RoundTask

TASKS: dict[str, Callable[[], RoundTask]] = {
    "gradients": lambda: make_task(**terms(rate=0.5)),
    "local steps": lambda: make_task(**terms(rate=0.5, local_steps=3)),
    "features": features_task,
    "reports": lambda: RoundTask.of(report_plan()),
    "updates": lambda: RoundTask.of(update_plan()),
    "published": lambda: RoundTask.of(published_plan()),
}


def trainer(directory: Path) -> Trainer:
    return started_trainer(
        load_agent_settings(write_agent(directory, None, KEY, engine="numpy", data={"features_mib": 1}))
    )


def files_in(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize("kind", TASKS)
def test_the_work_is_that_of_an_update_and_no_record_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    task, rows, read = TASKS[kind](), [], []
    weights = np.zeros(task.spec.parameter_count, np.float32)
    gradients, features, attempt = NumpyEngine.clipped_sum, FrontEnd.__call__, Records.attempt

    def counted_gradients(self: NumpyEngine, *arguments: Any) -> Any:
        rows.append(("gradients", len(arguments[2])))
        return gradients(self, *arguments)

    def counted_features(self: FrontEnd, inputs: NDArray[Any]) -> Any:
        rows.append(("features", len(inputs)))
        return features(self, inputs)

    def noted_attempt(self: Records, work: Callable[..., object]) -> object:
        read.append(work)
        return attempt(self, work)

    monkeypatch.setattr(NumpyEngine, "clipped_sum", counted_gradients)
    monkeypatch.setattr(FrontEnd, "__call__", counted_features)
    monkeypatch.setattr(Records, "attempt", noted_attempt)
    work_of = {}
    for is_rehearsal in (False, True):
        board = trainer(tmp_path / str(is_rehearsal))
        work = board.prepare(task, {}, weights, is_rehearsal=is_rehearsal)
        before = files_in(tmp_path / str(is_rehearsal) / "state")
        rows.clear()
        read.clear()
        update = board.noisy_update(work)
        assert update.failure is None
        work_of[is_rehearsal] = [
            sum(count for what, count in rows if what == each) for each in ("gradients", "features")
        ]
        assert bool(read) is not is_rehearsal
    assert "records" not in vars(board)
    found = files_in(tmp_path / "True" / "state")
    assert (found.pop("published.npz", None) is not None) is (kind == "published"), "as a round keeps its own"
    assert found == before
    assert work_of[True] == work_of[False] != [0, 0]


def test_a_rehearsal_that_failed_often_ends_like_an_update_of_noise_alone(tmp_path: Path) -> None:
    board, task = trainer(tmp_path), make_task(**terms(rate=0.5))
    work = board.prepare(task, {}, DIGITS.initial_weights(0), failure="it ended", is_rehearsal=True)
    assert board.noisy_update(work).failure == "it ended"
    assert "records" not in vars(board)


def test_a_training_process_that_is_ended_fails_the_rehearsal(tmp_path: Path) -> None:
    settings = load_agent_settings(write_agent(tmp_path, None, KEY, engine="numpy"))
    settings.state_dir.mkdir(exist_ok=True)
    worker = worker_of(settings)
    order = Order(make_task(**terms(rate=0.5)).plan, WEIGHTS, {}, is_rehearsal=True)
    try:
        worker.prepare(order).result(PATIENCE_S)
        assert np.ptp(values_in(worker.update().result(PATIENCE_S), order.plan)) > 0
        worker.prepare(order).result(PATIENCE_S)
        assert worker._running is not None
        worker._running._process.kill()
        wait_until(lambda: worker._running is not None and worker._running.is_over, "the end")
        with pytest.raises(WorkerError, match="signal 9"):
            worker.update().result(PATIENCE_S)
    finally:
        worker.end()
