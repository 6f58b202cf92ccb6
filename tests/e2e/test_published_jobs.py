"""The published cap over Mosquitto: only where device and coordinator allow it; the attack on the model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from brokers import Broker
from clocks import MovableClock
from commands import dpagent
from daemons import agent_thread, attentive_daemons, coordinator_thread
from fleets import DIGITS, digits
from sequences import ROUNDS, agent_of, fleet, run
from stores import open_store

from agent.audit import audit, verify
from agent.heads import second_head_beside
from coordinator.settings import load_fleet_settings
from dpagent.errors import ConfigurationError
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.norm import Norm

pytestmark = pytest.mark.heavy

RATE = 0.5
PUBLISHED: dict[str, Any] = {
    "privacy": {
        "method": "incrementing", "noise": "laplace", "epsilon": 4.0, "sampling_rate": 1.0,
        "schedule": {"kind": "incrementing"},
    },
    "model": {"precision": "float32"},
    "cap": {"kind": "published", "allow_unproven": True, "regularisation": 1e-6},
    "optimiser": {"learning_rate": RATE, "momentum": 0.0},
    "round": {"deadline_s": 86_400.0},
}  # fmt: skip
ALLOWED: dict[str, Any] = {"limits": {"allow_unproven": True}}


def test_whoever_sees_the_model_has_the_exact_gradient(tmp_path: Path, mosquitto: Broker) -> None:
    """An observer with the weights after the job's one round, its first: of two devices' records that differ
    in one, the step fits one gradient to a tenth of that record's part, by which the wire rounds it."""
    file = fleet(tmp_path / "coordinator", mosquitto, tmp_path.name, **PUBLISHED)
    values = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(values | {"rounds": 1}))
    agent = agent_of(tmp_path / "device", mosquitto, file, **ALLOWED)
    run(file, agent, MovableClock())
    before, after = DIGITS.initial_weights(0).astype(np.float64), weights_of(file)
    step = (before - after) / RATE
    engine, data = NumpyEngine(DIGITS, norm=Norm.L1), digits(0, 50)
    norm = load_fleet_settings(file).privacy.clip_norm
    with_it, without = (
        engine.clipped_sum(DIGITS.initial_weights(0), data.inputs[first:], data.labels[first:], [norm]).total
        / 50
        for first in (0, 1)
    )
    part = float(np.linalg.norm(with_it - without))
    assert np.linalg.norm(step - with_it) < 0.25 * part
    assert np.linalg.norm(step - without) > 0.75 * part


def weights_of(file: Path) -> np.ndarray:
    store = open_store(load_fleet_settings(file).state_dir)
    try:
        return store.model().weights.astype(np.float64)
    finally:
        store.database.close()


def test_everything_says_that_nothing_is_guaranteed(tmp_path: Path, mosquitto: Broker) -> None:
    file = fleet(tmp_path / "coordinator", mosquitto, tmp_path.name, **PUBLISHED)
    agent = agent_of(tmp_path / "device", mosquitto, file, **ALLOWED)
    run(file, agent, MovableClock())
    state = tmp_path / "device" / "state"
    verify(state, second_head_beside(state))
    assert [charge.cumulative_epsilon for charge in audit(state).charges] == [float("inf")] * ROUNDS
    text = dpagent("coordinator", "status", "--config", file).stdout
    assert "no guarantee" in text
    status = json.loads(dpagent("coordinator", "status", "--config", file, "--json").stdout)
    assert [each["epsilon"] for each in status["rounds"]] == [None] * ROUNDS
    assert status["spent"][0]["guarantee"] == "none"
    # A job with a guarantee is declined from then on.
    later = fleet(tmp_path / "later", mosquitto, tmp_path.name, round={"deadline_s": 86_400.0})
    clock = MovableClock()
    with attentive_daemons(), coordinator_thread(later, clock) as coordinator, agent_thread(agent, clock):
        clock.advance_until(lambda: "guarantee nothing" in shown(state), "the decline")
        coordinator.stop()
    assert len(audit(state).charges) == ROUNDS


def shown(state: Path) -> str:
    return dpagent("budget", "show", "--state-dir", state).stdout.partition("Declined")[2]


def test_a_device_declines_it_by_default(
    tmp_path: Path, mosquitto: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    file = fleet(tmp_path / "coordinator", mosquitto, tmp_path.name, **PUBLISHED)
    agent = agent_of(tmp_path / "device", mosquitto, file)
    clock = MovableClock()
    caplog.set_level(logging.WARNING)
    with attentive_daemons(), coordinator_thread(file, clock) as coordinator, agent_thread(agent, clock):
        clock.advance_until(lambda: "declined round 1" in caplog.text, "the decline")
        coordinator.stop()
    assert "limits.allow_unproven" in caplog.text
    assert audit(tmp_path / "device" / "state").charges == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cap": {"allow_unproven": False}}, "guarantees no privacy"),
        ({"privacy": {"noise": "gaussian"}}, "expected laplace"),
        ({"privacy": {"local_steps": 2}}, "privacy.local_steps"),
        ({"privacy": {"schedule": {"kind": "uniform"}}}, "privacy.schedule.kind"),
        ({"privacy": {"method": "dp-sgd", "noise": "gaussian"}}, "cap.kind is published"),
    ],
)
def test_a_coordinator_refuses_what_the_paper_has_not(
    tmp_path: Path, mosquitto: Broker, changes: dict[str, Any], words: str
) -> None:
    file = fleet(tmp_path, mosquitto, tmp_path.name, **PUBLISHED)
    values = yaml.safe_load(file.read_text())
    for section, keys in changes.items():
        values[section] |= keys
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigurationError, match=words):
        load_fleet_settings(file)
