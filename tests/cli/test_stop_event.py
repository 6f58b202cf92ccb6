"""What ends a daemon by a signal wakes who waits for it, at whatever moment the signal comes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from brokers import PATIENCE_S

from cli.stop_event import StopEvent

UNDER_FIRE = """
import signal
from {module} import {name}
event, came = {name}(), 0
def take(*_):
    global came
    came += 1
    event.set()
signal.signal(signal.SIGALRM, take)
signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
while came < 500:
    event.wait(1e-4)
signal.setitimer(signal.ITIMER_REAL, 0)
print(event.is_set())
"""


def test_a_signal_at_any_moment_of_a_wait_sets_it() -> None:
    """Five hundred of them. Before, `status --watch` and any daemon could stand still for good."""
    program = UNDER_FIRE.format(module=StopEvent.__module__, name=StopEvent.__name__)
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert ended.stdout == "True\n"


def test_it_wakes_all_who_wait_and_stays_set() -> None:
    event, woken = StopEvent(), []
    threads = [threading.Thread(target=lambda: woken.append(event.wait(PATIENCE_S))) for _ in range(3)]
    for thread in threads:
        thread.start()
    event.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert woken == [True] * 3
    for _ in range(100_000):  # More than a pipe holds.
        event.set()
    assert event.wait()
    assert event.is_set()


@pytest.mark.parametrize("timeout", [0, 0.05, -1.0])
def test_a_wait_ends_with_its_time(timeout: float) -> None:
    began = time.monotonic()
    assert not StopEvent().wait(timeout)
    assert time.monotonic() - began >= timeout
