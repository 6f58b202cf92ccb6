"""Jobs whose coordinator or broker stops in the middle and comes back.

A coordinator that is killed is a process of its own. The others run in threads, on clocks that the test
moves.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brokers import Broker, wait_until
from clocks import MovableClock
from daemons import agent_thread, attentive_daemons, coordinator_thread
from fleets import DIGITS, run_coordinator
from floods import stopped
from observers import Observer
from stores import begin_job
from watched_fleets import SLOW, WatchedFleet, charges

from agent.audit import verify
from coordinator import announcer, daemon
from coordinator.database.opening import open_beside, open_database
from coordinator.diagnosis import examine
from coordinator.model_state import ModelState
from coordinator.queue import Queue
from coordinator.settings import FIRST_JOB
from coordinator.store import RoundResult, Store
from dpagent.diagnosis import Finding, Verdict
from dpagent.protocol.chunks import content_digest
from dpagent.protocol.messages import Receipts
from dpagent.protocol.receipts import receipt_digest
from dpagent.protocol.weights import weights_to_bytes


@pytest.fixture(autouse=True)
def _attentive() -> Iterator[None]:
    with attentive_daemons():
        yield


@pytest.mark.slow
def test_a_coordinator_killed_in_the_middle_of_a_round_goes_on_with_its_counts(
    tmp_path: Path, mosquitto: Broker
) -> None:
    fleet = WatchedFleet(tmp_path, mosquitto, rounds=1, fragments_per_update=30)
    files = [fleet.agent(number) for number in (0, 1)]
    clock = MovableClock()
    with (
        Observer(mosquitto, fleet.name) as observer,
        agent_thread(files[0], clock),
        agent_thread(files[1], clock),
    ):
        before: dict[bytes, int] = {}
        for _ in range(2):
            with run_coordinator(fleet.file) as coordinator:
                # Announced: what is pending has new times.
                announced = len(observer.plans)
                wait_until(lambda known=announced: len(observer.plans) > known, "the plan")
                wait_until(lambda: charges(*files) == 2, "the charges")
                enough = len(before) + 1
                clock.advance_until(
                    lambda enough=enough: len(fleet.counted()) >= enough, "more counted fragments", 1.0
                )
                coordinator.kill()
            now = fleet.counted()
            assert before.items() <= now.items(), "a restart forgot what it had counted"
            before = now
        assert 0 < len(before) < 2 * fleet.blocks, "the kill came too late to show anything"
        # Whatever was receipted before the kill is counted.
        receipted = set()
        for message in observer.receipts:
            raw = fleet.verifier.open(message, Receipts, "receipts").digests
            receipted |= {raw[start : start + 16] for start in range(0, len(raw), 16)}
        assert receipted <= {receipt_digest(identity) for identity in before}
        with coordinator_thread(fleet.file, clock) as last:
            clock.advance_until(lambda: not last.is_running, "the end of the job", 1.0)
            assert last.result is True
        counted = fleet.counted()
        assert before.items() <= counted.items()
        assert len(counted) == 2 * fleet.blocks
        assert fleet.model().tobytes() == fleet.replayed_model(observer).tobytes()
    assert [verify(file.parent / "state").charges for file in files] == [1, 1]


def test_a_stopped_coordinator_ends_well_and_goes_on_with_the_same_job(
    tmp_path: Path, mosquitto: Broker
) -> None:
    fleet = WatchedFleet(tmp_path, mosquitto)
    with Observer(mosquitto, fleet.name) as observer:
        with coordinator_thread(fleet.file) as coordinator:
            wait_until(lambda: observer.plans, "the plan")
            assert coordinator.stop() is False
        plan = fleet.plans(observer)[1]
        assert plan.model.digest == content_digest(weights_to_bytes(DIGITS.initial_weights(0), "int8"))
        assert plan.sealing_key == fleet.opener.public_key
        with coordinator_thread(fleet.file, MovableClock(plan.deadline + 1e6)) as again:
            wait_until(lambda: fleet.plans(observer)[1].deadline > plan.deadline, "the plan again")
            again.stop()
        after = fleet.plans(observer)[1]
        assert (after.job, after.round, after.release) == (plan.job, 1, plan.release)
        assert after.deadline == plan.deadline + 1e6 + SLOW["deadline_s"]


def test_a_coordinator_that_is_older_than_its_fleet_says_so(
    tmp_path: Path, mosquitto: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """Boards take part in no round that they have passed: it waited for ever, and the log said that they may
    be offline."""
    fleet = WatchedFleet(tmp_path, mosquitto, rounds=3)
    clock, backup = MovableClock(), tmp_path / "backup"

    def job() -> Finding:
        return next(found for found in examine(fleet.settings, asks_broker=False) if found.check == "job")

    with Observer(mosquitto, fleet.name) as observer:
        with coordinator_thread(fleet.file, clock) as coordinator:
            wait_until(lambda: 1 in fleet.plans(observer), "the plan")
            coordinator.stop()
        shutil.copytree(fleet.state, backup)
        database = open_database(fleet.state)
        store = Store(database, 1)
        store.close_round(1, store.model(), RoundResult(None, 0, 1.0, 1.0, 0.5), closed_at=clock.unix())
        database.close()
        with coordinator_thread(fleet.file, clock) as coordinator:
            wait_until(lambda: 2 in fleet.plans(observer), "the next round")
            coordinator.stop()
        assert "older copy" not in caplog.text
        assert job().verdict is not Verdict.PROBLEM
        shutil.rmtree(fleet.state)
        shutil.copytree(backup, fleet.state)
        with coordinator_thread(fleet.file, clock) as coordinator:
            wait_until(lambda: "this coordinator is at round 1" in caplog.text, "a word on the copy")
            clock.advance_until(lambda: "round 1 has no end" in caplog.text, "another one", 60.0)
            coordinator.stop()
    found = job()
    assert found.verdict is Verdict.PROBLEM
    assert "was given round 2" in found.text


def test_a_broker_that_restarts_in_the_middle_does_not_end_a_job(tmp_path: Path, new_broker: Any) -> None:
    broker = new_broker("mosquitto").start()
    fleet = WatchedFleet(tmp_path, broker, rounds=1, fragments_per_update=20)
    files = [fleet.agent(0), fleet.agent(1)]
    clock = MovableClock()
    with (
        agent_thread(files[0], clock),
        agent_thread(files[1], clock),
        coordinator_thread(fleet.file, clock) as coordinator,
    ):
        clock.advance_until(fleet.counted, "some counted fragments", 1.0)
        broker.kill()
        assert len(fleet.counted()) < 2 * fleet.blocks, "the kill came too late to show anything"
        (broker.directory / "mosquitto.db").unlink(missing_ok=True)  # it forgot everything, as amqtt does
        broker.start()
        # Sessions come back in real time.
        clock.advance_until(lambda: not coordinator.is_running, "the end of the job", 1.0)
        assert coordinator.result is True
    assert len(fleet.counted()) == 2 * fleet.blocks
    assert [verify(file.parent / "state").charges for file in files] == [1, 1]


def close_all_rounds(fleet: WatchedFleet) -> None:
    weights = DIGITS.initial_weights(0)
    model = ModelState(weights, np.zeros((1, len(weights))), 1.0, ())
    store = begin_job(fleet.settings, model)
    store.start_round(1, 10.0, 70.0)
    store.close_round(1, model, RoundResult(None, 0, 1.0, 1.0, 4.0), closed_at=60.0)
    store.database.close()


def test_a_job_whose_last_round_closed_before_a_crash_is_ended_after_it(
    tmp_path: Path, mosquitto: Broker
) -> None:
    fleet = WatchedFleet(tmp_path, mosquitto, rounds=1)
    close_all_rounds(fleet)
    with Observer(mosquitto, fleet.name) as observer, coordinator_thread(fleet.file) as coordinator:
        assert coordinator.wait() is True
        wait_until(lambda: observer.plans, "the farewell")
        assert fleet.is_farewell(observer.plans[-1])
    assert (fleet.settings.directory_of(FIRST_JOB) / "model.onnx").exists()
    # A job that is over is not begun again, and nobody is told twice.
    with Observer(mosquitto, fleet.name) as observer, coordinator_thread(fleet.file) as again:
        assert again.wait() is True
        wait_until(lambda: observer.plans, "the farewell that the broker retains")
        assert len(observer.plans) == 1


def test_an_acknowledgement_of_the_end_counts_whenever_it_comes(
    tmp_path: Path, new_broker: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker answers while the coordinator waits for events of any kind, not for that one."""
    monkeypatch.setattr(announcer, "_FAREWELL_S", 0.05)
    monkeypatch.setattr(daemon, "_IDLE_S", 1.5)
    broker = new_broker("mosquitto").start()
    fleet = WatchedFleet(tmp_path, broker, rounds=1)
    with Observer(broker, fleet.name) as observer, coordinator_thread(fleet.file) as coordinator:
        wait_until(lambda: observer.plans, "the plan")
        with stopped(broker.child):
            command = open_beside(fleet.state)
            Queue(command).cancel(FIRST_JOB, 0.0, sends_model=False)
            command.close()
            wait_until(lambda: "did not accept the announcement" in caplog.text, "a farewell in vain")
        assert coordinator.wait() is True


def test_a_fleet_that_could_not_be_told_of_the_end_is_told_after_a_restart(
    tmp_path: Path, new_broker: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(announcer, "_FAREWELL_S", 0.1)
    broker = new_broker("mosquitto")  # not started
    fleet = WatchedFleet(tmp_path, broker, rounds=1)
    close_all_rounds(fleet)
    with coordinator_thread(fleet.file) as coordinator:
        wait_until(lambda: caplog.text.count("did not accept the announcement") > 1, "two failed farewells")
        assert coordinator.is_running
        assert coordinator.stop() is False
    monkeypatch.undo()
    broker.start()
    with Observer(broker, fleet.name) as observer, coordinator_thread(fleet.file) as coordinator:
        assert coordinator.wait() is True
        wait_until(lambda: observer.plans, "the farewell")
