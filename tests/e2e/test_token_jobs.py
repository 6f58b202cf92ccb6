"""Jobs whose fragments carry one-time tokens: enrolled boards, a coordinator and a real broker over TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from brokers import wait_until
from clocks import MovableClock
from daemons import agent_thread, attentive_daemons, coordinator_thread
from lone_agents import rows
from observers import Observer
from token_fleets import TokenFleet
from watched_fleets import charges

from coordinator.database.schema import Part
from dpagent.protocol.issuing import Verdict

TIMES = {"compute_slot_s": 0.5, "jitter_window_s": 0.5, "deadline_s": 600.0}
ROUNDS = 2


def granted(fleet: TokenFleet) -> set[tuple[str, int]]:
    """Devices and rounds that have tokens."""
    if not (fleet.members_dir / Part.REGISTRY).exists():
        return set()
    return {(entry.device, entry.round) for entry in fleet.entries() if entry.verdict is Verdict.GRANTED}


@pytest.mark.parametrize("linkability", ["fragment", "round"])
def test_a_job_runs_with_tokens(tmp_path: Path, new_broker: Any, linkability: str) -> None:
    broker = new_broker()
    fleet = TokenFleet(tmp_path, broker, rounds=ROUNDS, round=TIMES, linkability=linkability)
    broker.start()
    limits = {"linkability": [linkability]}
    files = [fleet.agent(number, limits=limits) for number in range(2)]
    clock = MovableClock()
    with (
        attentive_daemons(),
        Observer(broker, fleet.name) as observer,
        agent_thread(files[0], clock),
        agent_thread(files[1], clock),
        coordinator_thread(fleet.file, clock) as coordinator,
    ):
        clock.advance_until(lambda: len(granted(fleet)) == 2 * ROUNDS, "tokens", 0.05)
        clock.advance_until(lambda: charges(*files) == 2, "the charges", 0.25)
        for number in range(1, ROUNDS + 1):
            wanted = 2 * number * fleet.blocks
            clock.advance_until(lambda: len(fleet.counted()) == wanted, f"round {number}", 0.05)  # noqa: B023
        clock.advance_until(lambda: not coordinator.is_running, "the end of the job", 0.05)
        assert coordinator.result is True
        wait_until(lambda: fleet.is_farewell(observer.plans[-1]), "the farewell")
    assert [record.fragments for record in fleet.rounds()] == [2 * fleet.blocks] * ROUNDS
    assert fleet.counters().keys() == {"probes"}, "nothing was rejected"
    assert fleet.counters()["probes"] >= 2 * ROUNDS
    devices = {fleet.member(number).device_id for number in range(2)}
    assert granted(fleet) == {(device, number) for device in devices for number in range(1, ROUNDS + 1)}
    for end in ("/ask", "/answer", "/fragments"):
        assert len({len(payload) for payload in fleet.of_topic(observer, end)}) == 1, end
    # Each receipt went to one board, before the plan that ends its round.
    assert observer.receipts == []
    own = [message for message in observer.seen if "/receipts/" in message.topic]
    assert len({message.topic for message in own}) >= 2 * ROUNDS * (fleet.blocks + 1)
    assert {len(message.payload) for message in own} == {16}
    for file in files:
        assert rows(file, "SELECT state, count(*) FROM fragments GROUP BY state") == [
            ("counted", ROUNDS * fleet.blocks)
        ]
