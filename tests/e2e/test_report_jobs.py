"""LDP-FL over Mosquitto: jobs of several methods on one ledger, a power cut after a charge, declines."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brokers import Broker
from clocks import MovableClock
from daemons import agent_thread, attentive_daemons, coordinator_thread
from sequences import ROUNDS, agent_of, fleet, run

from agent.audit import audit, verify
from agent.charges import ReportCharge, SumCharge
from agent.heads import second_head_beside
from coordinator.reader import StoreReader
from coordinator.settings import FIRST_JOB, load_fleet_settings
from dpagent.faults import FaultPoint

pytestmark = pytest.mark.heavy

REPORTS: dict[str, Any] = {
    "privacy": {
        "method": "ldp-fl", "epsilon": 60.0, "schedule": {"kind": "uniform"},
        "local_training": {"steps": 4, "batch": 8}, "two_point": {"coordinates": 12},
    },
    "cap": {"kind": "none"}, "optimiser": {"learning_rate": 0.1, "momentum": 0.0},
    "round": {"deadline_s": 86_400.0},
}  # fmt: skip
BUDGET: dict[str, Any] = {"budget": {"epsilon": 100.0, "delta": 2.5e-4}}


def test_a_job_of_each_method_in_sequence_on_one_ledger(tmp_path: Path, mosquitto: Broker) -> None:
    sums = {"privacy": {"epsilon": 4.0}, "round": {"deadline_s": 86_400.0}}
    first = fleet(tmp_path / "first", mosquitto, tmp_path.name, **sums)
    second = fleet(tmp_path / "second", mosquitto, tmp_path.name, **REPORTS)
    agent = agent_of(tmp_path / "device", mosquitto, first, **BUDGET)
    clock = MovableClock()
    for file in (first, second):
        run(file, agent, clock)
    state = tmp_path / "device" / "state"
    verify(state, second_head_beside(state))
    charges = audit(state).charges
    assert [type(charge) for charge in charges] == [SumCharge] * ROUNDS + [ReportCharge] * ROUNDS
    assert 60.0 < charges[-1].cumulative_epsilon <= 64.0
    reader = StoreReader(load_fleet_settings(second).state_dir)
    try:
        rounds, counters = reader.rounds(), reader.counters()
    finally:
        reader.close()
    # 12 reports in 5 fragments of 3: four are needed.
    assert [each.fragments for each in rounds] == [4] * ROUNDS
    assert rounds[-1].epsilon == pytest.approx(60.0, rel=1e-3)
    assert not any("rejected" in name for name in counters)
    assert (load_fleet_settings(second).directory_of(FIRST_JOB) / "model.onnx").exists()


@pytest.mark.parametrize("changes", [{"limits": {"methods": ["dp-sgd"]}}, {"budget": {"epsilon": 20.0}}])
def test_a_device_that_may_not_or_cannot_pay_declines_in_a_sentence(
    tmp_path: Path, mosquitto: Broker, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    file = fleet(tmp_path / "coordinator", mosquitto, tmp_path.name, **REPORTS)
    agent = agent_of(tmp_path / "device", mosquitto, file, **(BUDGET | changes))
    clock = MovableClock()
    caplog.set_level(logging.WARNING)
    with attentive_daemons(), coordinator_thread(file, clock) as coordinator, agent_thread(agent, clock):
        clock.advance_until(lambda: "declined round 1" in caplog.text, "the decline")
        coordinator.stop()
    expected = "limits.methods" if "limits" in changes else "lifetime budget"
    assert expected in caplog.text
    assert audit(tmp_path / "device" / "state").charges == ()


def test_a_device_that_dies_between_charge_and_spool_sends_its_reports_after_it(
    tmp_path: Path, mosquitto: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dpagent import faults

    file = fleet(tmp_path / "coordinator", mosquitto, tmp_path.name, **REPORTS)
    agent = agent_of(tmp_path / "device", mosquitto, file, **BUDGET)
    clock, died = MovableClock(), []

    class PowerCut(BaseException):
        pass

    def cut(point: FaultPoint) -> None:
        if point is FaultPoint.AGENT_TRAINS and not died:
            died.append(point)
            raise PowerCut

    monkeypatch.setattr(faults, "reached", cut)
    with attentive_daemons(), coordinator_thread(file, clock) as coordinator:
        with agent_thread(agent, clock) as first:
            clock.advance_until(lambda: not first.is_running, "the power cut")
            assert isinstance(first.failure(), PowerCut)
        (charge,) = audit(tmp_path / "device" / "state").charges
        assert charge.round == 1
        with agent_thread(agent, clock):
            clock.advance_until(lambda: not coordinator.is_running, "the end of the job")
    assert coordinator.result is True
    assert [charge.round for charge in audit(tmp_path / "device" / "state").charges] == [1, 2]
    assert np.isfinite(charge.job_epsilon)
