"""Noise at the coordinator over Mosquitto: accounts by trust, declines, and one noisy answer a round."""

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
from stores import open_store

from agent.audit import audit, verify
from agent.heads import second_head_beside
from coordinator.columns import spent_columns
from coordinator.reader import StoreReader
from coordinator.settings import FIRST_JOB, load_fleet_settings
from dpagent import faults
from dpagent.faults import FaultPoint
from dpagent.learning.inference.export.model import export_onnx
from dpagent.learning.inference.onnx_evaluator import OnnxEvaluator

pytestmark = pytest.mark.heavy

UPDATES: dict[str, Any] = {
    "privacy": {
        "method": "central", "epsilon": 8.0, "clip_norm": 0.5, "local_training": {"steps": 4, "batch": 8},
    },
    "cap": {"kind": "none"}, "optimiser": {"learning_rate": 1.0, "momentum": 0.0},
    "round": {"deadline_s": 86_400.0},
}  # fmt: skip
TRUSTING: dict[str, Any] = {
    "limits": {"methods": ["dp-sgd", "central"], "trust": ["none", "coordinator"]},
    "budget": {"epsilon": 4.0, "delta": 1e-4, "coordinator": {"epsilon": 20.0, "delta": 1e-3}},
}


NOISY = UPDATES | {"privacy": UPDATES["privacy"] | {"device_noise": {"epsilon": 30.0}}}


@pytest.mark.parametrize(
    ("noise", "clipping"),
    [
        ("gaussian", "quantile"),
        pytest.param("gaussian", "whole", marks=pytest.mark.slow),
        pytest.param("laplace", "quantile", marks=pytest.mark.slow),
    ],
)
def test_jobs_with_and_without_trust_are_in_accounts_of_their_own(
    tmp_path: Path, mosquitto: Broker, noise: str, clipping: str
) -> None:
    sums = {"privacy": {"epsilon": 4.0}, "round": {"deadline_s": 86_400.0}}
    updates = UPDATES | {
        "privacy": UPDATES["privacy"] | {"noise": noise, "clipping": {"kind": clipping, "rate": 1.0}}
    }
    first = fleet(tmp_path / "first", mosquitto, tmp_path.name, **sums)
    second = fleet(tmp_path / "second", mosquitto, tmp_path.name, **updates)
    agent = agent_of(tmp_path / "device", mosquitto, first, **TRUSTING)
    clock = MovableClock()
    for file in (first, second):
        run(file, agent, clock)
    state = tmp_path / "device" / "state"
    verify(state, second_head_beside(state))
    ledger = audit(state)
    assert [charge.dataset for charge in ledger.charges] == ["digits"] * 2 + ["digits@coordinator"] * 2
    assert {charge.mechanism for charge in ledger.charges[2:]} == {f"central-{noise}"}
    assert ledger.accounts.epsilon_spent("digits") == pytest.approx(4.0, rel=1e-3)
    assert ledger.accounts.epsilon_spent("digits@coordinator") == pytest.approx(8.0, rel=1e-3)
    reader = StoreReader(load_fleet_settings(second).state_dir)
    try:
        rounds, counters = reader.rounds(), reader.counters()
    finally:
        reader.close()
    assert [each.fragments for each in rounds] == [5] * ROUNDS
    assert rounds[-1].epsilon == pytest.approx(8.0, rel=1e-3)
    assert not any("rejected" in name for name in counters)
    norms = [each.clip_norm for each in rounds]
    if clipping == "whole":
        assert norms == [None] * ROUNDS
    else:
        # Of a single device the noisy vote moves the norm, up or down; the charges above are the same.
        assert norms[0] == 0.5 != norms[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "changes", "expected"),
    [
        (UPDATES, {}, "limits.methods"),
        (UPDATES, {"limits": {"methods": ["central"]}}, "limits.trust"),
        (UPDATES, TRUSTING | {"budget": {"coordinator": {"epsilon": 7.0, "delta": 1e-3}}}, "lifetime budget"),
        (NOISY, TRUSTING, "lifetime budget for 'digits'"),
    ],
    ids=["method", "trust", "budget", "budget of the account that trusts nobody"],
)
def test_a_device_that_does_not_trust_the_coordinator_or_cannot_pay_declines(
    tmp_path: Path,
    mosquitto: Broker,
    job: dict[str, Any],
    changes: dict[str, Any],
    expected: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = fleet(tmp_path / "coordinator", mosquitto, tmp_path.name, **job)
    agent = agent_of(tmp_path / "device", mosquitto, file, **changes)
    clock = MovableClock()
    caplog.set_level(logging.WARNING)
    with attentive_daemons(), coordinator_thread(file, clock) as coordinator, agent_thread(agent, clock):
        clock.advance_until(lambda: "declined round 1" in caplog.text, "the decline")
        coordinator.stop()
    assert expected in caplog.text
    assert audit(tmp_path / "device" / "state").charges == ()


OF_DEVICES: dict[str, Any] = {"budget": {"epsilon": 40.0, "delta": 1e-3}}


@pytest.mark.parametrize(
    ("noise", "trusting"),
    [
        ("gaussian", False),
        pytest.param("gaussian", True, marks=pytest.mark.slow),
        pytest.param("laplace", True, marks=pytest.mark.slow),
    ],
)
def test_with_noise_of_its_own_a_device_takes_part_whomever_it_trusts(
    tmp_path: Path, mosquitto: Broker, noise: str, trusting: bool
) -> None:
    """Without trust there is one account. With it there are two; a job of sums comes before, and another
    after."""
    sums = {"privacy": {"epsilon": 2.0}, "round": {"deadline_s": 86_400.0}}
    privacy = NOISY["privacy"] | {"noise": noise, "clipping": {"kind": "quantile", "rate": 1.0}}
    jobs, accounts, before = [NOISY | {"privacy": privacy}], ["digits"], []
    changes = {"limits": {"methods": ["dp-sgd", "central"]}} | OF_DEVICES
    if trusting:
        changes = TRUSTING | {"budget": TRUSTING["budget"] | OF_DEVICES["budget"]}
        jobs, accounts, before = [sums, *jobs, sums], ["digits", "digits@coordinator"], ["digits"] * 2
    files = [
        fleet(tmp_path / f"job {number}", mosquitto, tmp_path.name, **changed)
        for number, changed in enumerate(jobs)
    ]
    agent = agent_of(tmp_path / "device", mosquitto, files[0], **changes)
    clock = MovableClock()
    for file in files:
        run(file, agent, clock)
    state = tmp_path / "device" / "state"
    verify(state, second_head_beside(state))
    ledger = audit(state)
    assert [charge.dataset for charge in ledger.charges] == before + accounts * 2 + before
    assert ledger.accounts.reserved("digits").epsilon == pytest.approx(30.0 + 2 * len(before), rel=1e-3)
    if trusting:
        assert ledger.accounts.reserved("digits@coordinator").epsilon == pytest.approx(8.0, rel=1e-3)
    reader = StoreReader(load_fleet_settings(files[len(files) // 2]).state_dir)
    try:
        rounds, counters, job = reader.rounds(), reader.counters(), reader.job()
    finally:
        reader.close()
    assert [each.fragments for each in rounds] == [5] * ROUNDS
    assert not any("rejected" in name for name in counters)
    assert job is not None
    assert [each.trust for each in spent_columns(job, rounds=2, epsilon=8.0, devices=1)] == [
        "coordinator", "none",
    ]  # fmt: skip


class PowerCut(BaseException):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [
        FaultPoint.COORDINATOR_CLOSES,
        FaultPoint.COORDINATOR_STEPPED,
        FaultPoint.COORDINATOR_CLOSE_WRITTEN,
        FaultPoint.COORDINATOR_CLOSED,
    ],
)
def test_a_crash_at_the_close_leaves_one_noisy_answer_or_none(
    tmp_path: Path, mosquitto: Broker, monkeypatch: pytest.MonkeyPatch, point: FaultPoint
) -> None:
    """What is outside of the process after the crash is the model that the next start goes on with."""
    file = fleet(tmp_path / "coordinator", mosquitto, tmp_path.name, **UPDATES)
    settings = load_fleet_settings(file)
    agent = agent_of(tmp_path / "device", mosquitto, file, **TRUSTING)
    clock, died = MovableClock(), []

    def cut(reached: FaultPoint) -> None:
        if reached is point and not died:
            died.append(point)
            raise PowerCut

    monkeypatch.setattr(faults, "reached", cut)
    written = settings.directory_of(FIRST_JOB) / "models" / "round-0001.onnx"
    with attentive_daemons(), agent_thread(agent, clock):
        with coordinator_thread(file, clock) as first:
            clock.advance_until(lambda: not first.is_running, "the power cut")
            assert isinstance(first.failure(), PowerCut)
        assert not written.exists()
        store = open_store(settings.state_dir)
        is_closed, kept, model = store.over_rounds() == 1, bool(store.counts(1)), store.model().weights
        store.database.close()
        assert is_closed == (point is FaultPoint.COORDINATOR_CLOSED)
        assert kept == (not is_closed)
        with coordinator_thread(file, clock) as second:
            clock.advance_until(lambda: not second.is_running, "the end of the job")
            assert second.result is True
    assert written.exists()
    if is_closed:
        inputs = np.random.default_rng(0).random((5, 8, 8, 1), np.float32)
        spec = settings.model.spec()
        expected = OnnxEvaluator(export_onnx(spec, model, metadata={})).logits(inputs)
        np.testing.assert_array_equal(OnnxEvaluator(written.read_bytes()).logits(inputs), expected)
