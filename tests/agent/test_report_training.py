"""A device's two-point reports: work that does not depend on the records, and bits whatever fails."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import started_trainer
from fleets import DIGITS, digits, make_plan, report_plan, write_agent
from ledgers import charge_and_spool, charge_for, open_state

from agent.audit import audit
from agent.charges import Budget, BudgetChange, ReportCharge, SumCharge
from agent.declined import Declined
from agent.effort import Effort, Workload
from agent.limit_settings import LimitSettings
from agent.limits import BeyondLimitError
from agent.plan_limits import require_within
from agent.priced_charges import rebuilt
from agent.replay import replay
from agent.settings import load_agent_settings
from agent.training import Trainer
from dpagent.errors import LedgerError
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.privacy.mechanisms.two_point import group_edges
from dpagent.protocol.signing import Signer, new_signing_secret
from dpagent.protocol.task import RoundTask

KEY = Signer(new_signing_secret(), "testers").public_key
WEIGHTS = DIGITS.initial_weights(0)
TASK = RoundTask.of(report_plan())
EDGES = group_edges(DIGITS.parameter_count, 40, 0, 40)


def trainer(directory: Path, **changes: object) -> Trainer:
    return started_trainer(load_agent_settings(write_agent(directory, None, KEY, engine="numpy", **changes)))


def test_a_board_sends_a_report_for_each_group(tmp_path: Path) -> None:
    board = trainer(tmp_path)
    update = board.noisy_update(board.prepare(TASK, {}, WEIGHTS))
    assert update.failure is None
    assert update.values.shape == (40,)
    assert (update.values >> 1 < np.diff(EDGES)).all()


def test_reports_follow_the_trained_weights(tmp_path: Path) -> None:
    """Of all weights, twenty times: those that training raises are reported higher, by six deviations."""
    task = RoundTask.of(
        report_plan(
            coordinates=DIGITS.parameter_count, block=700,
            release={"training": {"steps": 20}, "radii": [0.05] * len(DIGITS.parameter_shapes)},
        )
    )  # fmt: skip
    board, mechanism, rounds = trainer(tmp_path), task.release.two_point, 20
    work = board.prepare(task, {}, WEIGHTS)
    way = task.release.training.train(NumpyEngine(DIGITS), WEIGHTS, digits(0, 50)) - WEIGHTS
    trained = sum(float(way @ (board.noisy_update(work).values & 1)) for _ in range(rounds))
    still = sum(float(way @ mechanism.report(np.zeros_like(WEIGHTS)).bits) for _ in range(rounds))
    assert trained - still > 6 * 0.5 * float(np.linalg.norm(way)) * (2 * rounds) ** 0.5


def test_the_work_is_the_plans_whatever_the_records_are() -> None:
    load = Workload.of(TASK.release, WEIGHTS, 1_000_000)
    assert (load.steps, load.records, load.moments, load.augmentation) == (3, 8, None, None)
    assert Effort(TASK, WEIGHTS, NumpyEngine(DIGITS), 1_000_000).largest == 8
    assert Effort(TASK, WEIGHTS, NumpyEngine(DIGITS), 1).largest == 8


@pytest.mark.parametrize("when", ["before", "during"])
def test_after_the_charge_a_failure_leaves_a_report_of_the_public_weights(
    tmp_path: Path, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    board = trainer(tmp_path)
    caplog.set_level(logging.DEBUG)
    if when == "before":
        work = board.prepare(TASK, {}, WEIGHTS, failure="the board is on fire")
    else:
        work = board.prepare(TASK, {}, WEIGHTS)
        for file in (tmp_path / "state").glob("rows*"):
            file.unlink()
        (tmp_path / "data.npz").unlink()
    update = board.noisy_update(work)
    assert update.values.shape == (40,)
    assert (update.values >> 1 < np.diff(EDGES)).all()
    assert update.failure is not None or when == "during"


def test_records_that_make_weights_infinite_leave_a_report_all_the_same(tmp_path: Path) -> None:
    plan = report_plan()
    wild = plan.release.training.with_values({"learning_rate": 1000.0, "steps": 30})
    task = RoundTask.of(plan.with_values({"release": plan.release.with_values({"training": wild})}))
    board = trainer(tmp_path)
    assert board.noisy_update(board.prepare(task, {}, WEIGHTS)).values.shape == (40,)


def test_the_ledger_charges_bits_beside_sums_and_verifies(tmp_path: Path) -> None:
    """A job of each method in sequence, on one budget, as the auditor finds it."""
    state, data = open_state(tmp_path / "state", Budget(400.0, 1e-3)), digits(0, 50)
    for plan in (make_plan(), report_plan(job=b"k" * 16), report_plan(job=b"k" * 16, round=3)):
        charge_and_spool(state, charge_for(plan, data, state.ledger), [])
    state.close()
    first, second, third = audit(tmp_path / "state").charges
    assert (type(first), type(second), type(third)) == (SumCharge, ReportCharge, ReportCharge)
    assert rebuilt(second.charged) == TASK.release.mechanism
    assert first.cumulative_epsilon < second.cumulative_epsilon < third.cumulative_epsilon
    # 40 bits at 2, 2 and 4 in its three rounds: no more than their sum.
    assert 0 < second.job_epsilon <= 40 * (2 + 2 + 4)


@pytest.mark.parametrize(
    ("changes", "text"),
    [({"coordinates": 39}, "cumulative ε"), ({"noise_multiplier": 0.51}, "cumulative ε"),
     ({"coordinates": 0}, "coordinates is 0"), ({"mechanism": "three-point"}, "three-point"),
     ({"statistical_distance": 1e-9}, "statistical distance")],
)  # fmt: skip
def test_a_charge_that_is_changed_is_found(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    state = open_state(tmp_path / "state", Budget(400.0, 1e-3))
    charge = charge_for(report_plan(), digits(0, 50), state.ledger)
    state.close()
    budget = BudgetChange(charge.dataset, 400.0, 1e-3)
    assert replay([budget, charge]).reserved(charge.dataset).epsilon == charge.job_epsilon
    with pytest.raises(LedgerError, match=text):
        replay([budget, replace(charge, **changes)])


def test_a_job_beyond_the_budget_is_declined(tmp_path: Path) -> None:
    state = open_state(tmp_path / "state", Budget(100.0, 1e-3))
    with pytest.raises(Declined, match="the lifetime budget for 'digits' is 100"):
        charge_for(report_plan(), digits(0, 50), state.ledger)
    state.close()


def test_a_board_that_does_not_take_part_in_the_method_declines() -> None:
    with pytest.raises(BeyondLimitError, match=r"limits\.methods"):
        require_within(TASK, LimitSettings(methods=("dp-sgd",), minimum_compute_slot_s=0.01,
                                           minimum_jitter_window_s=0.0))  # fmt: skip


@pytest.mark.parametrize(("coordinates", "least"), [(2, 4), (40, 4)])
def test_fewer_bits_than_the_least_number_of_fragments_travel_one_by_one(
    coordinates: int, least: int
) -> None:
    limits = LimitSettings(minimum_compute_slot_s=0.01, minimum_jitter_window_s=0.0, minimum_fragments=least)
    require_within(RoundTask.of(report_plan(coordinates=coordinates, block=1)), limits)
    with pytest.raises(BeyondLimitError, match="minimum_fragments"):
        require_within(RoundTask.of(report_plan(coordinates=coordinates, block=coordinates)), limits)
