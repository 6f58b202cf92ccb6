"""The files of rows and their index: what they cost, what a look, a crash or a bad disk does to them."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import PATIENCE_S
from pictures import encoded, folder_of, noise, write
from row_boards import Board, contents, expected, named, pictures

import agent.row_files
import agent.rows
from agent import decoding
from agent.decoding import bring_up_to_date
from agent.look_messages import LookOrder, LookResult
from agent.records import Records
from agent.rows import RowStore
from dpagent import storage
from dpagent.errors import DataError, StorageError


@pytest.fixture
def tmp_path(disk: Path) -> Path:
    """What files take of a disk is that of a disk."""
    return disk


@pytest.mark.parametrize("damage", ["no index", "rubbish", "a bit", "cut", "no rows", "rows cut"])
def test_damaged_files_are_made_again(tmp_path: Path, damage: str) -> None:
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1, 2))
    board.look(at_once=True)
    index, rows = board.state / "records.index", board.state / "records.rows"
    whole = index.read_bytes()
    match damage:
        case "no index":
            index.unlink()
        case "rubbish":
            index.write_bytes(b"[" * 10_000)
        case "a bit":
            index.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
        case "cut":
            index.write_bytes(whole[:-3])
        case "no rows":
            rows.unlink()
        case "rows cut":
            os.truncate(rows, 5)
    assert contents(board.look(at_once=True)) == expected(0, 1, 2)


def test_the_size_of_an_index_tells_nothing_of_the_records(tmp_path: Path) -> None:
    """On a full disk, a sentence about one record would decide whether those of a look count."""
    sizes = set()
    for number, (good, bad) in enumerate([(0, 0), (2, 1), (0, 20)]):
        (tmp_path / str(number)).mkdir()
        board = pictures(tmp_path / str(number), max_records=30)
        folder_of(board.root, *named(*range(good)))
        for place in range(bad):
            write(board.root / "1" / ("\U0001f4f7" * 50 + f"{place}.png"), b"\x89PNG\r\n\x1a\n" + bytes(40))
        rows = board.look(at_once=True)
        assert (len(rows), len(rows.origin.left_out) > 0) == (good, bad > 0)
        sizes.add((board.state / "records.index").stat().st_size)
    assert len(sizes) == 1, sizes


def index_files(board: Board) -> set[tuple[int, int]]:
    """The numbers and blocks of the files that are, or may become, an index."""
    names = ("index", "found", "spare")
    known = [board.state / f"records.{name}" for name in names]
    return {(each.stat().st_ino, each.stat().st_blocks) for each in known if each.exists()}


def test_a_look_takes_no_room_on_the_disk_whatever_it_finds(tmp_path: Path) -> None:
    """Before, one new picture took 400 kB, which on a full disk the ledger lacked: the device fell silent."""
    board = pictures(tmp_path, max_records=2_000)
    folder_of(board.root, *named(0, 1, 2))
    board.look(at_once=True)
    before = index_files(board)
    assert len(before) == 2
    for names in ([], named(3), named(4, 5)):
        folder_of(board.root, *names)
        bring_up_to_date(LookOrder(board.settings, board.state, at_once=False))
        assert index_files(board) == before
        board.store.take_found()
        assert index_files(board) == before
    assert len(board.newest()) == 6


def test_where_a_full_disk_refuses_what_is_there_a_look_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As XFS does. Before, one picture that took the last block kept all others out that came with it."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    board = pictures(tmp_path, max_records=2_000)
    folder_of(board.root, *named(0, 1, 2))
    board.look(at_once=True)
    monkeypatch.setattr("os.posix_fallocate", full)
    folder_of(board.root, *named(3))
    bring_up_to_date(LookOrder(board.settings, board.state, at_once=False))
    board.store.take_found()
    assert len(board.newest()) == 4


@pytest.mark.parametrize("takes_found", [False, True])
@pytest.mark.parametrize("name", ["link", "replace_durably"])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_crash_while_indexes_change_places_leaves_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, step: int, takes_found: bool
) -> None:
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1))
    board.look(at_once=True)
    before = index_files(board)
    # So that no new file has the number of one that is gone.
    kept = [file.open("rb") for file in board.state.glob("records.[is]*")]
    index = board.store.load()
    assert index is not None
    if takes_found:
        board.store.publish_found(index)
    where = os if name == "link" else agent.rows
    original, calls = getattr(where, name), []

    def dies(*arguments: Any) -> None:
        if len(calls) == step:
            raise KeyboardInterrupt
        calls.append(arguments)
        original(*arguments)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(where, name, dies)
        board.store.take_found() if takes_found else board.store.publish(index)
    assert contents(board.newest()) == expected(0, 1)
    board.store.drop_found()
    board.store.publish(index)
    assert index_files(board) == before
    assert contents(board.newest()) == expected(0, 1)
    assert not (board.state / "records.old").exists()
    for file in kept:
        file.close()


def test_as_much_is_made_durable_whether_a_look_found_something_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round takes it over while it trains. Before, only what was found took the disk's time: 10 ms on a PC
    with a busy disk, which showed where a coordinator kept the agent so busy that a slot only just lasted."""
    board, waits = pictures(tmp_path), []
    folder_of(board.root, *named(0, 1))
    board.look(at_once=True)
    records, original = Records(board.settings, board.state), os.fsync

    def counting(descriptor: int) -> None:
        waits.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        original(descriptor)

    monkeypatch.setattr(os, "fsync", counting)
    folder_of(board.root, *named(2))
    for found in (False, True):
        if found:
            bring_up_to_date(LookOrder(board.settings, board.state, at_once=False))
        waits.clear()
        records.adopt(LookResult())
        assert waits == [board.state.name] * 2
        assert len(records.dataset) == len(board.newest()) == 2 + found
        assert not (board.state / "records.link").exists()


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_crash_at_the_very_first_index_leaves_two_files_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Before, a crash between the two left one, and the first look that found something took the other's
    room."""
    board, calls = pictures(tmp_path), []
    folder_of(board.root, *named(0, 1))
    replace = agent.rows.replace_durably

    def dies(*arguments: Any) -> None:
        if len(calls) == step:
            raise KeyboardInterrupt
        calls.append(arguments)
        replace(*arguments)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        for module in (agent.row_files, agent.rows):
            patch.setattr(module, "replace_durably", dies)
        bring_up_to_date(LookOrder(board.settings, board.state, at_once=True))
    held = [file.stat() for file in board.state.glob("records.[ios]*")]
    assert len({known.st_ino for known in held}) == 2
    assert len({known.st_blocks for known in held}) == 1
    board.look(at_once=True)
    assert len(index_files(board)) == 2
    assert not (board.state / "records.old").exists()
    assert contents(board.newest()) == expected(0, 1)


def test_what_was_found_is_taken_after_a_crash_while_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1))
    board.look(at_once=True)
    write(board.root / "2" / "2.png", encoded(noise(2)))
    bring_up_to_date(LookOrder(board.settings, board.state, at_once=False))
    before = index_files(board)

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        for module in (agent.row_files, agent.rows):
            patch.setattr(module, "replace_durably", dies)
        board.store.take_found()
    assert (board.state / "records.old").exists()
    board.store.take_found()
    assert contents(board.newest()) == expected(0, 1, 2)
    assert index_files(board) == before
    assert not (board.state / "records.old").exists()


@pytest.mark.parametrize("is_found", [False, True])
def test_what_was_found_goes_when_another_index_is_written(tmp_path: Path, is_found: bool) -> None:
    """It would count later, and the new one would take the room of a third."""
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1))
    board.look(at_once=True)
    before, index = index_files(board), board.store.load()
    assert index is not None
    board.store.publish_found(index.emptied("gone"))
    board.store.publish_found(index) if is_found else board.store.publish(index)
    assert index_files(board) == before
    board.store.take_found()
    assert contents(board.newest()) == expected(0, 1)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were brought to the disk, and those that took another's place, in order."""
    noted: list[str] = []
    fsync, replace = os.fsync, agent.rows.replace_durably

    def synced(descriptor: int) -> None:
        noted.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def replaced(path: Path, new: Path) -> None:
        noted.append(f"{new.name} -> {path.name}")
        replace(path, new)

    monkeypatch.setattr(os, "fsync", synced)
    for module in (agent.row_files, agent.rows):
        monkeypatch.setattr(module, "replace_durably", replaced)
    return noted


def test_an_index_is_on_the_disk_before_it_takes_its_place(tmp_path: Path, writes: list[str]) -> None:
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1))
    board.look(at_once=True)
    write(board.root / "2" / "2.png", encoded(noise(2)))
    board.look()
    places = [place for place, each in enumerate(writes) if each.startswith("records.spare -> ")]
    assert {writes[place] for place in places} == {
        "records.spare -> records.index", "records.spare -> records.found",
    }  # fmt: skip
    assert {writes[place - 1] for place in places} == {"records.spare"}


@pytest.mark.parametrize("change", ["a new one", "one is gone", "no folder"])
def test_rows_are_on_the_disk_before_an_index_tells_what_they_hold(
    tmp_path: Path, writes: list[str], change: str
) -> None:
    """After a power cut, a row that an index calls erased would hold its record for good."""
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1))
    board.look(at_once=True)
    match change:
        case "a new one":
            write(board.root / "2" / "2.png", encoded(noise(2)))
        case "one is gone":
            (board.root / named(0)[0]).unlink()
        case "no folder":
            board.root.rename(tmp_path / "elsewhere")
    if change != "a new one":
        board.look()  # The next erases.
    writes.clear()
    board.look()
    found = writes.index("records.spare -> records.found")
    assert [each for each in writes[:found] if each != "state"][-2:] == ["records.rows", "records.spare"]
    index = board.store.load()
    assert index is not None
    assert not len(index.stale)


def test_rows_are_on_the_disk_before_what_is_published_on_the_way_tells_of_them(
    tmp_path: Path, writes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "_PUBLISH_S", 0.0)
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1, 2))
    board.look(at_once=True)
    _, *others = [place for place, each in enumerate(writes) if each == "records.spare -> records.index"]
    assert len(others) == 4, "for each record, and for all"
    assert {writes[place - 2] for place in others} == {"records.rows"}


def test_of_two_who_write_one_waits_until_the_other_is_done(tmp_path: Path) -> None:
    board, began, entered = pictures(tmp_path), threading.Event(), threading.Event()

    def second() -> None:
        began.set()
        with RowStore(board.state, board.settings).writing():
            entered.set()

    other = threading.Thread(target=second)
    with board.store.writing():
        other.start()
        assert began.wait(PATIENCE_S)
        assert not entered.wait(0.2)
    other.join(PATIENCE_S)
    assert entered.is_set()


def test_a_row_that_the_disk_damaged_costs_itself_alone(tmp_path: Path) -> None:
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1, 2))
    rows = board.look(at_once=True)
    with board.store.rows_file.open("r+b") as file:
        file.seek(rows.record_bytes + 7)
        file.write(b"\x00\x01\x02\x03")
    _, problems = rows.try_read(np.arange(3))
    assert problems.keys() == {1}
    assert "row 1 is damaged" in problems[1]
    with pytest.raises(DataError, match="row 1 is damaged"):
        rows.batch(np.arange(3))


def test_every_record_is_one_read_of_as_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So what a round reads is a matter of how many records there are, and of none of them."""
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1))
    write(board.root / "2" / "2.jpg", encoded(noise(2, 900, 900), "JPEG", progressive=True))
    rows = board.look(at_once=True)
    reads, read = [], os.preadv

    def noted(descriptor: int, buffers: Any, offset: int) -> int:
        reads.append(sum(len(buffer) for buffer in buffers))
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    rows.batch(np.array([2, 0, 1]))
    assert reads == [rows.record_bytes] * 3 == [12 * 8 * 3] * 3


def test_all_rows_are_allocated_at_the_start_and_without_room_nothing_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = pictures(tmp_path, max_records=5_000)
    size = 5_000 * 12 * 8 * 3
    with monkeypatch.context() as patch:
        patch.setattr(storage, "SPACE_LEFT", 1 << 60)
        with pytest.raises(
            StorageError, match=rf"records\.rows: the rows of 5,000 records take {size:,} bytes"
        ):
            board.look(at_once=True)
    board.look(at_once=True)
    known = board.store.rows_file.stat()
    assert known.st_size == size <= known.st_blocks * 512
    assert known.st_mode & 0o777 == (board.state / "records.index").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("records", [0, 1])
def test_a_file_system_without_hard_links_is_refused_whether_there_is_a_record_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: int
) -> None:
    """As FAT is. Before, an agent without records started there, and with one it did not."""

    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    board = pictures(tmp_path)
    folder_of(board.root, *named(*range(records)))
    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(StorageError, match="no hard links"):
        board.look(at_once=True)
