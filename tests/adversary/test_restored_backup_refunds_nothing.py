"""A thief or the owner puts an older state directory back, deletes it, swaps it, or edits ``agent.yaml``.

Claim: none of this refunds budget. `dpagent run` refuses with exit code 5 before it connects; and after
`dpagent budget restored` no more of the lifetime budget is left than there would have been, and no round is
taken a second time under the charge that it had. They may do anything but write the second head, which stands
outside the state directory; who writes that too is the owner whom no file can bind (docs/privacy.md).

Before, an older copy of the directory was taken for the newest, a deleted one began a new budget, and so did
a larger ``budget.epsilon`` or another ``data.name``: each time the device charged again without a word.

Power: the attacks have no randomness. On the code of before each agent starts and charges, so that the test
fails always; on this code it never fails by chance.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from brokers import Broker, wait_until
from commands import dpagent
from fleets import DIGITS, make_plan, run_agent, terms, write_agent
from ledgers import files_of
from observers import Announcer, in_an_hour

from agent.charges import Budget
from agent.custody import begin_ledger
from dpagent.errors import ExitCode
from dpagent.protocol.messages import Plan
from dpagent.protocol.sealing import Opener, new_sealing_secret
from dpagent.protocol.sizes import block_count
from dpagent.protocol.weights import weights_to_bytes

pytestmark = pytest.mark.heavy

OPENER = new_sealing_secret()
BLOCKS = block_count(DIGITS.parameter_count, 1_000)
FIRST, SECOND, THIRD = (letter * 16 for letter in (b"1", b"2", b"3"))
NOISE = [8.0, 8.0, 8.0]
EPSILON, DELTA = 40.0, 1e-5
_numbers = itertools.count()


@dataclass(frozen=True)
class Board:
    """A device with its ledger: yesterday it took part in a job, today in the rest of it and in one more."""

    directory: Path
    coordinator: Announcer
    name: str
    """Of its fleet."""
    left: tuple[float, float] = (0.0, 0.0)
    """ε and δ of the lifetime budget that are left today."""
    charged: tuple[tuple[Any, ...], ...] = ()
    """Jobs and rounds."""

    @property
    def file(self) -> Path:
        return self.directory / "agent.yaml"

    @property
    def state(self) -> Path:
        return self.directory / "state"

    @property
    def second_head(self) -> Path:
        return self.directory / "state.head"

    @property
    def yesterday(self) -> Path:
        """A copy of the state directory."""
        return self.directory / "yesterday"

    @property
    def backup(self) -> Path:
        """What the command made yesterday."""
        return self.directory / "backup.db"

    def live(self) -> Board:
        """Yesterday and today."""
        self.take_part(FIRST, 1)
        shutil.copytree(self.state, self.yesterday)
        done = dpagent("budget", "backup", self.backup, "--state-dir", self.state)
        assert done.returncode == ExitCode.OK, done.stderr
        self.take_part(FIRST, 2)
        self.take_part(SECOND, 1)
        left = self.budget_left()
        assert 0 < left[0] < EPSILON
        return replace(self, left=left, charged=tuple(self.charges()))

    def plan(self, job: bytes, number: int) -> Plan:
        return make_plan(
            fleet=self.name, job=job, round=number, deadline=in_an_hour(),
            sealing_key=Opener(OPENER, self.name).public_key, compute_slot_s=0.5, jitter_window_s=0.3,
            **terms(noise_multipliers=NOISE, delta=DELTA),
        )  # fmt: skip

    def take_part(self, job: bytes, number: int) -> None:
        """Run the agent until it has sent its update, and stop it."""
        before = len(self.coordinator.fragments)
        self.coordinator.announce(self.plan(job, number))
        with run_agent(self.file) as agent:
            wait_until(lambda: len(self.coordinator.fragments) >= before + BLOCKS, f"round {number}")
            # Of one fragment: or the device would wait with the next round.
            self.coordinator.confirm(
                Opener(OPENER, self.name).open(self.coordinator.fragments[before], job).id
            )
            query = "SELECT 1 FROM decided WHERE job = ? AND receipted = ?"
            wait_until(lambda: self.rows(query, job.hex(), number), f"a receipt of round {number}")
            assert agent.stop() == ExitCode.OK

    def refused(self) -> str:
        """The agent does not start, and nothing comes of a plan that it could take part in."""
        fragments = len(self.coordinator.fragments)
        self.coordinator.announce(self.plan(THIRD, 1))
        result = dpagent("run", "--config", self.file)
        assert result.returncode == ExitCode.LEDGER, result.stderr
        assert len(self.coordinator.fragments) == fragments
        said = result.stderr.splitlines()[-1]
        assert said.startswith("dpagent: ")
        assert "dpagent budget " in said, "it says what to do"
        return said

    def restore(self, *options: str | Path) -> str:
        result = dpagent("budget", "restored", "--config", self.file, *options)
        assert result.returncode == ExitCode.OK, result.stderr
        return result.stdout

    def require_no_refund(self) -> None:
        """No more is left than there would have been, and no round of an old job is taken again."""
        epsilon, delta = self.budget_left()
        assert epsilon <= self.left[0]
        assert delta <= self.left[1]
        assert dpagent("budget", "verify", "--state-dir", self.state).returncode == ExitCode.OK
        before, charged = len(self.coordinator.fragments), self.charges()
        self.decline(FIRST, 2, 3)
        assert self.charges() == charged
        assert len(self.coordinator.fragments) == before

    def decline(self, job: bytes, *numbers: int) -> None:
        """Run the agent until it has declined each of the rounds, and stop it."""
        query = "SELECT 1 FROM rounds WHERE job = ? AND round = ? AND state = 'declined'"
        self.coordinator.announce(self.plan(job, numbers[0]))
        with run_agent(self.file) as agent:
            for number in numbers:
                self.coordinator.announce(self.plan(job, number))
                wait_until(partial(self.rows, query, job.hex(), number), f"a decline of round {number}")
            assert agent.stop() == ExitCode.OK

    def require_it_goes_on(self) -> None:
        """What is left can be spent."""
        self.take_part(THIRD, 1)
        epsilon, delta = self.budget_left()
        assert epsilon < self.left[0]
        assert delta < self.left[1]

    def budget_left(self) -> tuple[float, float]:
        shown = dpagent("budget", "show", "--json", "--state-dir", self.state)
        assert shown.returncode == ExitCode.OK, shown.stderr
        found = json.loads(shown.stdout)["datasets"]["digits"]
        return found["epsilon_left"], found["delta_left"]

    def charges(self) -> list[tuple[Any, ...]]:
        return self.rows("SELECT body ->> 'job', body ->> 'round' FROM entries WHERE kind = 'charge'")

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.state / "ledger.db", timeout=10)) as connection:
            return connection.execute(query, values).fetchall()

    def edit(self, **sections: dict[str, Any]) -> None:
        """Change sections of ``agent.yaml``."""
        settings = yaml.safe_load(self.file.read_text())
        for name, section in sections.items():
            settings[name] = settings.get(name, {}) | section
        self.file.write_text(yaml.safe_dump(settings, sort_keys=False))

    def put_back(self) -> None:
        """Yesterday's directory, with all its files."""
        shutil.rmtree(self.state)
        shutil.copytree(self.yesterday, self.state)


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory, mosquitto: Broker) -> Iterator[Board]:
    directory, name = tmp_path_factory.mktemp("lived"), f"restored-{next(_numbers)}"
    with Announcer(mosquitto, name) as coordinator:
        coordinator.announce_model(weights_to_bytes(DIGITS.initial_weights(0), "float32"))
        write_agent(
            directory, mosquitto, coordinator.signer.public_key, fleet=name,
            budget={"epsilon": EPSILON, "delta": 3.5 * DELTA}, engine="numpy",
        )  # fmt: skip
        yield Board(directory, coordinator, name).live()


@pytest.fixture
def board(lived: Board, tmp_path: Path) -> Board:
    """A board of the test's own, with that past."""
    shutil.copytree(lived.directory, tmp_path / "board")
    return replace(lived, directory=tmp_path / "board")


def test_yesterdays_directory_is_refused_and_refunds_nothing(board: Board) -> None:
    board.put_back()
    assert board.budget_left() > board.left, "the copy alone knows no better"
    assert str(board.second_head) in board.refused()
    assert "Wrote off" in board.restore()
    assert board.budget_left() == pytest.approx(board.left, rel=1e-9)
    board.require_no_refund()
    board.require_it_goes_on()


def test_a_deleted_directory_is_refused_and_refunds_nothing(board: Board) -> None:
    shutil.rmtree(board.state)
    assert "holds no ledger" in board.refused()
    again = dpagent("budget", "init", "--config", board.file)
    assert again.returncode == ExitCode.LEDGER
    assert str(board.second_head) in again.stderr
    board.restore()
    assert board.budget_left() == pytest.approx(board.left, rel=1e-9)
    epsilon, delta = board.budget_left()
    assert epsilon <= board.left[0]
    assert delta <= board.left[1]
    board.require_it_goes_on()


@pytest.mark.slow
def test_a_copy_that_the_command_made_refunds_nothing_either(board: Board) -> None:
    shutil.rmtree(board.state)
    board.restore("--from", board.backup)
    assert board.charges() == list(board.charged[:1])
    assert board.budget_left() == pytest.approx(board.left, rel=1e-9)
    board.require_no_refund()


def test_another_ledger_and_its_head_in_the_place_of_both_are_refused(board: Board, tmp_path: Path) -> None:
    other = tmp_path / "other"
    begin_ledger(files_of(other), {"digits": Budget(EPSILON, 3.5 * DELTA)})
    for name in ("ledger.db", "ledger.head"):
        shutil.copy(other / name, board.state / name)
    for name in ("ledger.db-wal", "ledger.db-shm"):
        (board.state / name).unlink(missing_ok=True)
    board.refused()
    board.restore()
    epsilon, delta = board.budget_left()
    assert epsilon <= board.left[0]
    assert delta <= board.left[1]


@pytest.mark.slow
def test_without_the_second_head_all_that_is_left_is_written_off(board: Board) -> None:
    """The thief has deleted it: a copy might hide any spending."""
    board.put_back()
    board.second_head.unlink()
    assert str(board.second_head) in board.refused()
    for command in ("init", "restored", "raise"):
        result = dpagent("budget", command, "--config", board.file)
        assert result.returncode == ExitCode.LEDGER, result.stdout
    assert board.budget_left() > board.left
    board.restore("--write-off-all")
    assert board.budget_left() == (0.0, 0.0)
    board.require_no_refund()


EDITS: list[Callable[[Board], None]] = [
    lambda board: board.edit(budget={"epsilon": 80.0}),
    lambda board: board.edit(budget={"delta": 1e-4}),
    lambda board: board.edit(budget={"epsilon": 80.0, "delta": 1e-6}),
    lambda board: board.edit(data={"name": "the-same-digits"}),
    lambda board: board.edit(ledger={"second_head": "elsewhere.head"}),
]


@pytest.mark.parametrize("edit", EDITS, ids=["ε", "δ", "ε for δ", "name", "second head"])
def test_an_edited_configuration_is_refused_and_changes_nothing(
    board: Board, edit: Callable[[Board], None]
) -> None:
    edit(board)
    board.refused()
    assert board.budget_left() == board.left
    assert board.charges() == list(board.charged)


@pytest.mark.slow
def test_another_state_directory_begins_nothing_by_itself(board: Board) -> None:
    settings = yaml.safe_load(board.file.read_text()) | {"state_dir": "fresh"}
    board.file.write_text(yaml.safe_dump(settings, sort_keys=False))
    assert "holds no ledger" in board.refused()
    assert not (board.file.parent / "fresh").exists()


@pytest.mark.slow
def test_a_raised_budget_is_in_the_ledger_for_all_to_see(board: Board) -> None:
    """The owner may raise it, by a command: then it is an entry that an auditor reads."""
    board.edit(budget={"epsilon": 50.0})
    result = dpagent("budget", "raise", "--config", board.file)
    assert result.returncode == ExitCode.OK, result.stderr
    bodies = [json.loads(row[0]) for row in board.rows("SELECT body FROM entries WHERE kind = 'budget'")]
    assert [body["epsilon"] for body in bodies] == [40.0, 50.0]
    assert board.budget_left() == (pytest.approx(board.left[0] + 10.0), board.left[1])
    board.put_back()
    board.refused()
    board.restore()
    assert board.budget_left()[0] <= board.left[0] + 10.0


@pytest.mark.slow
def test_a_budget_that_was_lowered_stays_lowered(board: Board) -> None:
    board.edit(budget={"epsilon": 30.0})
    before = len(board.charges())
    board.decline(FIRST, 3)
    assert len(board.charges()) == before
    lowered = board.budget_left()
    board.put_back()
    board.edit(budget={"epsilon": 40.0})
    board.refused()
    board.restore()
    assert board.budget_left()[0] <= lowered[0]
    assert "ε = 30" in board.refused(), "the old value, too, needs the command"


@pytest.mark.slow
def test_a_thief_who_waits_gains_nothing(board: Board) -> None:
    """The same copy is put back again after each restore."""
    for _ in range(2):
        board.put_back()
        board.refused()
        board.restore()
        epsilon, delta = board.budget_left()
        assert epsilon <= board.left[0]
        assert delta <= board.left[1]
    assert epsilon == pytest.approx(board.left[0], rel=1e-9)
