"""The worked example of a mechanism runs wherever the product's own does, with no other change."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from examples.l2_laplace import L2Laplace
from fleets import DIGITS, records, write_fleet
from ledgers import LIMITS, charge_and_spool, open_state
from planted import plant
from scipy import stats

from agent.admission import admit
from agent.audit import audit
from agent.charges import Budget
from agent.noisy_sums import noisy_gradients
from agent.priced_charges import charge_of, rebuilt
from coordinator.aggregation import fleet_mean
from coordinator.planning import Planner, new_job
from coordinator.settings import FleetSettings, load_fleet_settings
from coordinator.store import OpenRound
from dpagent.errors import ConfigurationError, ExitCode
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.protocol.task import RoundTask
from dpagent.protocol.weights import weights_to_bytes

EPSILON, DELTA, ROUNDS = 40.0, 1e-4, 3
NOBODY = ArrayDataset(np.full((1, 8, 8, 1), np.nan, np.float32), np.zeros(1, np.int64), 10)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its lines in the registry and in a method do."""
    plant(monkeypatch, L2Laplace, noise="l2-laplace")


def settings_of(directory: Path) -> FleetSettings:
    privacy = {"epsilon": EPSILON, "delta": DELTA, "noise": "l2-laplace", "sampling_rate": 0.5}
    return load_fleet_settings(write_fleet(directory, None, rounds=ROUNDS, privacy=privacy))


def tasks_of(settings: FleetSettings) -> list[RoundTask]:
    planner = Planner(settings, DIGITS, new_job(settings), bytes(range(32)))
    planner.require_acceptable()
    weights = weights_to_bytes(DIGITS.initial_weights(0), "float32")
    return [planner.task(OpenRound(number, 0.0, 4e9), weights) for number in range(1, ROUNDS + 1)]


def test_it_is_unknown_until_it_is_registered(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        settings_of(tmp_path)
    assert caught.value.exit_code == ExitCode.CONFIGURATION
    assert "'l2-laplace'" in str(caught.value)
    assert "gaussian" in str(caught.value)


@pytest.mark.usefixtures("registered")
def test_a_job_is_planned_admitted_charged_and_audited(tmp_path: Path) -> None:
    tasks = tasks_of(settings_of(tmp_path))
    state = open_state(tmp_path / "device", Budget(EPSILON, DELTA))
    for task in tasks:
        assert isinstance(task.release.mechanism, L2Laplace)
        (price,) = admit(task, records(20), state.ledger.books, "digits", LIMITS, now=0.0)
        charge_and_spool(state, charge_of(task, price, charged_at="2026-11-22T00:00:00+00:00"), [])
    assert EPSILON * 0.999 <= state.ledger.epsilon_spent("digits") <= EPSILON
    state.close()
    charges = audit(tmp_path / "device").charges
    assert [rebuilt(charge.charged) for charge in charges] == [task.release.mechanism for task in tasks]
    assert {(charge.mechanism, charge.accountant) for charge in charges} == {("l2-laplace", "pld")}


@pytest.mark.usefixtures("registered")
def test_its_noise_is_the_noise_that_it_is_charged_for(tmp_path: Path) -> None:
    """The update of a device whose only record does not count is noise alone: 9,930 draws."""
    task, engine = tasks_of(settings_of(tmp_path))[0], NumpyEngine(DIGITS, microbatch=4)
    update = noisy_gradients(task.release, DIGITS.initial_weights(0), NOBODY, engine)
    deviation = task.release.mechanism.deviation_units / task.release.terms.step
    # A kurtosis of 6 makes the deviation of a sample's deviation √(5/n)/2; rounding adds less than 1 %.
    assert abs(update.std() / deviation - 1) < 6 * math.sqrt(5 / update.size) / 2 + 0.01
    noise = task.release.mechanism.add_noise(np.zeros(task.release.dimension, np.int64))
    assert (
        stats.kstest(noise / task.release.mechanism.deviation_units * math.sqrt(2), "laplace").pvalue > 1e-6
    )
    mean = fleet_mean(task.release, {0: (1, update[: task.plan.wire.block])})
    expected = update[: task.plan.wire.block] * task.release.wire_unit / task.release.sampling.expected_lot
    np.testing.assert_allclose(mean[: task.plan.wire.block], expected, rtol=1e-12)
