"""Issuing that is killed in the midst: a board has its tokens once, or is charged for what it may have."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from brokers import wait_until
from crash.fleet_under_fire import COORDINATOR, DEVICES, Fault, Launcher, launcher
from token_fleets import TokenFleet

from agent.audit import audit
from agent.charges import Charge
from dpagent.faults import FaultPoint
from dpagent.protocol.issuing import Verdict

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(900)]

ROUNDS = 2
TIMES = {"compute_slot_s": 0.5, "jitter_window_s": 0.5, "device_grid_s": 0.001, "deadline_s": 600.0}
STUCK_S = 300.0


@pytest.fixture(scope="module")
def programs() -> Iterator[Launcher]:
    with launcher() as made:
        yield made


def waiting() -> dict[str, list[Fault]]:
    """Where each program is killed, start by start: at every point, and at some after another request."""
    return {
        COORDINATOR: [
            Fault(FaultPoint.TOKENS_WRITTEN),
            Fault(FaultPoint.TOKENS_GRANTED),
            Fault(FaultPoint.TOKENS_WRITTEN, times=2),
            Fault(FaultPoint.TOKENS_GRANTED, times=2),
        ],
        DEVICES[0]: [Fault(FaultPoint.TOKENS_ASKED), Fault(FaultPoint.TOKENS_TAKEN)],
        DEVICES[1]: [Fault(FaultPoint.TOKENS_TAKEN), Fault(FaultPoint.TOKENS_TAKEN, times=2)],
    }


def test_a_board_has_its_tokens_once_whatever_is_killed_while_they_are_issued(
    tmp_path: Path, programs: Launcher, new_broker: Any
) -> None:
    broker = new_broker()
    fleet = TokenFleet(tmp_path, broker, rounds=ROUNDS, round=TIMES)
    broker.start()
    files = {name: fleet.agent(number) for number, name in enumerate(DEVICES)} | {COORDINATOR: fleet.file}
    faults, kills = waiting(), list[tuple[str, FaultPoint | None]]()
    armed: dict[str, Fault | None] = {}

    def start(name: str) -> None:
        armed[name] = faults[name].pop(0) if faults[name] else None
        words = ["coordinator", "run"] if name == COORDINATOR else ["run"]
        log = tmp_path / f"{name}.log"
        programs.start(name, [*words, "--config", str(files[name])], log, armed[name])

    try:
        for name in files:
            start(name)
        until, is_over = time.monotonic() + STUCK_S, False
        while not is_over:
            assert time.monotonic() < until, (tmp_path / f"{COORDINATOR}.log").read_text()[-3_000:]
            for name, code in programs.ended():
                if (name, code) == (COORDINATOR, 0):
                    is_over = True
                    continue
                assert code == -signal.SIGKILL, f"{name} ended with {code}"
                fault = armed[name]
                kills.append((name, None if fault is None else fault.point))
                start(name)
            time.sleep(0.01)
        for name in DEVICES:
            programs.send(name, signal.SIGTERM)
        wait_until(lambda: not any(map(programs.runs, DEVICES)), "the end of the devices")
    finally:
        for name in [*programs.pids]:
            programs.send(name, signal.SIGKILL)
        wait_until(lambda: not programs.pids, "the end of all")
        programs.ended()
    assert {point for _, point in kills} == {*(point for point in FaultPoint if point.startswith("tokens"))}
    assert len(kills) >= 6, "what has come by then does not come to every second time"
    require_kept(fleet, tmp_path)


def require_kept(fleet: TokenFleet, directory: Path) -> None:
    """What holds at the end."""
    granted = [(entry.device, entry.round) for entry in fleet.entries() if entry.verdict is Verdict.GRANTED]
    assert len(granted) == len(set(granted)), "one entry a board and round"
    for number in range(len(DEVICES)):
        device = fleet.member(number).device_id
        ledger = audit(directory / f"device-{number}" / "state")
        charged = [entry.record.round for entry in ledger.entries if isinstance(entry.record, Charge)]
        assert charged == [*range(1, ROUNDS + 1)], "no round twice, and none for nothing"
        assert {(device, each) for each in charged} <= set(granted), "charged for what it may have"
    assert [record.fragments for record in fleet.rounds()] == [len(DEVICES) * fleet.blocks] * ROUNDS
    rejected = {name: count for name, count in fleet.counters().items() if name.startswith("rejected")}
    assert not {name for name in rejected if "token" in name or "spent" in name}, rejected
