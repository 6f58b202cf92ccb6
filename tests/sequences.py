"""Jobs of one device, one after another, over a real broker and on a clock that the test moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from brokers import Broker
from clocks import MovableClock
from daemons import agent_thread, attentive_daemons, coordinator_thread
from fleets import write_agent, write_fleet

from coordinator.keys import load_signer
from coordinator.settings import load_fleet_settings

ROUNDS = 2


def fleet(directory: Path, broker: Broker, name: str, **changes: Any) -> Path:
    """The ``fleet.yaml`` of a job; those beside each other share the coordinator's keys."""
    return write_fleet(directory, broker, fleet=name, rounds=ROUNDS, devices=1, keys_dir="../keys", **changes)


def run(coordinator_file: Path, agent_file: Path, clock: MovableClock) -> None:
    """Run a job to its end."""
    with (
        attentive_daemons(),
        coordinator_thread(coordinator_file, clock) as coordinator,
        agent_thread(agent_file, clock) as agent,
    ):
        clock.advance_until(lambda: not coordinator.is_running, "the end of the job")
        assert coordinator.result is True
        agent.stop()


def agent_of(directory: Path, broker: Broker, coordinator_file: Path, **changes: Any) -> Path:
    """The ``agent.yaml`` of the device of such jobs."""
    settings = load_fleet_settings(coordinator_file)
    key = load_signer(settings.keys_dir, settings.fleet).public_key
    return write_agent(directory, broker, key, fleet=settings.fleet, **changes)
