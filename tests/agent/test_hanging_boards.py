"""A mount or a driver that hangs holds up no agent: neither a command of the owner's there, nor a sensor.

Who has a write lease on a file (fcntl(2)) keeps everybody waiting who opens it, the system too when it starts
a program, until the lease is given back. A pipe keeps everybody waiting who opens it, until somebody writes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from boards import BoardTree
from brokers import wait_until
from clocks import MovableClock
from devices import KEY
from fleets import agent_values

from agent.energy import EnergyMeter
from agent.governor import Governor
from agent.governor_settings import GovernorSettings
from agent.latest_model import LatestModel
from agent.sensors import Sensors
from agent.settings import AgentSettings
from dpagent.protocol.chunks import content_digest
from dpagent.protocol.messages import AssetTerms

_HOLDER = """
import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)  # Somebody wants the file.
file = os.open(sys.argv[1], os.O_WRONLY)
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
signal.pause()
"""


@contextmanager
def hanging(command: Path) -> Iterator[None]:
    """A program that cannot be started meanwhile, by whoever tries."""
    command.write_text("#!/bin/sh\necho it rains\nexit 1\n")
    command.chmod(0o755)
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, command], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    try:
        with holder.stdout:
            assert holder.stdout.readline() == "held\n"
            yield
            with pytest.raises(
                BlockingIOError
            ):  # The system takes a lease away in the end: nobody has waited so long.
                os.open(command, os.O_RDONLY | os.O_NONBLOCK)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()


def test_a_governors_command_that_hangs_says_no(tmp_path: Path) -> None:
    command, clock = tmp_path / "command", MovableClock()
    settings = GovernorSettings(command=(str(command),), command_period_s=1.0)
    governor = Governor(settings, tmp_path, Sensors(BoardTree(tmp_path / "board").root), clock)
    try:
        with hanging(command):
            assert governor.why_not(begins=True) == "command has not answered yet"
            clock.advance(11.0)
            assert governor.why_not(begins=True) == "command says no: it has not ended within 10 s"
        clock.advance(1.0)

        def answered() -> bool:
            clock.advance(1.0)
            return governor.why_not(begins=True) == "command says no: it rains"

        wait_until(answered, "its answer, when it goes on")
    finally:
        governor.stop()


def test_a_models_command_that_hangs_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    command, clock, data = tmp_path / "command", MovableClock(), b"model"
    (tmp_path / "state").mkdir()
    values = agent_values(None, KEY, state_dir=str(tmp_path / "state"), model={"command": [str(command)]})
    latest = LatestModel(AgentSettings.checked(values), clock)
    with hanging(command):
        latest.take(AssetTerms(role="model", digest=content_digest(data), size=len(data)), data)

        def started() -> bool:
            latest.tend()
            return latest._running is not None

        wait_until(started, "the command")
        clock.advance(95.0)
        latest.tend()
        latest.close()
    assert "took more than 60 s and was ended" in caplog.text


@contextmanager
def in_place_of(sensor: Path) -> Iterator[None]:
    """A sensor whose driver does not answer meanwhile."""
    value = sensor.read_bytes()
    sensor.unlink()
    os.mkfifo(sensor)
    try:
        yield
    finally:
        sensor.write_bytes(value)  # Whoever waits has it now.
        sensor.unlink()
        sensor.write_bytes(value)


def test_a_sensor_that_hangs_holds_training_back_until_it_answers(tmp_path: Path) -> None:
    board, clock = BoardTree(tmp_path), MovableClock()
    governor = Governor(GovernorSettings(highest_temperature_c=80.0), tmp_path, Sensors(tmp_path), clock)
    assert governor.why_not(begins=True) is None
    with in_place_of(tmp_path / "sys/class/thermal/thermal_zone1/temp"):
        for _ in range(3):
            clock.advance(1.0)
            assert governor.why_not(begins=False) == "the board's sensors do not answer"
    board.heat(45.0)

    def answers() -> bool:
        clock.advance(1.0)
        return governor.why_not(begins=False) is None

    wait_until(answers, "training that goes on")


def test_where_the_sensor_of_energy_hangs_a_round_has_none(tmp_path: Path) -> None:
    board, clock = BoardTree(tmp_path), MovableClock()
    board.write("sys/class/hwmon/hwmon0/name", "ina226")
    board.write("sys/class/hwmon/hwmon0/power1_input", 4_000_000)
    meter = EnergyMeter(tmp_path, clock)
    meter.begin()
    with in_place_of(tmp_path / "sys/class/hwmon/hwmon0/power1_input"):
        clock.advance(1.0)
        meter.sample()
        assert meter.end() is None
        meter.begin()
        assert meter.end() is None

    def measured() -> bool:
        meter.begin()
        clock.advance(2.0)
        energy = meter.end()
        return energy is not None and energy.joules == pytest.approx(8.0)

    wait_until(measured, "the next round's")
