"""A device's update without noise: work that does not depend on the records, and an answer whatever fails."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from devices import started_trainer
from fleets import DIGITS, digits, update_plan, write_agent

from agent.effort import Effort, Workload
from agent.settings import load_agent_settings
from agent.training import Trainer
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.protocol.signing import Signer, new_signing_secret
from dpagent.protocol.task import RoundTask
from dpagent.protocol.updates import Updates

KEY = Signer(new_signing_secret(), "testers").public_key
WEIGHTS = DIGITS.initial_weights(0)
TASK = RoundTask.of(update_plan())


def trainer(directory: Path) -> Trainer:
    return started_trainer(load_agent_settings(write_agent(directory, None, KEY, engine="numpy")))


@pytest.mark.parametrize("name", ["central-gaussian", "central-laplace"])
def test_a_board_sends_the_change_of_its_weights_within_the_clip_norm(tmp_path: Path, name: str) -> None:
    plan = update_plan(name=name)
    training = plan.release.training.with_values({"steps": 20, "learning_rate": 0.03})
    release = plan.release.with_values({"training": training})
    task, board = RoundTask.of(plan.with_values({"release": release})), trainer(tmp_path)
    assert isinstance(task.release, Updates)
    update = board.noisy_update(board.prepare(task, {}, WEIGHTS))
    assert update.failure is None
    power = 2 if name == "central-gaussian" else 1
    size = int((np.abs(update.values) ** power).sum()) ** (1 / power)
    assert size <= task.release.terms.largest
    # Batches differ from run to run, and the way does not.
    way = task.release.training.train(NumpyEngine(DIGITS), WEIGHTS, digits(0, 50)) - WEIGHTS
    alike = float(way @ update.values) / float(np.linalg.norm(way) * np.linalg.norm(update.values))
    assert alike > 0.5


def test_the_work_is_the_plans_whatever_the_records_are() -> None:
    load = Workload.of(TASK.release, WEIGHTS, 1_000_000)
    assert (load.steps, load.records, load.moments, load.augmentation) == (3, 8, None, None)
    assert Effort(TASK, WEIGHTS, NumpyEngine(DIGITS), 1_000_000).largest == 8
    assert Effort(TASK, WEIGHTS, NumpyEngine(DIGITS), 1).largest == 8


@pytest.mark.parametrize("when", ["before", "during"])
def test_after_the_charge_a_failure_leaves_an_update_of_zeros_or_of_what_was_read(
    tmp_path: Path, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    board = trainer(tmp_path)
    caplog.set_level(logging.DEBUG)
    work = board.prepare(TASK, {}, WEIGHTS, failure="the board is on fire" if when == "before" else None)
    if when == "during":
        for file in (tmp_path / "state").glob("rows*"):
            file.unlink()
        (tmp_path / "data.npz").unlink()
    update = board.noisy_update(work)
    assert update.values.shape == (DIGITS.parameter_count,)
    if when == "before":
        assert update.failure == "the board is on fire"
        assert not update.values.any()


def test_after_the_charge_a_failure_leaves_noise_alone_where_devices_add_any(tmp_path: Path) -> None:
    task, board = RoundTask.of(update_plan(device_noise=[4.0, 3.0, 2.0])), trainer(tmp_path)
    assert isinstance(task.release, Updates)
    assert task.release.own_noise is not None
    update = board.noisy_update(board.prepare(task, {}, WEIGHTS, failure="the board is on fire"))
    assert update.failure == "the board is on fire"
    assert update.values.std() == pytest.approx(task.release.own_noise.mechanism.deviation_units, rel=0.1)


def test_records_that_make_weights_infinite_leave_an_update_all_the_same(tmp_path: Path) -> None:
    plan = update_plan()
    wild = plan.release.training.with_values({"learning_rate": 1000.0, "steps": 30})
    task = RoundTask.of(plan.with_values({"release": plan.release.with_values({"training": wild})}))
    board = trainer(tmp_path)
    update = board.noisy_update(board.prepare(task, {}, WEIGHTS))
    assert isinstance(task.release, Updates)
    assert int((update.values**2).sum()) <= task.release.terms.largest**2
