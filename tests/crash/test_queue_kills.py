"""A queue of three jobs, the second of them cancelled, whatever is killed: between jobs, and in commands.

What holds within a job, ``checker.py`` proves for one. Here it is what holds from job to job: each is in the
queue once, none is announced after a later one, none is charged between the rounds of another, and no
fragment counts twice or for another job.
"""

from __future__ import annotations

import json
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from brokers import Broker, wait_until
from commands import dpagent
from crash.fleet_under_fire import COORDINATOR, DEVICES, Fault, Launcher, launcher
from fleets import write_agent, write_job, write_shared
from observers import Observer

from agent.audit import audit
from coordinator.keys import load_signer
from coordinator.settings import load_coordinator_settings
from dpagent.faults import FaultPoint
from dpagent.protocol.messages import Plan
from dpagent.protocol.signing import Verifier

pytestmark = pytest.mark.heavy

JOBS = ("one", "two", "three")
CANCELLED = "two"
ROUNDS = 2
NAME = "queue-under-fire"
_ROUND = {"compute_slot_s": 0.1, "jitter_window_s": 0.3, "device_grid_s": 0.001, "deadline_s": 600.0}
_STUCK_S = 90.0
POINTS = (
    FaultPoint.QUEUE_TAKEN_UP,
    FaultPoint.QUEUE_ROUND_GIVEN_UP,
    FaultPoint.COORDINATOR_SAID_GOODBYE,
    FaultPoint.COORDINATOR_FINISHED,
    FaultPoint.COORDINATOR_JOB_WRITTEN,
    FaultPoint.COORDINATOR_JOB_BEGUN,
    FaultPoint.QUEUE_TAKEN_UP,
    FaultPoint.FILE_WRITTEN,
    FaultPoint.COORDINATOR_SAID_GOODBYE,
    FaultPoint.COORDINATOR_FINISHED,
)
"""Where the coordinator is killed, in this order: in the first job, at the end of the second, which is
cancelled, at the beginning and at the end of the third."""


@pytest.fixture(scope="module")
def programs() -> Iterator[Launcher]:
    with launcher() as made:
        yield made


class QueueUnderFire:
    """A coordinator, two devices, their broker, and commands that kill themselves."""

    def __init__(self, directory: Path, start: Launcher) -> None:
        self._launcher, self.directory = start, directory
        self.broker = Broker("mosquitto", directory).start()
        self.file = write_shared(directory / COORDINATOR, self.broker, fleet=NAME, devices=len(DEVICES))
        self.settings = load_coordinator_settings(self.file)
        key = load_signer(self.settings.keys_dir, NAME).public_key
        self._verifier = Verifier(key, NAME)
        self._files = {COORDINATOR: self.file}
        for number, name in enumerate(DEVICES):
            self._files[name] = write_agent(
                directory / name, self.broker, key, number, fleet=NAME, engine="numpy",
                budget={"epsilon": 100.0, "delta": 1e-3},
            )  # fmt: skip
        self.kills: list[str] = []
        self._armed: FaultPoint | None = None

    def command(self, *words: str, faults: tuple[FaultPoint, ...] = ()) -> None:
        """A command of the queue, killed at each of the points and tried again, until it is done."""
        waiting: list[FaultPoint | None] = [*faults, None]
        for point in waiting:
            arguments = ["coordinator", "job", *words, "--config", str(self.file)]
            fault = None if point is None else Fault(point)
            self._launcher.start("command", arguments, self.directory / "command.log", fault)
            wait_until(lambda: not self._launcher.runs("command"), "the end of a command")
            for name, code in self._launcher.ended():
                assert name == "command", f"{name} ended with {code}"
                if code == -signal.SIGKILL:
                    self.kills.append(str(point))
                    self.look()
                elif code != 0:
                    # Done before its kill, so that it is refused: that there is one, or that it is cancelled.
                    said = (self.directory / "command.log").read_text()
                    assert "already" in said.splitlines()[-1], said

    def run(self, faults: list[Fault], observer: Observer) -> None:
        """Run the queue to its end. The coordinator is killed at each fault; a command cancels one job."""
        self._start(COORDINATOR, faults)
        for name in DEVICES:
            self._start(name, [])
        has_cancelled, until = False, time.monotonic() + _STUCK_S
        while True:
            assert time.monotonic() < until, self._files[COORDINATOR].with_suffix(".log").read_text()[-3_000:]
            for name, code in self._launcher.ended():
                assert name == COORDINATOR, f"{name} ended with {code}"
                if code == 0:
                    assert has_cancelled
                    return self._stop(observer)
                assert code == -signal.SIGKILL, code
                self.kills.append(str(self._armed))
                self.look()
                self._start(COORDINATOR, faults)
            if not has_cancelled and self._is_open(CANCELLED):
                result = dpagent("coordinator", "job", "cancel", CANCELLED, "--config", self.file)
                assert result.returncode == 0, result.stderr
                has_cancelled = True
            time.sleep(0.01)

    def _start(self, name: str, faults: list[Fault]) -> None:
        fault = faults.pop(0) if faults else None
        if name == COORDINATOR:
            self._armed = None if fault is None else fault.point
        words = ["coordinator", "run"] if name == COORDINATOR else ["run"]
        log = self._files[name].with_suffix(".log")
        self._launcher.start(name, [*words, "--config", str(self._files[name])], log, fault)

    def _stop(self, observer: Observer) -> None:
        wait_until(
            lambda: [each.state for each in self.plans(observer)[-1:]] == ["finished"], "the last farewell"
        )
        for name in DEVICES:
            self._launcher.send(name, signal.SIGTERM)
        wait_until(lambda: not any(map(self._launcher.runs, DEVICES)), "the end of the devices")
        assert dict(self._launcher.ended()) == dict.fromkeys(DEVICES, 0)

    def close(self) -> None:
        for name in [*self._launcher.pids]:
            self._launcher.send(name, signal.SIGKILL)
        wait_until(lambda: not self._launcher.pids or self._launcher.ended() is None, "the end of all")
        self.broker.give_up()

    def _is_open(self, name: str) -> bool:
        return any(each["name"] == name and each["is_open"] for each in self.look())

    def look(self) -> list[sqlite3.Row]:
        """The jobs, after a check of what holds at any moment: also just after a kill."""
        file = self.settings.state_dir / "coordinator.db"
        if not file.exists():
            return []
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=10)) as connection:
            connection.row_factory = sqlite3.Row
            connection.execute("BEGIN")
            assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
            jobs = connection.execute(
                "SELECT *, EXISTS (SELECT 1 FROM rounds WHERE job = jobs.number AND closed_at IS NULL "
                "AND given_up_at IS NULL) AS is_open FROM jobs ORDER BY number"
            ).fetchall()
            begun = [each["number"] for each in jobs if each["state"] in ("running", "cancelling")]
            assert len(begun) <= 1, "two jobs have begun and are not over"
            assert sum(each["is_open"] for each in jobs) <= 1, "two rounds are open"
            for each in jobs:
                (has_model,) = connection.execute(
                    "SELECT count(*) FROM models WHERE job = ?", (each["number"],)
                ).fetchone()
                assert has_model == (each["begun_at"] is not None), f"{each['name']}: by half begun"
                assert (each["ended_at"] is None) == (each["state"] not in ("finished", "cancelled"))
            seated = {
                row["ids"][start : start + 16]
                for row in connection.execute("SELECT ids FROM partial_sums")
                for start in range(0, len(row["ids"]), 16)
            }
            of_open = {
                row["id"]
                for row in connection.execute(
                    "SELECT fragments.id FROM fragments JOIN rounds ON rounds.job = fragments.job "
                    "AND rounds.number = fragments.round WHERE closed_at IS NULL AND given_up_at IS NULL"
                )
            }
            assert seated == of_open, "values of a round that is not open, or none of one that is"
            counts = connection.execute("SELECT count(*) FROM fragments GROUP BY job, round, position")
            assert max((count for (count,) in counts), default=0) <= len(DEVICES)
        return list(jobs)

    def plans(self, observer: Observer) -> list[Plan]:
        return [self._verifier.open(message, Plan, "plan") for message in observer.plans]

    def require_kept(self, observer: Observer) -> None:
        """What holds at the end."""
        jobs = self.look()
        assert [(each["name"], each["state"]) for each in jobs] == [
            (name, "cancelled" if name == CANCELLED else "finished") for name in JOBS
        ]
        plans, ids = self.plans(observer), [each["id"] for each in jobs]
        told = [ids.index(plan.job) for plan in plans]
        assert told == sorted(told), "a plan of a job that was over"
        for job, announced in groupby(plans, key=lambda plan: plan.job):
            states = [plan.state for plan in announced]
            assert states == sorted(states, reverse=True), "a round after the end"
            assert states[-1] == "finished", f"nobody was told of the end of {ids.index(job)}"
        first: dict[tuple[bytes, int], Plan] = {}
        for plan in plans:
            known = first.setdefault((plan.job, plan.round), plan)
            if plan.state == "open":
                assert known.with_values({"deadline": plan.deadline}) == plan, "another plan"
        for name in DEVICES:
            charges = audit(self.directory / name / "state").charges
            charged = [(ids.index(bytes.fromhex(charge.job)), charge.round) for charge in charges]
            assert charged == sorted(set(charged)), "charged twice, or between the rounds of another job"
            of_finished = [each for each in charged if JOBS[each[0]] != CANCELLED]
            assert of_finished == [(job, number) for job in (0, 2) for number in range(1, ROUNDS + 1)]
        for name in JOBS:
            shown = dpagent("coordinator", "status", "--job", name, "--json", "--config", self.file)
            rounds: list[dict[str, Any]] = json.loads(shown.stdout)["rounds"]
            if name == CANCELLED:
                assert rounds[-1]["given_up_at"] is not None
                assert rounds[-1]["closed_at"] is None
                continue
            blocks = {each["fragments"] for each in rounds if each["closed_at"] is not None}
            assert len(rounds) == ROUNDS
            assert blocks == {len(DEVICES) * 5}
            assert (self.settings.directory_of(name) / "model.onnx").exists()


@pytest.fixture
def queue(tmp_path: Path, programs: Launcher) -> Iterator[QueueUnderFire]:
    made = QueueUnderFire(tmp_path, programs)
    yield made
    made.close()


def test_a_queue_is_worked_off_whatever_is_killed_between_its_jobs(queue: QueueUnderFire) -> None:
    for name in JOBS:
        file = write_job(queue.directory / f"{name}.yaml", rounds=ROUNDS, round=_ROUND)
        queue.command("add", str(file), faults=(FaultPoint.QUEUE_ADD_WRITTEN, FaultPoint.QUEUE_ADDED))
    queue.command("pause", "three", faults=(FaultPoint.QUEUE_CHANGE_WRITTEN, FaultPoint.QUEUE_CHANGED))
    queue.command("resume", "three")
    with Observer(queue.broker, NAME) as observer:
        queue.run([Fault(point, delay_s=0.01) for point in POINTS], observer)
        queue.require_kept(observer)
    assert queue.kills[-len(POINTS) :] == [str(point) for point in POINTS]
    assert set(queue.kills) >= {str(point) for point in FaultPoint if point.startswith("queue")}
