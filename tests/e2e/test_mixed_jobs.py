"""A job whose fragments pass through a mixer, over Mosquitto; a mixer that ends with what it holds."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from brokers import Broker
from clocks import MovableClock
from daemons import agent_thread, attentive_daemons, coordinator_thread, mixer_thread
from fleets import write_agent, write_fleet
from mixers import key_of, write_mixer
from observers import Observer

from agent.audit import audit, verify
from agent.heads import second_head_beside
from coordinator.keys import load_signer
from coordinator.reader import StoreReader
from coordinator.settings import load_fleet_settings
from dpagent.protocol.mixing import key_text

ROUNDS, FRAGMENTS = 2, 5


class Fleet:
    """One device, its coordinator and a mixer's key."""

    def __init__(self, directory: Path, broker: Broker, **limits: Any) -> None:
        self.name, self.directory, self.broker = directory.name, directory, broker
        self.key = load_signer(directory / "coordinator" / "keys", self.name).public_key
        self.mixer = self.mixer_file(batch=2 * FRAGMENTS, least=2, longest_s=0.1)
        self.coordinator = write_fleet(
            directory / "coordinator", broker, fleet=self.name, rounds=ROUNDS, devices=1,
            fragments_per_update=FRAGMENTS, mixer_key=key_of(self.mixer), round={"deadline_s": 86_400.0},
        )  # fmt: skip
        self.settings = load_fleet_settings(self.coordinator)
        listed = {"mixer_keys": [key_of(self.mixer)], "require_mixer": True}
        self.agent = write_agent(
            directory / "device", broker, self.key, fleet=self.name, limits=listed | limits
        )

    def mixer_file(self, **settings: Any) -> Path:
        return write_mixer(self.directory / "mixer", self.broker, self.name, self.key, **settings)


def test_a_job_goes_through_a_mixer_that_ends_with_what_it_holds(tmp_path: Path, mosquitto: Broker) -> None:
    fleet, clock = Fleet(tmp_path, mosquitto), MovableClock()
    holding = fleet.mixer_file(batch=1_000, least=1_000)
    with (
        attentive_daemons(),
        Observer(mosquitto, fleet.name) as observer,
        coordinator_thread(fleet.coordinator, clock) as coordinator,
    ):

        def at_the_mixer() -> int:
            return sum(message.topic == observer.topics.mixer for message in observer.seen)

        with mixer_thread(holding), agent_thread(fleet.agent, clock) as agent:
            clock.advance_until(lambda: at_the_mixer() >= 3 * FRAGMENTS, "resends into a mixer that holds")
            assert observer.fragments == []
            agent.stop()
        mixing = fleet.mixer_file(batch=2 * FRAGMENTS, least=2, longest_s=0.1)
        with mixer_thread(mixing), agent_thread(fleet.agent, clock) as agent:
            clock.advance_until(lambda: not coordinator.is_running, "the end of the job")
            assert coordinator.result is True
            agent.stop()
        entered = {
            bytes(message.payload) for message in observer.seen if message.topic == observer.topics.mixer
        }
        assert not entered & set(observer.fragments)
        assert len({len(data) for data in entered}) == len({len(data) for data in observer.fragments}) == 1
    state = tmp_path / "device" / "state"
    verify(state, second_head_beside(state))
    assert len(audit(state).charges) == ROUNDS
    reader = StoreReader(fleet.settings.state_dir)
    try:
        assert [each.fragments for each in reader.rounds()] == [FRAGMENTS] * ROUNDS
    finally:
        reader.close()


def test_a_device_that_trusts_another_mixer_declines(
    tmp_path: Path, mosquitto: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fleet, clock = Fleet(tmp_path, mosquitto, mixer_keys=[key_text(bytes(range(32)))]), MovableClock()
    with (
        attentive_daemons(),
        Observer(mosquitto, fleet.name) as observer,
        coordinator_thread(fleet.coordinator, clock),
        agent_thread(fleet.agent, clock),
    ):
        clock.advance_until(lambda: "limits.mixer_keys" in caplog.text, "the decline")
        assert not [each for each in observer.seen if each.topic == observer.topics.mixer]
    assert not audit(tmp_path / "device" / "state").charges
