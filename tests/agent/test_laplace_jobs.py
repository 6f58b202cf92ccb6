"""Jobs with discretised Laplace noise on a device: clipped in L1, charged, and priced again by others."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
from devices import started_trainer
from dp_accounting.pld import PLDAccountant
from fleets import DIGITS, make_task, records, terms, write_agent, write_fleet
from ledgers import DATASET, LIMITS, charge_and_spool, open_state
from scipy import stats

from agent.admission import admit
from agent.audit import audit
from agent.charges import Budget, Charge
from agent.declined import Declined
from agent.limits import BeyondLimitError
from agent.noisy_sums import noisy_gradients
from agent.priced_charges import charge_of, rebuilt
from agent.settings import load_agent_settings
from coordinator.planning import Planner, new_job
from coordinator.settings import load_fleet_settings
from coordinator.store import OpenRound
from dpagent.errors import ParameterError
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.training.engine_choice import UnsuitableEngineError
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.learning.training.onnx_graph.build import build_training_graph
from dpagent.norm import Norm
from dpagent.privacy.mechanisms.discretised_laplace import DiscretisedLaplace
from dpagent.protocol.signing import Signer, new_signing_secret
from dpagent.protocol.task import RoundTask
from dpagent.protocol.weights import weights_to_bytes

KEY = Signer(new_signing_secret(), "testers").public_key
WEIGHTS = DIGITS.initial_weights(1)
DATA = records(3)
NOBODY = ArrayDataset(np.full((1, 8, 8, 1), np.nan, np.float32), np.zeros(1, np.int64), 10)


def laplace(**changes: Any) -> dict[str, Any]:
    """The sections of a plan with such noise; see :func:`fleets.terms`."""
    sections = terms(**changes)
    mechanism = sections["mechanism"] | {"name": DiscretisedLaplace.name}
    return sections | {"method": "incrementing", "mechanism": mechanism}


def planned(directory: Path, *, rounds: int = 3, **privacy: Any) -> list[RoundTask]:
    """The tasks of a job as a coordinator plans it."""
    wanted = {
        "epsilon": 20.0,
        "delta": 1e-4,
        "method": "incrementing",
        "noise": "laplace",
        "sampling_rate": 0.5,
    }
    settings = load_fleet_settings(write_fleet(directory, None, rounds=rounds, privacy=wanted | privacy))
    planner = Planner(settings, DIGITS, new_job(settings), bytes(range(32)))
    planner.require_acceptable()
    weights = weights_to_bytes(DIGITS.initial_weights(0), settings.model.precision)
    return [planner.task(OpenRound(number, 0.0, 4e9), weights) for number in range(1, rounds + 1)]


# --- its part of a round ------------------------------------------------------------------------


@pytest.mark.usefixtures("brief_trials")
def test_an_engine_that_clips_in_another_norm_is_not_taken(tmp_path: Path) -> None:
    """A device that has had a job in L2 makes another engine for one in L1, and back again."""
    board = started_trainer(load_agent_settings(write_agent(tmp_path, None, KEY, engine="auto")))
    graph = {"training-graph": build_training_graph(DIGITS)}
    for task in (make_task(), make_task(**laplace()), make_task()):
        engine = board.prepare(task, graph, WEIGHTS).engine
        assert engine is not None
        assert engine.norm is task.release.mechanism.norm
        if engine.norm is Norm.L1:
            assert isinstance(engine, NumpyEngine)
    told = started_trainer(load_agent_settings(write_agent(tmp_path / "told", None, KEY, engine="onnx")))
    with pytest.raises(UnsuitableEngineError, match="clip records in L2; the plan's mechanism needs L1"):
        told.prepare(make_task(**laplace()), graph, WEIGHTS)


def test_a_sum_of_records_clipped_in_another_norm_is_refused() -> None:
    for task, norm in ((make_task(**laplace()), Norm.L2), (make_task(), Norm.L1)):
        with pytest.raises(ParameterError, match=f"clips records in {norm}"):
            noisy_gradients(task.release, WEIGHTS, DATA, NumpyEngine(DIGITS, norm=norm))


def test_updates_scatter_around_the_sum_clipped_in_l1_with_the_announced_noise() -> None:
    sections = laplace(
        noise_multipliers=[0.05], rate=1.0, expected_lot=3.0, clipping={"norms": [20.0]}, resolution=2**28
    )
    task = make_task(**sections, step=make_task(**sections).release.mechanism.wire_step)
    engine = NumpyEngine(DIGITS, microbatch=4, norm=Norm.L1)
    truth = np.zeros(DIGITS.parameter_count)
    for index in range(len(DATA)):
        gradient = engine.clipped_sum(WEIGHTS, *DATA.batch(np.array([index])), [1e9]).total
        length = np.abs(gradient).sum()
        assert length > 20.0, "clipped"
        truth += gradient * 20.0 / length
    unit = task.release.wire_unit
    off = np.stack([noisy_gradients(task.release, WEIGHTS, DATA, engine) * unit - truth for _ in range(20)])
    deviation = task.release.mechanism.deviation_units * task.release.mechanism.granularity
    # The scale of Laplace noise, and rounding of 1/108 of its variance.
    assert abs(off.std() / deviation - 1) < 6 * math.sqrt(5 / off.size) / 2 + 1 / 128
    assert abs(off @ truth).max() < 6 * deviation * np.linalg.norm(truth)
    assert np.linalg.norm(truth) * np.sqrt(20) > 0.3 * deviation


def test_the_noise_of_a_lot_of_nobody_is_discrete_laplace() -> None:
    task = make_task(**laplace(noise_multipliers=[1.0]), step=1)
    update = noisy_gradients(task.release, WEIGHTS, NOBODY, NumpyEngine(DIGITS, microbatch=4, norm=Norm.L1))
    assert isinstance(task.release.mechanism, DiscretisedLaplace)
    assert stats.kstest(update / task.release.mechanism.scale_units, "laplace").pvalue > 1e-6


# --- its charges --------------------------------------------------------------------------------


def admitted(tasks: Iterable[RoundTask], directory: Path, budget: Budget) -> tuple[Charge, ...]:
    """The charges of a device that takes all rounds, as its auditor reads them."""
    with closing(open_state(directory, budget)) as state:
        for task in tasks:
            (price,) = admit(task, DATA, state.ledger.books, DATASET, LIMITS, now=0.0)
            charge = charge_of(task, price, charged_at="2026-11-22T00:00:00+00:00")
            charge_and_spool(state, charge, [])
    return audit(directory).charges


@pytest.mark.parametrize("steps", [1, 3])
def test_a_job_is_planned_charged_and_found_no_cheaper_by_dp_accounting(tmp_path: Path, steps: int) -> None:
    """dp-accounting prices a Laplace mechanism in one dimension, which is no more than the vector costs."""
    tasks = planned(tmp_path, local_steps=steps)
    charges = admitted(tasks, tmp_path / "device", Budget(20.0, 1e-3))
    assert [rebuilt(charge.charged) for charge in charges] == [task.release.mechanism for task in tasks]
    assert {(charge.mechanism, charge.accountant) for charge in charges} == {("discrete-laplace", "pld")}
    theirs = PLDAccountant(value_discretization_interval=1e-3)
    for charge in charges:
        noise = dp_accounting.LaplaceDpEvent(charge.noise_multiplier)
        theirs.compose(dp_accounting.PoissonSampledDpEvent(charge.sampling_rate, noise), charge.steps)
    spent = charges[-1].cumulative_epsilon
    assert 20.0 * 0.999 <= spent <= 20.0
    assert 0.5 * spent < theirs.get_epsilon(charges[-1].delta) <= spent
    # And no more than pure composition of the steps says, which needs no δ.
    rate = charges[0].sampling_rate
    pure = sum(
        charge.steps * math.log1p(rate * math.expm1(1 / charge.noise_multiplier)) for charge in charges
    )
    assert spent <= pure * (1 + 1e-9)


def test_jobs_of_both_mechanisms_follow_each_other_on_one_ledger(tmp_path: Path) -> None:
    first, second = planned(tmp_path / "one"), planned(tmp_path / "two", noise="gaussian")
    charges = admitted([*first, *second], tmp_path / "device", Budget(40.0, 1e-3))
    assert [charge.mechanism for charge in charges] == ["discrete-laplace"] * 3 + ["discrete-gaussian"] * 3
    assert 39.9 < charges[-1].cumulative_epsilon <= 40.0
    with pytest.raises(Declined, match=r"would bring ε to 59\.9"):
        admitted(planned(tmp_path / "three"), tmp_path / "device", Budget(40.0, 1e-3))


def test_a_device_takes_part_only_if_its_owner_lists_the_method(tmp_path: Path) -> None:
    limits = LIMITS.with_values({"methods": ("dp-sgd",)})
    with (
        closing(open_state(tmp_path)) as state,
        pytest.raises(BeyondLimitError, match=r"incrementing.*limits\.methods"),
    ):
        admit(planned(tmp_path / "plan")[0], DATA, state.ledger.books, DATASET, limits, now=0.0)


@pytest.mark.parametrize("resolution", [256, 2**30])
def test_a_coarse_or_fine_grid_costs_the_same_epsilon(tmp_path: Path, resolution: int) -> None:
    """What rounding adds is in the sensitivity, and so in the noise."""
    task = make_task(**laplace(noise_multipliers=[2.0] * 3, resolution=resolution))
    with closing(open_state(tmp_path)) as state:
        (price,) = admit(task, DATA, state.ledger.books, DATASET, LIMITS, now=0.0)
    assert price.job_epsilon == pytest.approx(3 * math.log1p(0.25 * math.expm1(0.5)), rel=0.01)
    mechanism = task.release.mechanism
    assert mechanism.sensitivity_units >= resolution + DIGITS.parameter_count
    assert mechanism.deviation_units >= 2.0 * math.sqrt(2) * mechanism.sensitivity_units
