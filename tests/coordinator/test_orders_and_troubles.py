"""Orders for a job whose coordinator, broker or files are not as they were."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from brokers import BrokerFactory, wait_until
from clocks import MovableClock
from commands import dpagent
from daemons import Running, running_job
from fleets import digits, write_job, write_shared
from observers import Observer
from watched_fleets import WatchedFleet

from coordinator.daemon import Coordinator
from coordinator.database.opening import open_beside
from coordinator.database.settings import StorePlace
from coordinator.queue import Queue, find
from coordinator.queued_job import QueuedJob
from coordinator.settings import load_coordinator_settings
from dpagent.errors import ConfigurationError, ExitCode
from dpagent.learning.data.formats.npz import save_npz
from dpagent.protocol.messages import Plan


@contextlib.contextmanager
def ordering(place: StorePlace) -> Iterator[Queue]:
    """The queue as a command has it, beside the coordinator."""
    with contextlib.closing(open_beside(place)) as database:
        yield Queue(database)


def known(place: StorePlace, name: str) -> QueuedJob:
    with ordering(place) as queue:
        return find(queue.jobs(), name)


def step(coordinator: Coordinator) -> None:
    """One step of the daemon's loop, without a broker."""
    coordinator._look_at_queue()
    if coordinator.running is not None:
        with coordinator._failing_alone(coordinator.running):
            coordinator.running.advance()


@pytest.mark.parametrize("gives_up", [False, True])
def test_a_job_that_was_paused_in_a_round_and_lost_its_test_data_ends_no_coordinator(
    tmp_path: Path, gives_up: bool
) -> None:
    """Its open round would close, or be given up, so it is taken up again, and cannot be."""
    settings = load_coordinator_settings(write_shared(tmp_path, None))
    test_data = tmp_path / "test.npz"
    save_npz(test_data, digits(0, 20))
    job = write_job(tmp_path / "lost.yaml", test_data={"path": str(test_data)})
    assert dpagent("coordinator", "job", "add", job, "--config", tmp_path / "fleet.yaml").returncode == 0
    place, clock = settings.store_place, MovableClock()
    with contextlib.closing(Coordinator(settings, clock=clock)) as coordinator:
        step(coordinator)
        with ordering(place) as queue:
            if gives_up:
                queue.give_up("lost", settings)
            else:
                queue.pause("lost")
    kept = test_data.read_bytes()
    test_data.unlink()
    with contextlib.closing(Coordinator(settings, clock=clock)) as coordinator:
        assert coordinator.running is None
        assert "test.npz" in (known(place, "lost").trouble_now or "")
        # It is tried once for an order, and not again and again.
        if not gives_up:
            with ordering(place) as queue:
                queue.give_up("lost", settings)
        step(coordinator)
        step(coordinator)
        assert coordinator.running is None
        test_data.write_bytes(kept)
        with ordering(place) as queue:
            queue.resume("lost")
        step(coordinator)
        assert running_job(coordinator).queued.is_giving_up, "the order holds"


def test_a_minimum_that_the_fleet_has_no_boards_for_any_more_can_be_changed(tmp_path: Path) -> None:
    """Boards were removed, and `devices` with them."""
    file = write_shared(tmp_path, None, devices=3)
    job = write_job(tmp_path / "meters.yaml", round={"deadline_s": 60.0})

    def order(*words: str | Path) -> tuple[int, str]:
        said = dpagent("coordinator", "job", *words, "--config", file)
        return said.returncode, said.stderr

    assert order("add", job) == (0, "")
    assert order("minimum", "meters", "3") == (0, "")
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"devices": 2}))
    settings = load_coordinator_settings(file)
    with pytest.raises(ConfigurationError, match="a round is to need 3 boards; expected at most devices = 2"):
        known(settings.store_place, "meters").settings_in(settings)
    code, said = order("minimum", "meters", "3")
    assert (code, "expected at most devices = 2" in said) == (ExitCode.CONFIGURATION, True), said
    assert order("minimum", "meters", "2") == (0, "")
    assert known(settings.store_place, "meters").settings_in(settings).round.minimum_devices == 2


@pytest.mark.parametrize("forgets", [False, True])
def test_a_round_is_given_up_when_the_broker_has_taken_that_its_time_is_over(
    tmp_path: Path, new_broker: BrokerFactory, forgets: bool
) -> None:
    """A broker that hangs takes what is sent to it from the kernel's point of view alone: boards read the
    plan of before, and would begin the round, and be charged."""
    broker = new_broker()
    fleet = WatchedFleet(tmp_path, broker)
    broker.start()
    clock, made = MovableClock(), list[Coordinator]()

    def coordinator(clock: MovableClock) -> Coordinator:
        made.append(Coordinator(fleet.settings, clock=clock))
        return made[0]

    def kept() -> tuple[Plan, bool]:
        """What a board reads that connects now: the plan, and whether there is a model for it."""
        with Observer(broker, fleet.name) as observer:
            # It comes after all that the broker keeps.
            observer.publish(f"dpagent/v1/{fleet.name}/mark", b"")
            wait_until(lambda: any(each.topic.endswith("/mark") for each in observer.seen), "the mark")
            has_model = any("/model/" in message.topic for message in observer.seen)
            return fleet.verifier.open(observer.plans[-1], Plan, "plan"), has_model

    with Running(coordinator, clock):
        wait_until(lambda: made and made[0].running and made[0].running.cycle.is_open, "the round")
        wait_until(lambda: fleet.rounds()[0].announced_at, "the plan")
        broker.wait_until_stored()
        plan, has_model = kept()
        assert (plan.deadline > clock.unix(), has_model) == (True, True)
        os.kill(broker.pid, signal.SIGSTOP)
        sent = made[0]._session.bytes_up
        clock.set_by(-3_600.0)
        with ordering(fleet.state) as queue:
            queue.give_up("first", fleet.settings)
        wait_until(lambda: made[0]._session.bytes_up > sent, "the plan that says so")
        broker.kill()
        if forgets:
            (broker.directory / "mosquitto.db").unlink()
        broker.start()
        wait_until(lambda: fleet.rounds()[0].given_up_at is not None, "the end of the round")
        plan, has_model = kept()
        assert plan.deadline <= clock.unix()
        assert has_model is not forgets, "the round was not announced anew"
    assert known(fleet.state, "first").is_paused
