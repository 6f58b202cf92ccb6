"""Jobs whose fragments carry one-time tokens: enrolled boards, a coordinator and a real broker over TLS."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from brokers import wait_until
from clocks import MovableClock
from commands import dpagent
from daemons import agent_thread, attentive_daemons, coordinator_thread
from lone_agents import rows
from observers import Observer
from token_fleets import TokenFleet
from watched_fleets import charges

from agent.audit import verify
from coordinator.database.schema import Part
from coordinator.queued_job import JobState
from coordinator.registry import RegistryReader
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
    with contextlib.closing(RegistryReader(fleet.members_dir)) as reader:
        prices = [columns[0]["epsilon"] for _, _, columns in reader.prices()]
    for file in files:
        assert rows(file, "SELECT state, count(*) FROM fragments GROUP BY state") == [
            ("counted", ROUNDS * fleet.blocks)
        ]
        # Each round is granted at what a board's own ledger reserves, whenever the job ends.
        ((reserved,),) = rows(
            file, "SELECT DISTINCT body ->> 'job_epsilon' FROM entries WHERE kind = 'charge'"
        )
        assert prices == pytest.approx([reserved] * ROUNDS)


def declined(fleet: TokenFleet, number: int) -> set[int]:
    """Rounds that a board has declined, as far as the coordinator knows."""
    if not (fleet.members_dir / Part.REGISTRY).exists():
        return set()
    device = fleet.member(number).device_id
    return {entry.round for entry in fleet.entries() if entry.device == device and not entry.is_granted}


def test_a_round_that_too_few_may_join_is_given_up_and_the_job_goes_on_when_that_is_mended(
    tmp_path: Path, new_broker: Any
) -> None:
    """Two boards, of which a round needs both, and one whose owner allows no such jitter. Rounds 1 and 2 are
    decided together, so round 3 is the next that can close."""
    broker = new_broker()
    fleet = TokenFleet(
        tmp_path, broker, rounds=4, tokens={"rounds_ahead": 1}, round=TIMES | {"minimum_devices": 2}
    )
    broker.start()
    willing, unwilling = fleet.agent(0), fleet.agent(1, limits={"minimum_jitter_window_s": 100.0})
    clock = MovableClock()

    def queued() -> Any:
        with contextlib.closing(fleet.reader()) as reader:
            return reader.queued()

    def boards(*files: Path) -> Any:
        held = contextlib.ExitStack()
        for file in files:
            held.enter_context(agent_thread(file, clock))
        return held

    with attentive_daemons(), coordinator_thread(fleet.file, clock) as coordinator:
        with boards(willing, unwilling):
            clock.advance_until(lambda: declined(fleet, 1) == {1, 2}, "the refusals", 0.05)
            clock.advance_until(lambda: len(fleet.counted()) == fleet.blocks, "the willing board", 0.25)
            clock.advance_until(lambda: queued().is_paused, "the deadline", 50.0)
            assert (charges(willing), charges(unwilling)) == (1, 0)
            trouble = queued().trouble_now
            assert "Round 1 cannot close: 1 member may still send for it, and it needs 2." in trouble
            assert "the same holds for the next 1 round" in trouble
            assert "job resume first` opens round 3" in trouble
            states = [
                (each.number, each.given_up_at is not None, each.least_counted) for each in fleet.rounds()
            ]
            assert states == [(1, True, 1), (2, True, None)]
        assert coordinator.is_running, "it waits for its operator"
        mended = fleet.agent(1, limits={"minimum_jitter_window_s": 0.5})
        assert dpagent("coordinator", "job", "resume", "first", "--config", fleet.file).returncode == 0
        with boards(willing, mended):
            clock.advance_until(lambda: not coordinator.is_running, "the end of the job", 0.25)
        assert coordinator.result is True
    assert queued().state is JobState.FINISHED
    assert [(each.number, each.closed_at is not None, each.fragments) for each in fleet.rounds()] == [
        (1, False, fleet.blocks), (2, False, 0), (3, True, 2 * fleet.blocks), (4, True, 2 * fleet.blocks),
    ]  # fmt: skip
    assert [verify(file.parent / "state").charges for file in (willing, mended)] == [3, 2]
    files = sorted((fleet.state / "jobs" / "first" / "models").glob("*.onnx"))
    assert [file.name for file in files] == ["round-0003.onnx", "round-0004.onnx"]


def test_a_job_goes_on_without_a_board_that_fell_silent(tmp_path: Path, new_broker: Any) -> None:
    """Rounds need three boards, and one has gone. Its operator lets the first close with two, gives the
    second up, and the third has all that are there."""
    broker = new_broker()
    fleet = TokenFleet(
        tmp_path,
        broker,
        devices=3,
        rounds=3,
        tokens={"rounds_ahead": 1},
        round=TIMES | {"minimum_devices": 3},
    )
    broker.start()
    files = [fleet.agent(number) for number in range(2)]
    fleet.member(2)
    clock = MovableClock()

    def job(*words: str) -> str:
        said = dpagent("coordinator", "job", *words, "--config", fleet.file)
        assert said.returncode == 0, said.stderr
        return said.stdout

    def states() -> list[tuple[int, str, int]]:
        return [
            (
                each.number,
                "closed" if each.closed_at else "given up" if each.given_up_at else "open",
                each.fragments,
            )
            for each in fleet.rounds()
        ]

    both = 2 * fleet.blocks
    with (
        attentive_daemons(),
        agent_thread(files[0], clock),
        agent_thread(files[1], clock),
        coordinator_thread(fleet.file, clock) as coordinator,
    ):
        clock.advance_until(lambda: len(fleet.counted()) == both, "two boards", 0.25)
        clock.advance(TIMES["deadline_s"])
        clock.advance_until(lambda: fleet.rounds()[0].deadline > clock.unix() + 1.0, "another deadline", 0.05)
        assert states() == [(1, "open", both)]
        assert "close with 2 boards or more" in job("minimum", "first", "2")
        clock.advance_until(lambda: states()[0][1] == "closed", "the first round", 50.0)
        clock.advance_until(lambda: charges(*files) == 4, "the charges of the second", 0.05)
        assert "round 2 is given up as soon as the boards are told" in job("pause", "first", "--give-up")
        clock.advance_until(lambda: states()[1][1] == "given up", "the second round", 0.0)
        fewest = states()[1][2]
        assert "goes on when its turn comes" in job("resume", "first")
        clock.advance_until(lambda: len(states()) == 3 and states()[2][2] == both, "the third round", 0.25)
        clock.advance_until(lambda: not coordinator.is_running, "the end of the job", 5.0)
        assert coordinator.result is True
    assert states() == [(1, "closed", both), (2, "given up", fewest), (3, "closed", both)]
    # What was charged for the second stays; there is no refund.
    assert [verify(file.parent / "state").charges for file in files] == [3, 3]
    reported = dpagent("coordinator", "report", "--config", fleet.file, "--out", tmp_path / "report")
    assert reported.returncode == 0, reported.stderr
    page = (tmp_path / "report" / "index.html").read_text()
    assert "of 3, 1 given up" in page
