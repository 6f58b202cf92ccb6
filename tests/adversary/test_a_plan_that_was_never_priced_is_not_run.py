"""A coordinator has one plan charged for a round, and another one run under that charge.

It announces a plan with little noise and withholds its model, ends the job, and announces a cheap plan for
the same round: before, that one was charged, but the round kept the digest of the first. After a power cut,
or once the training process had ended, the first was announced again, and run: ε = 284 under a charge of
0.02. And an update that was spooled for one name of the data left under another, whatever its owner trusted.

Claim: the ledger says for which plan a round was charged, and it is run, and run again, for no other. A round
that is charged for one data set is over for all others, and what was spooled for one leaves under no other.
Power: no randomness; on the code of before each test fails.
Outcome: nothing is run, and nothing leaves.
"""

from __future__ import annotations

from pathlib import Path

import devices
import pytest
from devices import open_device, sent_for
from fleets import make_plan, terms, update_plan

from agent.announcements import Phase
from agent.charges import digest_of
from agent.rounds import RoundState
from dpagent.protocol.messages import Plan

STRONG = make_plan(**terms(noise_multipliers=[0.05, 0.05], rate=1.0))
CHEAP = make_plan(**terms(noise_multipliers=[40.0, 40.0]))
JOB = CHEAP.job.hex()


def phase_of(device: devices.Device, plan: Plan) -> Phase:
    device.take_plan(plan)
    assert device.announcements.current is not None
    return device.announcements.current.phase


def test_a_round_whose_job_has_ended_is_decided_on_no_more(tmp_path: Path) -> None:
    with open_device(tmp_path) as device:
        device.take_plan(STRONG)  # and no model
        device.take_plan(STRONG.with_values({"state": "finished"}))
        assert phase_of(device, CHEAP) is Phase.SETTLED
        device.give()
        device.advance()
        assert not device.charged()


@pytest.mark.parametrize("state", ["missed", "expired", "declined", "offered"])
def test_a_charge_notes_its_own_plan_whatever_the_round_was_before(tmp_path: Path, state: str) -> None:
    with open_device(tmp_path) as device:
        device.take_plan(CHEAP)
        device.give()
        with device.state.connection:
            device.state.connection.execute(
                "UPDATE rounds SET state = ?, plan = ?", (state, digest_of(STRONG))
            )
        while not device.charged():
            device.clock.advance(devices.PERIOD_S)
            device.cycle.advance()
        known = device.state.round(JOB, 1)
        assert known is not None
        assert (known.state, known.plan) == (RoundState.CHARGED, digest_of(CHEAP))
        assert device.state.ledger.plans_charged(JOB, 1) == {digest_of(CHEAP).hex()}
    with open_device(tmp_path) as device:  # after a power cut
        assert phase_of(device, STRONG) is Phase.SETTLED
        device.give()
        device.advance()
        assert not sent_for(device, STRONG)
    with open_device(tmp_path) as device:
        assert phase_of(device, CHEAP) is Phase.REPEAT


def test_the_ledger_decides_and_not_the_table_of_rounds(tmp_path: Path) -> None:
    """Whatever brings another digest into that table."""
    with open_device(tmp_path) as device:
        device.take_plan(CHEAP)
        device.give()
        while not device.charged():
            device.clock.advance(devices.PERIOD_S)
            device.cycle.advance()
        with device.state.connection:
            device.state.connection.execute("UPDATE rounds SET plan = ?", (digest_of(STRONG),))
    with open_device(tmp_path) as device:
        assert phase_of(device, STRONG) is Phase.SETTLED


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> str:
    """Another name of the data, for which the owner has begun a budget, for the devices opened after this."""
    real = devices.open_state
    monkeypatch.setattr(devices, "open_state", lambda path, *a, **k: real(path, dataset="other", **k))
    monkeypatch.setattr(devices, "DATASET", "other")
    return "other"


def test_a_round_that_is_charged_for_one_data_set_is_over_for_others(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with open_device(tmp_path) as device:
        device.take_plan(CHEAP)
        device.give()
        device.advance()
        assert device.charged() == [1]
    request.getfixturevalue("renamed")
    for _ in range(2):  # The second head is in order, too.
        with open_device(tmp_path) as device:
            assert phase_of(device, CHEAP) is Phase.SETTLED
            device.give()
            device.advance()
            assert device.charged() == [1]


def test_a_round_that_is_charged_for_one_data_set_and_not_spooled_is_not_run_on_others(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with open_device(tmp_path) as device:
        device.take_plan(CHEAP)
        device.give()
        while not device.charged():
            device.clock.advance(devices.PERIOD_S)
            device.cycle.advance()
        assert not device.pending()
    request.getfixturevalue("renamed")
    with open_device(tmp_path) as device:  # after a power cut
        assert phase_of(device, CHEAP) is Phase.SETTLED
        device.give()
        device.advance()
        assert not device.pending()


def test_what_was_spooled_for_one_data_set_leaves_under_no_other(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """An update without noise, for a coordinator that the owner trusts no more."""
    budget = {"epsilon": 50.0, "delta": 1e-3, "coordinator": {"epsilon": 50.0, "delta": 1e-3}}
    trusting = {"methods": ["dp-sgd", "central"], "trust": ["none", "coordinator"]}
    plan = update_plan()
    with open_device(tmp_path, limits=trusting, budget=budget) as device:
        device.take_plan(plan)
        device.give()
        device.advance()
        assert device.pending()
    request.getfixturevalue("renamed")
    with open_device(tmp_path, limits=trusting | {"trust": ["none"]}, budget=budget) as device:
        assert not sent_for(device, plan)
