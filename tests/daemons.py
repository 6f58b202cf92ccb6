"""Agents and coordinators in threads of the tests' process, on clocks that the tests move.

They are the daemons themselves, with real brokers and databases; only the process around them, its exit
code and its signals are missing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol

import pytest
from brokers import PATIENCE_S
from clocks import CreepingClock, MovableClock
from priced_here import answer_here

import agent.daemon
import coordinator.daemon
from agent.daemon import Agent
from agent.settings import AgentSettings, load_agent_settings
from coordinator.daemon import Coordinator
from coordinator.running_job import RunningJob
from coordinator.settings import load_coordinator_settings
from mixer.daemon import Mixer
from mixer.settings import load_mixer_settings

_CALM = "extends: generic-x86-64\nboard: {memory_mib: 64}\nmicrobatch: 8\nniceness: 0\n"
"""A board's profile: the tests' process must not be made nicer."""


answer_here()


class Daemon(Protocol):
    def run(self, stop: threading.Event) -> bool | None: ...


class Running:
    """A daemon in a thread of its own, stopped with the block it is used in.

    Attributes:
        clock: the daemon's.
        result: of its ``run``, once that has ended.
        error: that it ended with. One that nobody looked at fails the test.
    """

    def __init__(self, make: Callable[[MovableClock], Daemon], clock: MovableClock | None) -> None:
        self.clock = clock or MovableClock()
        self.result: bool | None = None
        self.error: BaseException | None = None
        self._stop = threading.Event()
        # SQLite's connections stay in the thread that made them.
        self._thread = threading.Thread(target=self._run, args=(make,))

    def _run(self, make: Callable[[MovableClock], Daemon]) -> None:
        try:
            self.result = make(self.clock).run(self._stop)
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            self.error = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> bool | None:
        """The result of a daemon that ends by itself."""
        self._thread.join(PATIENCE_S)
        assert not self.is_running, "the daemon is still running"
        self._raise()
        return self.result

    def failure(self) -> BaseException:
        """The error of a daemon that ends with one."""
        self._thread.join(PATIENCE_S)
        error, self.error = self.error, None
        assert error is not None, "the daemon ended without an error, or not at all"
        return error

    def stop(self) -> bool | None:
        self._stop.set()
        return self.wait()

    def _raise(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error

    def __enter__(self) -> Running:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        if value is None:
            self._raise()


def calm_settings(file: Path) -> AgentSettings:
    """The settings in an ``agent.yaml``, for an agent in this process."""
    profile = file.with_name("calm.yaml")
    profile.write_text(_CALM)
    return load_agent_settings(file).with_values({"profile": str(profile)})


def agent_thread(file: Path, clock: MovableClock | None = None) -> Running:
    """An agent, by its ``agent.yaml``."""
    settings = calm_settings(file)
    return Running(lambda clock: Agent(settings, clock=CreepingClock(clock)), clock)


def coordinator_thread(file: Path, clock: MovableClock | None = None, *, stays: bool = False) -> Running:
    """A coordinator, by its ``fleet.yaml``."""
    settings = load_coordinator_settings(file)
    return Running(lambda clock: Coordinator(settings, stays=stays, clock=clock), clock)


def running_job(coordinator: Coordinator) -> RunningJob:
    """The job that a coordinator has taken up."""
    assert coordinator.running is not None
    return coordinator.running


def mixer_thread(file: Path) -> Running:
    """A mixer, by its ``mixer.yaml``, on the system's clock: it waits for messages of a real broker."""
    settings = load_mixer_settings(file)
    return Running(lambda _clock: Mixer(settings), None)


@contextmanager
def attentive_daemons() -> Iterator[None]:
    """Daemons that look at their clock all the time: they wait for events in real time, and theirs is not."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (agent.daemon, coordinator.daemon):
            patch.setattr(module, "_IDLE_S", 0.01)
        yield
