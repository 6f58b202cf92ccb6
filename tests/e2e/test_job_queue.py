"""Jobs of one fleet, one after another: added, paused, cancelled and changed while the coordinator runs."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from brokers import Broker, wait_until
from clocks import MovableClock
from commands import dpagent
from daemons import agent_thread, attentive_daemons, coordinator_thread
from fleets import run_agent, run_coordinator, write_agent, write_job, write_shared
from observers import Observer

from agent.audit import audit, verify
from agent.ledger import LedgerError
from coordinator.database.sqlite import database_file
from coordinator.keys import load_signer
from coordinator.reader import StoreReader
from coordinator.settings import load_coordinator_settings
from dpagent.errors import PlanError, StorageError
from dpagent.protocol.messages import Plan
from dpagent.protocol.signing import Verifier

QUICK = {"compute_slot_s": 0.1, "jitter_window_s": 0.2, "device_grid_s": 0.001, "deadline_s": 86_000.0}
LONG = QUICK | {"jitter_window_s": 600.0}
"""Of a round that stays open until the test moves the clock: fragments are still to come."""


class QueuedFleet:
    """The files of a coordinator without a job in its ``fleet.yaml``, and of its boards."""

    def __init__(self, directory: Path, broker: Broker, *, devices: int = 1) -> None:
        self.name, self.directory, self.broker = directory.name, directory, broker
        self.file = write_shared(directory / "coordinator", broker, fleet=self.name, devices=devices)
        self.settings = load_coordinator_settings(self.file)
        self.key = load_signer(self.settings.keys_dir, self.name).public_key

    def board(self, number: int = 0, **changes: Any) -> Path:
        budget = {"epsilon": 20.0, "delta": 1e-3}
        return write_agent(
            self.directory / f"board-{number}", self.broker, self.key, number, fleet=self.name,
            budget=budget, **changes,
        )  # fmt: skip

    def job(self, *words: str) -> str:
        """A command of the queue, and what it said."""
        result = dpagent("coordinator", "job", *words, "--config", self.file)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def refused(self, *words: str) -> str:
        """What a command says that does not do it."""
        result = dpagent("coordinator", "job", *words, "--config", self.file)
        assert result.returncode != 0, result.stdout
        return result.stderr

    def add(self, name: str, **changes: Any) -> None:
        self.job("add", str(write_job(self.directory / f"{name}.yaml", **{"round": QUICK} | changes)))

    def state(self, name: str) -> str:
        with contextlib.closing(StoreReader(self.settings.state_dir, name)) as reader:
            queued = reader.queued()
        assert queued is not None
        return str(queued.state)

    def rounds(self, name: str) -> tuple[int, int]:
        """Rounds of a job that were opened, and those that are closed."""
        try:
            reader = StoreReader(self.settings.state_dir, name)
        except StorageError:
            return 0, 0
        rounds = reader.rounds()
        reader.close()
        return len(rounds), sum(each.closed_at is not None for each in rounds)

    def counted(self, name: str) -> int:
        reader = StoreReader(self.settings.state_dir, name)
        try:
            return len(reader.fragments())
        finally:
            reader.close()

    def plans(self, observer: Observer) -> list[Plan]:
        verifier = Verifier(self.key, self.name)
        return [verifier.open(message, Plan, "plan") for message in observer.plans]


def charges(board: Path) -> int:
    try:
        return verify(board.parent / "state").charges
    except LedgerError:
        return 0


@pytest.fixture
def fleet_of(tmp_path: Path, mosquitto: Broker) -> Callable[..., QueuedFleet]:
    return lambda **changes: QueuedFleet(tmp_path / f"queue-{abs(hash(tmp_path))}", mosquitto, **changes)


@pytest.fixture(autouse=True)
def _attentive() -> Iterator[None]:
    with attentive_daemons():
        yield


@pytest.mark.heavy
def test_a_running_coordinator_takes_one_job_after_another_in_its_old_directory(
    fleet_of: Callable[..., QueuedFleet],
) -> None:
    """All programs in processes of their own, on the real clock."""
    fleet = fleet_of(devices=2)
    boards = [fleet.board(0), fleet.board(1)]
    with (
        run_coordinator(fleet.file, "--stay") as coordinator,
        run_agent(boards[0]),
        run_agent(boards[1]),
    ):
        wait_until(lambda: "staying until a stop" in coordinator.said(), "a coordinator without a job")
        models = []
        for name, seed in (("meters", 0), ("meters-again", 7)):
            fleet.add(name, model={"name": "digits", "seed": seed})
            wait_until(lambda name=name: fleet.state(name) == "finished", f"the end of {name}")
            models.append((fleet.settings.directory_of(name) / "model.onnx").read_bytes())
        # The second one is for ten minutes later: a board's disk is not worn by one model after the other.
        latest = [board.parent / "state" / "model.onnx" for board in boards]
        wait_until(lambda: all(each.exists() for each in latest), "a model on each board")
        assert {each.read_bytes() for each in latest} <= {*models}
        assert coordinator.is_running()
        assert coordinator.stop() == 0
    assert models[0] != models[1]
    for board in boards:
        ledger = audit(board.parent / "state")
        assert [charge.round for charge in ledger.charges] == [1, 2, 1, 2]
        assert len({charge.job for charge in ledger.charges}) == 2
        assert ledger.accounts.reserved("digits").epsilon == pytest.approx(8.0, rel=1e-3)
    listed = fleet.job("list")
    assert "Reserved by boards that took part in meters and meters-again: ε = 7.9" in listed
    assert "meters-again  finished  2 of 2" in listed
    for name in ("meters", "meters-again"):
        shown = dpagent("coordinator", "status", "--job", name, "--config", fleet.file)
        assert f"Job {name} (" in shown.stdout
        assert "finished, 2 of 2 rounds started" in shown.stdout
        assert len(list((fleet.settings.directory_of(name) / "models").iterdir())) == 2


def test_a_paused_job_closes_its_open_round_opens_no_other_and_goes_on_when_resumed(
    fleet_of: Callable[..., QueuedFleet],
) -> None:
    fleet = fleet_of()
    board = fleet.board()
    fleet.add("slow", rounds=3)
    fleet.add("next")
    clock = MovableClock()
    with (
        coordinator_thread(fleet.file, clock) as coordinator,
        agent_thread(board, clock),
    ):
        wait_until(lambda: fleet.rounds("slow") == (1, 0), "the first round")
        fleet.job("pause", "slow")
        clock.advance_until(lambda: fleet.rounds("slow") == (1, 1), "its end", 0.05)
        for _ in range(20):  # Time in which it would open the next one.
            clock.advance_until(lambda: True, "some time")
            clock.advance(10.0)
            assert fleet.rounds("slow") == (1, 1)
        assert charges(board) == 1
        assert fleet.state("next") == "waiting", "a board would end the first job for it"
        assert coordinator.is_running
        fleet.job("resume", "slow")
        clock.advance_until(lambda: not coordinator.is_running, "the end of both jobs", 0.05)
        assert coordinator.result is True
    assert (fleet.rounds("slow"), fleet.rounds("next")) == ((3, 3), (2, 2))
    assert charges(board) == 5


@pytest.mark.parametrize("with_model", [False, True])
def test_a_cancelled_job_is_over_on_the_boards_and_costs_them_what_they_reserved(
    fleet_of: Callable[..., QueuedFleet], with_model: bool
) -> None:
    fleet = fleet_of()
    board = fleet.board()
    fleet.add("wrong", rounds=3, round=LONG)
    fleet.add("right")
    clock, model = MovableClock(), board.parent / "state" / "model.onnx"
    with (
        Observer(fleet.broker, fleet.name) as observer,
        coordinator_thread(fleet.file, clock) as coordinator,
        agent_thread(board, clock),
    ):
        clock.advance_until(lambda: fleet.rounds("wrong") == (2, 1), "the second round", 5.0)
        clock.advance_until(lambda: charges(board) == 2, "its charge", 0.05)
        before = audit(board.parent / "state").accounts.reserved("digits")
        fleet.job("cancel", "wrong", *(["--with-model"] if with_model else []))
        wait_until(lambda: fleet.state("wrong") == "cancelled", "the word to the devices")
        wait_until(lambda: any(plan.state == "finished" for plan in fleet.plans(observer)), "the farewell")
        farewell = next(plan for plan in fleet.plans(observer) if plan.state == "finished")
        assert farewell.round == 2, "an earlier one would be taken for a replay"
        assert bool(farewell.finished_model) == with_model
        if with_model:
            exported = (fleet.settings.directory_of("wrong") / "model.onnx").read_bytes()
            wait_until(lambda: model.exists() and model.read_bytes() == exported, "the model on the board")
        else:
            assert not model.exists()
        after = audit(board.parent / "state")
        assert (len(after.charges), after.accounts.reserved("digits")) == (2, before)
        assert before.epsilon == pytest.approx(4.0, rel=1e-3), "the whole job, though it ended early"
        clock.advance_until(lambda: not coordinator.is_running, "the end of the other job", 0.05)
        assert coordinator.result is True
    assert charges(board) == 4
    # Nothing of the round that was given up is in the sums of the next job.
    (first, second), _ = (fleet_rounds(fleet, name) for name in ("wrong", "right"))
    assert first["closed_at"] is not None
    assert (second["closed_at"], second["given_up_at"] is not None) == (None, True)
    status = json.loads(
        dpagent("coordinator", "status", "--job", "wrong", "--json", "--config", fleet.file).stdout
    )
    spent = audit(board.parent / "state").charges[1].cumulative_epsilon
    assert status["spent"][0]["epsilon"] == pytest.approx(spent, rel=1e-3), "the round given up counts"
    assert "given up" in dpagent("coordinator", "status", "--job", "wrong", "--config", fleet.file).stdout


def fleet_rounds(fleet: QueuedFleet, name: str) -> list[dict[str, Any]]:
    shown = dpagent("coordinator", "status", "--job", name, "--json", "--config", fleet.file)
    rounds: list[dict[str, Any]] = json.loads(shown.stdout)["rounds"]
    return rounds


def test_a_job_cancelled_while_no_coordinator_runs_is_told_to_the_devices_by_the_next_one(
    fleet_of: Callable[..., QueuedFleet],
) -> None:
    fleet, clock = fleet_of(), MovableClock()
    fleet.add("wrong")
    with coordinator_thread(fleet.file, clock) as coordinator:
        wait_until(lambda: fleet.rounds("wrong") == (1, 0), "the first round")
        coordinator.stop()
    assert "or else by the next one" in fleet.job("cancel", "wrong")
    assert fleet.state("wrong") == "cancelling"
    with (
        Observer(fleet.broker, fleet.name) as observer,
        coordinator_thread(fleet.file, clock) as coordinator,
    ):
        assert coordinator.wait() is True
        wait_until(
            lambda: [each.state for each in fleet.plans(observer)[-1:]] == ["finished"], "the farewell"
        )
    assert fleet.state("wrong") == "cancelled"
    # Of a job that nobody has heard of, nobody is told.
    fleet.add("unheard-of")
    assert "No device has heard of it" in fleet.job("cancel", "unheard-of")
    with coordinator_thread(fleet.file, clock) as coordinator:
        assert coordinator.wait() is True


def test_a_board_that_comes_too_late_for_the_open_round_waits_for_the_next_one_uncharged(
    fleet_of: Callable[..., QueuedFleet],
) -> None:
    # Two seats: the round goes on past its deadline, and what both boards send for it then must count.
    fleet, clock = fleet_of(devices=2), MovableClock()
    boards = [fleet.board(0), fleet.board(1)]
    fleet.add("job", round=LONG | {"compute_slot_s": 30.0})
    with (
        Observer(fleet.broker, fleet.name) as observer,
        coordinator_thread(fleet.file, clock) as coordinator,
    ):
        wait_until(lambda: observer.plans, "the first plan")
        opened_at = clock.unix()
        with agent_thread(boards[0], clock):
            clock.advance_until(
                lambda: charges(boards[0]) == 1, "the charge of the board that is there", 0.05
            )
        # It is gone before all has left: the round stays open, and less than a slot is left.
        clock.advance(LONG["deadline_s"] - 10.0 - (clock.unix() - opened_at))
        with agent_thread(boards[1], clock):
            wait_until(lambda: declined(boards[1]), "the decision of the board that is added")
            assert charges(boards[1]) == 0
            with agent_thread(boards[0], clock):
                clock.advance_until(lambda: not coordinator.is_running, "the end of the job", 5.0)
                assert coordinator.result is True
    rounds = [charge.round for charge in audit(boards[1].parent / "state").charges]
    assert rounds[-1:] == [2]


def declined(board: Path) -> bool:
    shown = dpagent("budget", "show", "--state-dir", board.parent / "state")
    return "deadline passes" in shown.stdout


def test_a_deadline_is_changed_while_a_round_is_open(fleet_of: Callable[..., QueuedFleet]) -> None:
    fleet, clock = fleet_of(), MovableClock(unix=1_800_000_000.0)
    fleet.add("job")
    with (
        Observer(fleet.broker, fleet.name) as observer,
        coordinator_thread(fleet.file, clock) as coordinator,
    ):
        wait_until(lambda: observer.plans, "the plan")
        assert fleet.plans(observer)[-1].deadline == 1_800_000_000.0 + QUICK["deadline_s"]
        fleet.job("deadline", "job", "7.5")
        first = fleet.plans(observer)[0]
        wait_until(lambda: fleet.plans(observer)[-1] != first, "the plan with the new deadline")
        assert fleet.plans(observer)[-1] == first.with_values({"deadline": 1_800_000_007.5})
        coordinator.stop()
    # It outlives a restart.
    clock.advance(1_000.0)
    with Observer(fleet.broker, fleet.name) as observer, coordinator_thread(fleet.file, clock):
        wait_until(
            lambda: fleet.plans(observer)[-1:] == [first.with_values({"deadline": 1_800_001_007.5})],
            "the plan again",
        )


def test_a_job_that_cannot_be_taken_up_is_paused_with_the_reason_and_others_run(
    fleet_of: Callable[..., QueuedFleet], tmp_path: Path
) -> None:
    fleet, clock = fleet_of(), MovableClock()
    board = fleet.board()
    test_data = tmp_path / "test.npz"
    test_data.write_bytes((board.parent / "data.npz").read_bytes())
    fleet.add("lost", test_data={"path": str(test_data)})
    fleet.add("well")
    test_data.unlink()
    with (
        coordinator_thread(fleet.file, clock) as coordinator,
        agent_thread(board, clock),
    ):
        clock.advance_until(lambda: fleet.state("well") == "finished", "the job that can run", 0.05)
        assert coordinator.is_running, "one is left"
        shown = json.loads(fleet.job("show", "lost", "--json", "-"))
        assert (shown["state"], shown["paused"]) == ("waiting", True)
        assert "test.npz" in shown["trouble"]
        # Repaired, it runs.
        test_data.write_bytes((board.parent / "data.npz").read_bytes())
        fleet.job("resume", "lost")
        clock.advance_until(lambda: not coordinator.is_running, "its end", 0.05)
        assert coordinator.result is True
    assert fleet.state("lost") == "finished"


def test_a_round_of_a_job_that_cannot_be_taken_up_again_counts_for_no_other_job(
    fleet_of: Callable[..., QueuedFleet], tmp_path: Path
) -> None:
    """Its test data are lost while its round is open, and then it is cancelled."""
    fleet, clock = fleet_of(), MovableClock()
    board = fleet.board()
    test_data = tmp_path / "test.npz"
    test_data.write_bytes((board.parent / "data.npz").read_bytes())
    fleet.add("lost", test_data={"path": str(test_data)}, round=LONG)
    fleet.add("next")
    with coordinator_thread(fleet.file, clock) as coordinator, agent_thread(board, clock):
        clock.advance_until(lambda: fleet.counted("lost"), "a fragment", 5.0)
        coordinator.stop()
    test_data.unlink()
    with coordinator_thread(fleet.file, clock) as coordinator:
        wait_until(lambda: "test.npz" in fleet.job("show", "lost"), "the reason why it is paused")
        assert fleet.state("next") == "waiting", "a board would end the first job for it"
        fleet.job("cancel", "lost")
        wait_until(lambda: fleet.rounds("next") == (1, 0), "the next job")
        coordinator.stop()
    (given_up,), (opened,) = (fleet_rounds(fleet, name) for name in ("lost", "next"))
    assert given_up["given_up_at"] is not None
    assert given_up["fragments"] > 0
    assert opened["fragments"] == 0


def test_a_job_whose_round_cannot_go_on_fails_alone_and_the_next_one_runs(
    fleet_of: Callable[..., QueuedFleet], mosquitto: Broker
) -> None:
    """Before, it ended the coordinator, and with it the queue."""
    fleet, clock = fleet_of(), MovableClock()
    board = fleet.board()
    fleet.add("broken", round=LONG, privacy={"clipping": {"kind": "quantile"}})
    fleet.add("next", rounds=1)
    with coordinator_thread(fleet.file, clock) as coordinator:
        wait_until(lambda: fleet.rounds("broken") == (1, 0), "its round")
        coordinator.stop()
    with (
        contextlib.closing(sqlite3.connect(database_file(fleet.settings.state_dir))) as connection,
        connection,
    ):
        connection.execute("UPDATE models SET clip_norm = 1e300")
    with (
        Observer(mosquitto, fleet.name) as observer,
        coordinator_thread(fleet.file, clock) as coordinator,
        agent_thread(board, clock),
    ):
        clock.advance_until(lambda: not coordinator.is_running, "the end of both jobs", 0.05)
        assert isinstance(coordinator.failure(), PlanError), "whoever waits is told by the exit code"
    shown = json.loads(fleet.job("show", "broken", "--json", "-"))
    assert (shown["state"], fleet.state("next")) == ("failed", "finished")
    assert "No device would accept" in shown["trouble"]
    assert "Job broken failed: No device" in fleet.job("list")
    told = [plan.job.hex() for plan in fleet.plans(observer) if plan.state == "finished"]
    assert len(set(told)) == 1, "what cannot be planned cannot be told"
    assert "has failed" in fleet.refused("cancel", "broken")
    (given_up,) = fleet_rounds(fleet, "broken")
    assert given_up["given_up_at"] is not None


def test_a_job_paused_in_its_last_round_is_finished(fleet_of: Callable[..., QueuedFleet]) -> None:
    """No further round of it could open, and it would keep the others waiting."""
    fleet, clock = fleet_of(), MovableClock()
    board = fleet.board()
    fleet.add("short", rounds=1)
    fleet.add("next", rounds=1)
    with coordinator_thread(fleet.file, clock) as coordinator, agent_thread(board, clock):
        wait_until(lambda: fleet.rounds("short") == (1, 0), "its round")
        fleet.job("pause", "short")
        clock.advance_until(lambda: not coordinator.is_running, "the end of both jobs", 0.05)
        assert coordinator.result is True
    assert (fleet.state("short"), fleet.state("next")) == ("finished", "finished")
