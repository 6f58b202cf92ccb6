"""A coordinator that can have a board restart (its power, its memory) times its first connection afterwards.

Claim: whether a board starts, and when it connects, depends on no record: not on those that came since the
    last look, and not on how many there are.
Parameters: a picture of 20,000 scans that takes seconds to decode, others, and one more than declared, which
    come while the agent is down. A start that takes a tenth, a half or nine tenths of a period.

Before, an agent decoded what was new before it connected: 7 to 9 s with the slow picture, 1.4 to 2.1 s
without it. With one record more than declared it did not start at all.

    And one with 10,000 records took 4 ms longer than one with 10, more from a slow disk.

Power: no randomness. A start that looks at anything has a child whose processor time is counted.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from brokers import Broker
from clocks import MovableClock
from daemons import calm_settings
from devices import KEY
from fleets import write_agent
from hostile_files import slow_jpeg
from neighbours import children_s, look_again
from pictures import folder_of, write

from agent.daemon import Agent
from agent.data_settings import DataSettings
from agent.first_rows import open_records
from dpagent.learning.data.opening import declare
from dpagent.transport.session import MqttSession

COUNT = 12


def test_a_restart_looks_at_no_record_and_an_ordinary_look_finds_what_is_new(tmp_path: Path) -> None:
    root, state = tmp_path / "photos", tmp_path / "state"
    state.mkdir()
    folder_of(root, *(f"{number % 3}/{number}.png" for number in range(COUNT)), width=8, height=8)
    given = DataSettings.checked({"name": "mine", "path": root, "max_records": COUNT})
    settings = DataSettings.checked(declare(given)[0].as_dict(only_given=True))
    first = open_records(settings, state)
    used_before = first.attempt(lambda dataset: dataset.digests().tobytes())
    write(root / "0" / "slow.jpg", slow_jpeg())
    folder_of(root, *(f"0/more{number}.png" for number in range(3)), width=8, height=8)
    (root / "1" / "1.png").unlink()

    used_s = children_s()
    again = open_records(settings, state)
    assert children_s() == used_s
    assert again.attempt(lambda dataset: dataset.digests().tobytes()) == used_before
    look_again(again)
    assert len(again.dataset) == COUNT - 1, "the picture that is gone"
    look_again(again)
    assert len(again.dataset) == COUNT, "its row goes to one of those that wait"


class Moments(threading.Event):
    """A stop that never comes, while whose waiting time passes."""

    def __init__(self, clock: MovableClock) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self._clock.advance(timeout)
        return False


@pytest.mark.parametrize("period_s", [2.0, 5.0, 3_600.0])
def test_the_first_connection_does_not_tell_how_long_the_start_took(
    tmp_path: Path, mosquitto: Broker, monkeypatch: pytest.MonkeyPatch, period_s: float
) -> None:
    connected_at = []
    for number, share in enumerate((0.1, 0.5, 0.9)):
        clock = MovableClock(unix=0.0)
        stop = Moments(clock)
        limits = {"minimum_compute_slot_s": period_s}
        file = write_agent(tmp_path / str(number), mosquitto, KEY, limits=limits)
        agent = Agent(calm_settings(file), clock=clock)
        clock.advance(share * min(period_s, 5.0))

        def enter(session: MqttSession, clock: MovableClock = clock, stop: Moments = stop) -> MqttSession:
            connected_at.append(clock.unix())
            stop.set()
            return session

        monkeypatch.setattr(MqttSession, "__enter__", enter)
        agent.run(stop)
    assert connected_at == pytest.approx([min(period_s, 5.0)] * 3)
