"""A disk without room, at every write of a round: a sentence and exit code 8, nothing lost, and it goes on.

Room is taken in three ways: by a limit on the size of files, which needs no rights and fails a write in its
middle; by a small file system of one's own, where the kernel says that the disk is full; and by mounting that
read-only, so that root cannot write either.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fleets import make_plan
from ledgers import BUDGET, DATA, DATASET, charge_for, charge_rounds, fragments, tamper
from small_disks import fill, leave, on_disks_of_their_own
from storms import in_a_child

from agent.audit import verify
from agent.charges import Budget, Charge
from agent.custody import begin_ledger, raise_budget
from agent.heads import LedgerFiles
from agent.ledger_room import LedgerRoom
from agent.limit_settings import FRAGMENT_BYTES, LimitSettings
from agent.replay import replay
from agent.rounds import RoundState
from agent.spool import SpooledFragment
from agent.state import AgentState
from agent.token_store import Request
from dpagent.database_file import open_readonly
from dpagent.errors import ExitCode, LedgerError, StorageError
from dpagent.protocol.blind_signatures import PREFIX_BYTES
from dpagent.protocol.dummies import MAX_DUMMIES
from dpagent.protocol.issuing import Verdict, Wish
from dpagent.protocol.tokens import TOKEN_BYTES, RoundKey

JOB = (b"k" * 16).hex()
SENT = fragments(7, 40)


class Device:
    """A device that took part in one round, and is to take part in another.

    Args:
        root: of its state directory.
        boot: of its second head.
    """

    def __init__(self, root: Path, boot: Path) -> None:
        self.files = LedgerFiles(root / "state", boot / "state.head")
        begin_ledger(self.files, {DATASET: BUDGET})
        state = self.opened()
        charge_rounds(state, 1)
        self.charge: Charge = charge_for(make_plan(job=bytes.fromhex(JOB)), DATA, state.ledger)
        state.close()
        self._before = {file: file.read_bytes() for file in self._all()}

    def _all(self) -> list[Path]:
        return [*self.files.state_dir.iterdir(), self.files.second_head]

    def reset(self) -> None:
        """As it was before the other round."""
        shutil.rmtree(self.files.state_dir)
        self.files.state_dir.mkdir()
        for file, content in self._before.items():
            file.write_bytes(content)

    def opened(self) -> AgentState:
        return AgentState(self.files, {DATASET: BUDGET}, check=replay)

    def steps(self, state: AgentState) -> Iterator[tuple[str, Callable[[], object]]]:
        """The writes of a round, in order."""
        yield "offer", lambda: state.offer(JOB, 1, bytes(32), 0.0)
        yield "charge", lambda: state.charge([self.charge], 0.0)
        yield "spool", lambda: state.spool_round(JOB, 1, SENT, 0.0, None)
        yield "draw times", lambda: state.reschedule((1.0, each.digest) for each in SENT)
        yield "send", lambda: state.mark_sent({each.digest: 9.0 for each in SENT}, 1.0)
        yield "write notes", state.write_notes
        yield "count", lambda: state.mark_counted([each.digest for each in SENT], 2.0)
        yield "write the last notes", state.write_notes

    def take_part(self, state: AgentState) -> str:
        """Run the round as far as it goes; the step that failed, or nothing."""
        for name, step in self.steps(state):
            try:
                step()
            except StorageError:
                return name
        return ""

    def goes_on(self) -> str:
        """With room again the device starts, has lost nothing, and ends the round; where it stood before."""
        state = self.opened()
        known = state.round(JOB, 1)
        stood = "none" if known is None else str(known.state)
        charged = bool(state.ledger.trusts_of(DATASET, JOB, 1))
        assert charged is (stood not in ("none", "offered"))
        spooled = state.connection.execute("SELECT count(*) FROM fragments WHERE job = ?", (JOB,)).fetchone()
        assert spooled[0] == (0 if stood in ("none", "offered", "charged") else len(SENT))
        for name, step in self.steps(state):
            if not (name in ("offer", "charge") and charged) and not (name == "spool" and spooled[0]):
                step()
        known = state.round(JOB, 1)
        assert known is not None
        assert known.state == "receipted"
        state.close()
        assert verify(self.files.state_dir, self.files.second_head).charges == 2
        return stood


# --- files that may not grow --------------------------------------------------------------------


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path, tmp_path)


def confine(limit: int) -> None:
    """Let no file of this process grow beyond so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


@pytest.mark.parametrize(
    "stride", [pytest.param(4_001), pytest.param(487, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_wherever_a_write_fails_the_round_is_whole_and_goes_on(
    device: Device, tmp_path: Path, stride: int
) -> None:
    failed, stood = set(), set()
    report = tmp_path / "failed"
    for limit in range(60, 1_000_000, stride):
        device.reset()

        def confined(limit: int = limit) -> None:
            state = device.opened()
            confine(limit)
            step = device.take_part(state)
            confine(resource.RLIM_INFINITY)
            report.write_text(step)

        assert not in_a_child(confined)
        failed.add(report.read_text())
        stood.add(device.goes_on())
        if "" in failed:
            break
    assert {"offer", "charge", "spool", "write notes", ""} <= failed
    assert {"none", "offered", "charged", "spooled", "receipted"} <= stood


@pytest.mark.parametrize("limit", [0, 60, 300, 20_000])
def test_a_start_without_room_says_so_and_changes_nothing(device: Device, limit: int) -> None:
    def confined() -> None:
        confine(limit)
        with pytest.raises(StorageError) as caught:
            device.opened()
        assert caught.value.exit_code == ExitCode.STORAGE

    assert not in_a_child(confined)
    assert device.goes_on() == "none"


# --- a small file system ------------------------------------------------------------------------


def the_disk_fills(root: Path, boot: Path) -> None:
    device = Device(root, boot)
    failed, stood = set(), set()
    for free in range(0, 200_000, 4_096):
        device.reset()
        state = device.opened()
        filler = leave(root, free)
        failed.add(device.take_part(state))
        filler.unlink()
        state.close()
        stood.add(device.goes_on())
    assert {"offer", "charge", "spool", ""} <= failed, failed
    assert {"none", "offered", "charged", "receipted"} <= stood, stood


def the_disk_of_the_second_head_fills(root: Path, boot: Path) -> None:
    device = Device(root, boot)
    state = device.opened()
    (boot / ".state.head.spare").unlink()  # Over which the next one would be written.
    filler = leave(boot, 0)
    assert device.take_part(state) == "charge"
    state.close()
    filler.unlink()
    assert device.goes_on() == "charged"


def the_disk_becomes_read_only(root: Path, boot: Path) -> None:
    device = Device(root, boot)

    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", root], check=True)

    for before in ("offer", "charge", "spool", "draw times", "send", "count"):
        device.reset()
        state = device.opened()
        for name, step in device.steps(state):
            if name == before:
                # A file that is open for writing keeps a file system from becoming read-only.
                state.close()
                remount("ro")
                with pytest.raises(StorageError):
                    device.opened()
                # An auditor may read it.
                proof = verify(root / "state", boot / "state.head")
                assert proof.charges == (1 if name in ("offer", "charge") else 2)
                remount("rw")
                break
            step()
        device.goes_on()


FULL_LIMITS = LimitSettings(maximum_charges=40, maximum_update_mib=1)
LARGEST = [(0, 870), (60, 830), (231, 730), (1_400, 400), (59_000, 17)]
"""Lengths of fragments, and how many of each an update may have within these limits."""


def no_disk_is_asked_for_room_once_it_is_taken(root: Path) -> None:
    """The largest rounds, settled and sat out, and as many charges as there may be, on a disk without a free
    byte; then the same after a power cut."""
    files = LedgerFiles(root / "state", root / "state.head")
    room = LedgerRoom.of(FULL_LIMITS, has_tokens=True)
    begin_ledger(files, {DATASET: BUDGET})
    state = AgentState(files, {DATASET: BUDGET}, room, check=replay)
    state.save_heads()
    fill(root)
    _ask_for_as_many_tokens_as_are_kept(state)
    _sit_out_as_often_as_is_remembered(state)
    for job, (length, count) in enumerate(LARGEST):
        assert count * (length + FRAGMENT_BYTES) <= FULL_LIMITS.maximum_update_mib << 20
        _take_part_in_a_job(state, bytes([job]) * 16, length, count)
    _kill(state)
    again = AgentState(files, {DATASET: BUDGET}, room, check=replay)
    _take_part_in_a_job(again, b"a" * 16, *LARGEST[2])
    again.close()
    assert verify(files.state_dir, files.second_head).charges == 3 * (len(LARGEST) + 1)


def _ask_for_as_many_tokens_as_are_kept(state: AgentState) -> None:
    """With as many tokens each as there may be; and for lists of keys, and conflicts of them."""
    many, keys = range(224), bytes(32)
    asked_by: list[bytes] = []
    for job in (bytes([number]) * 16 for number in range(100, 104)):
        requests = [
            Request(
                RoundKey("testers", job, number, "fragment", len(many), os.urandom(256)), keys, keys,
                Wish.TAKES_PART, "why " * 500,
                *(tuple(os.urandom(size) for _ in many) for size in (PREFIX_BYTES, 256, 256)), bytes(32),
            )
            for number in range(1, 17)
        ]  # fmt: skip
        state.keep_token_requests(job, 1, requests)
        tokens = [os.urandom(TOKEN_BYTES) for _ in many]
        for number in (1, 2):
            state.settle_tokens(job, number, Verdict.GRANTED, tokens, None)
        for number in range(20):
            asked_by += [os.urandom(4_400)] * (number < len(requests))
            for of, message in ((job, asked_by[-1]), (os.urandom(16), os.urandom(4_400))):
                state.keep_token_list(of, message, asked_by)
            state.keep_token_conflict(os.urandom(16), 1, os.urandom(4_400), os.urandom(4_400), 0.0)


def _sit_out_as_often_as_is_remembered(state: AgentState) -> None:
    """For reasons that quote what a coordinator has written at length."""
    why = "Model 'é', layer 0 Residual(body=(Tanh(), …" * 400

    def sit_out(number: int) -> None:
        with state.noted():  # Written as often as pages are many.
            for job, ending in ((b"s" * 16).hex(), "sat out"), (f"{number:032x}", "declined"):
                state.rounds.offer(job, number, bytes(32), 0.0)
                state.rounds.move(job, number, RoundState(ending), 0.0, why)
        if number % 100 == 0:
            state.write_notes()

    sit_out(1)
    of_state = {
        row[0]: tuple(row)
        for row in state.connection.execute("SELECT state, plan, reason, changed_at FROM rounds")
    }
    for number in range(2, 1_901):  # As if each had been offered, which takes the longer the more there are.
        with state.noted():
            state.connection.executemany(
                "INSERT INTO rounds (job, round, state, plan, reason, changed_at) VALUES (?, ?, ?, ?, ?, ?)",
                [
                    ((b"s" * 16).hex(), number, *of_state["sat out"]),
                    (f"{number:032x}", number, *of_state["declined"]),
                ],
            )
        if number % 100 == 0:
            state.write_notes()
    for number in range(1_901, 2_101):
        sit_out(number)


def _take_part_in_a_job(state: AgentState, job: bytes, length: int, count: int) -> None:
    name = job.hex()
    for number in (1, 2, 3):
        charge = charge_for(make_plan(job=job, round=number), DATA, state.ledger)
        state.offer(name, number, bytes(32), 0.0)
        state.charge([charge], 0.0)
        state.expire_other_rounds(name, number, 0.0)
        sent = [SpooledFragment(os.urandom(16), os.urandom(length), 0.0) for _ in range(count)]
        state.spool_round(name, number, sent, 0.0, None)
        state.reschedule((float(place), each.digest) for place, each in enumerate(sent))
        state.mark_sent({each.digest: 9.0 for each in sent}, 1.0)
        state.write_notes()
        if number < 3:  # The last ones expire with the next job.
            state.mark_counted([each.digest for each in sent], 2.0)
            state.write_notes()
    other = bytes(255 - value for value in job).hex()
    state.offer(other, 1, bytes(32), 0.0)
    state.sit_out(other, 1, bytes(32), "why " * 100, 0.0)
    state.expire_other_rounds(other, 1, 0.0)
    dummies = [SpooledFragment(os.urandom(16), os.urandom(350), 0.0) for _ in range(MAX_DUMMIES)]
    state.spool_dummies(other, 1, dummies, 0.0)


def _kill(state: AgentState) -> None:
    """What a power cut leaves: SQLite's own files stay as they are."""
    log = Path(f"{state.file}-wal")
    os.link(log, log.with_name("kept"))
    state.close()
    log.with_name("kept").rename(log)


def test_no_disk_is_asked_for_room_once_it_is_taken(tmp_path: Path) -> None:
    """Before, how much room records had left on the disk decided whether a round could be kept."""
    on_disks_of_their_own(no_disk_is_asked_for_room_once_it_is_taken, {tmp_path / "root": "64m"})


def test_no_room_is_taken_while_another_program_reads(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpagent.database_file.BUSY_S", 0.1)
    files, room = LedgerFiles(disk / "state", disk / "head"), LedgerRoom(3 << 20, 2 << 20)
    begin_ledger(files, {DATASET: BUDGET})
    with closing(open_readonly(files.database)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM entries").fetchone()
        with pytest.raises(StorageError, match="read by another program"):
            AgentState(files, {DATASET: BUDGET}, room, check=replay)
    AgentState(files, {DATASET: BUDGET}, room, check=replay).close()


def a_stop_leaves_the_room_for_the_next_start(root: Path) -> None:
    """A stop, whosever doing it is, and what records have left then: the disk is full to the last byte before
    the next start, again and again."""
    files = LedgerFiles(root / "state", root / "state.head")
    room = LedgerRoom.of(FULL_LIMITS, has_tokens=True)
    begin_ledger(files, {DATASET: BUDGET})
    AgentState(files, {DATASET: BUDGET}, room, check=replay).close()
    fill(root)
    for number in range(4):
        state = AgentState(files, {DATASET: BUDGET}, room, check=replay)
        _take_part_in_a_job(state, bytes([number]) * 16, *LARGEST[2])
        state.close()
        assert verify(files.state_dir, files.second_head).charges == 3 * (number + 1)
        fill(root)
    # A command of the owner takes no room of its own, either.
    raise_budget(files, {DATASET: Budget(2 * BUDGET.epsilon, BUDGET.delta)})
    assert verify(files.state_dir, files.second_head).charges == 12


def test_a_stop_leaves_the_room_for_the_next_start(tmp_path: Path) -> None:
    """Before, a broker that refused a connection, and so ended the agent, saw whether it came back: not where
    one picture had taken the last of the room that its log needs."""
    on_disks_of_their_own(a_stop_leaves_the_room_for_the_next_start, {tmp_path / "root": "64m"})


def test_what_the_last_stop_left_of_the_log_brings_nothing_back(disk: Path) -> None:
    files, room = LedgerFiles(disk / "state", disk / "head"), LedgerRoom(3 << 20, 2 << 20)
    begin_ledger(files, {DATASET: BUDGET})
    state = AgentState(files, {DATASET: BUDGET}, room, check=replay)
    charge_rounds(state, 1, 2)
    log = Path(f"{files.database}-wal")
    kept = log.with_name(f".{log.name}.room")
    assert kept.samefile(log)
    state.close()
    assert not log.exists()
    assert kept.stat().st_nlink == 1
    assert not any(kept.read_bytes()), "fragments as they are before they are sealed"
    larger = Budget(2 * BUDGET.epsilon, BUDGET.delta)
    raise_budget(files, {DATASET: larger})
    assert verify(files.state_dir, files.second_head).entries == 4
    state = AgentState(files, {DATASET: larger}, room, check=replay)
    assert (len(state.ledger.digests), state.ledger.budget(DATASET)) == (4, larger)
    charge_rounds(state, 3)
    _kill(state)  # The log counts now, and is no leftover.
    state = AgentState(files, {DATASET: larger}, room, check=replay)
    assert state.ledger.number_of_charges == 3
    state.close()


def test_a_ledger_that_is_refused_leaves_no_file_open(disk: Path) -> None:
    """Before, what holds the locks on the index of the log stayed open, once the room was taken."""
    files, room = LedgerFiles(disk / "state", disk / "head"), LedgerRoom(3 << 20, 2 << 20)
    begin_ledger(files, {DATASET: BUDGET})
    tamper(files.database, "UPDATE entries SET body = replace(body, '1', '2')")
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(LedgerError, match="entry 1"):
        AgentState(files, {DATASET: BUDGET}, room, check=replay)
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_room_that_a_power_cut_left_half_taken_is_taken_whole(disk: Path) -> None:
    files, room = LedgerFiles(disk / "state", disk / "head"), LedgerRoom(3 << 20, 2 << 20)
    begin_ledger(files, {DATASET: BUDGET})
    state = AgentState(files, {DATASET: BUDGET}, check=replay)
    state.connection.execute("CREATE TABLE room (filler BLOB NOT NULL) STRICT")
    state.connection.execute("INSERT INTO room VALUES (zeroblob(1048576))")
    state.close()
    for _ in range(2):
        state = AgentState(files, {DATASET: BUDGET}, room, check=replay)
        free = int(state.connection.execute("PRAGMA freelist_count").fetchone()[0])
        log = Path(f"{files.database}-wal").stat()
        assert free * 1_024 > room.database_bytes - (200 << 10)
        assert min(log.st_size, log.st_blocks * 512) >= room.log_bytes
        assert files.database.stat().st_blocks * 512 >= room.database_bytes
        state.close()
    assert verify(files.state_dir, files.second_head).entries == 1


@pytest.mark.parametrize(
    "scenario", [the_disk_fills, the_disk_of_the_second_head_fills, the_disk_becomes_read_only]
)
def test_a_round_outlives_a_full_and_a_read_only_disk(
    tmp_path: Path, scenario: Callable[[Path, Path], None]
) -> None:
    on_disks_of_their_own(scenario, {tmp_path / "root": "4m", tmp_path / "boot": "64k"})
