"""Claim: when a board comes back that its broker has refused tells nothing of what it did with its records.

A broker refuses a connection, or a subscription, whenever it likes, and sees when the next one comes. The
service counts from when the last process of the agent has ended. One that decodes a picture of 81 Mpixels has
400 to 520 MiB, and was gone 1.0 to 1.1 s after the agent had ended it, on a busy PC with two cores; without a
look, nothing had to go.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from brokers import Broker
from clocks import MovableClock
from daemons import calm_settings
from devices import KEY
from fleets import write_agent

from agent.daemon import Agent
from agent.latest_model import LatestModel
from agent.looks import Looks
from agent.quiet_end import PERIOD_S, program_age_s
from dpagent.errors import BrokerError
from dpagent.transport.session import MqttSession


class Moments:
    """A stop that comes after so many waits, while whose waiting time passes."""

    def __init__(self, clock: MovableClock) -> None:
        self.clock, self.is_over = clock, False

    def is_set(self) -> bool:
        return self.is_over

    def wait(self, timeout: float) -> bool:
        self.clock.advance(timeout)
        return self.is_over


def refuse(session: MqttSession) -> MqttSession:
    raise BrokerError("not authorised")


def agent_of(folder: Path, broker: Broker, clock: MovableClock) -> Agent:
    return Agent(calm_settings(write_agent(folder, broker, KEY)), clock=clock)


def test_when_the_agent_ends_does_not_tell_how_long_a_look_takes_to_end(
    tmp_path: Path, mosquitto: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, it ended when that was done."""
    monkeypatch.setattr(MqttSession, "__enter__", refuse)
    lasted = []
    for number, takes_s in enumerate((0.0, 0.2, 1.0, 5.5, 7.3)):
        clock = MovableClock(unix=0.0)
        agent = agent_of(tmp_path / str(number), mosquitto, clock)
        with monkeypatch.context() as patch:
            patch.setattr(Looks, "end", lambda _, clock=clock, takes_s=takes_s: clock.advance(takes_s))
            with pytest.raises(BrokerError):
                agent.run(Moments(clock))  # type: ignore[arg-type]
        lasted.append(clock.unix())
    assert lasted == pytest.approx([PERIOD_S] * 3 + [2 * PERIOD_S] * 2)


@pytest.mark.parametrize("whose", [Looks, LatestModel])
def test_it_waits_until_what_it_has_started_is_gone(
    tmp_path: Path, mosquitto: Broker, monkeypatch: pytest.MonkeyPatch, whose: type
) -> None:
    """The program that decodes has ended, and the fork with the picture not."""
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    going = subprocess.Popen(command, process_group=0)
    clock = MovableClock(unix=0.0)
    agent = agent_of(tmp_path, mosquitto, clock)
    is_look = whose is Looks
    with monkeypatch.context() as patch:
        patch.setattr(MqttSession, "__enter__", refuse)
        attribute, value = ("process", going.pid) if is_look else ("processes", [going.pid])
        patch.setattr(whose, attribute, property(lambda _: value))
        stop = Moments(clock)
        wait = stop.wait

        def ends_in_the_second_period(timeout: float) -> bool:
            if clock.unix() >= PERIOD_S:
                os.killpg(going.pid, signal.SIGKILL)
                os.waitid(os.P_PID, going.pid, os.WEXITED | os.WNOWAIT)  # It has let go of its memory.
            return wait(timeout)

        patch.setattr(stop, "wait", ends_in_the_second_period)
        try:
            with pytest.raises(BrokerError):
                agent.run(stop)  # type: ignore[arg-type]
        finally:
            going.kill()
            going.wait()
    assert clock.unix() == pytest.approx(2 * PERIOD_S)


def test_an_owner_who_stops_it_does_not_wait(
    tmp_path: Path, mosquitto: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = MovableClock(unix=0.0)
    agent = agent_of(tmp_path, mosquitto, clock)
    stop = Moments(clock)
    stop.is_over = True
    monkeypatch.setattr(MqttSession, "__enter__", refuse)
    with pytest.raises(BrokerError):
        agent.run(stop)  # type: ignore[arg-type]
    assert clock.unix() == 0.0


def test_the_next_start_counts_from_when_the_program_began(
    tmp_path: Path, mosquitto: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, from when it was loaded, which takes longer where a look has had the system drop it."""
    connected_at = []
    for number, loading_s in enumerate((0.3, 2.0)):
        clock = MovableClock(unix=0.0)
        clock.advance(loading_s)
        limits = {"minimum_compute_slot_s": 5.0}
        settings = calm_settings(write_agent(tmp_path / str(number), mosquitto, KEY, limits=limits))
        agent = Agent(settings, clock=clock, age_s=loading_s)
        monkeypatch.setattr(MqttSession, "__enter__", refuse)
        monkeypatch.setattr(Looks, "end", lambda _, clock=clock: connected_at.append(clock.unix()))
        with pytest.raises(BrokerError):
            agent.run(Moments(clock))  # type: ignore[arg-type]
    assert connected_at == pytest.approx([5.0, 5.0])


def test_a_program_knows_for_how_long_it_has_run() -> None:
    code = "import time; time.sleep(0.5); from agent.quiet_end import program_age_s; print(program_age_s())"
    began = time.monotonic()
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert 0.5 <= float(said.stdout) <= time.monotonic() - began + 0.05
    assert program_age_s() > 0.0
