"""Folders of pictures and tables that somebody writes to while a board looks: one takes no other along."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pictures import aged, encoded, folder_of, noise, write
from row_boards import contents, expected, named, pictures, rows_of, table, tables, values_in

from agent import decoding
from dpagent.learning.data import format as formats
from dpagent.learning.data import glance, stored
from dpagent.learning.data.formats.tables import format as tables_format
from dpagent.learning.data.formats.tables import rows as tables_rows
from dpagent.learning.data.opening import list_declared


def test_a_last_row_without_an_end_stays_where_it_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was left out of a file written a moment ago, also one that had been there before: one row more at
    the front took it along."""
    board = tables(tmp_path, max_records=20)

    def put(*values: int) -> None:
        rows = "\n".join(f"{value},{value % 3}" for value in values)
        (board.root / "1.csv").write_text(f"x,label\n{rows}")

    put(1, 2, 3)
    assert values_in(board.look(at_once=True)) == [1, 2, 3]
    put(9, 1, 2, 3)
    assert values_in(board.look()) == [1, 2, 3, 9]
    put(9, 1, 2, 3, 4)
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", lambda _seconds: put(9, 1, 2, 3, 42))
        assert values_in(board.look()) == [1, 2, 3, 9], "4 becomes 42 while it is watched"
    assert values_in(board.look()) == [1, 2, 3, 9, 42]


ROWS = [*range(100, 160)]


@pytest.fixture
def changed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Has something done once, between listing and decoding."""
    real, left = decoding.decode_apart, list[Callable[[], None]]()

    def after_a_change(dataset: Any, numbers: Any, *others: Any) -> Any:
        if left:
            left.pop()()
        return real(dataset, numbers, *others)

    monkeypatch.setattr(decoding, "decode_apart", after_a_change)
    return left.append


@pytest.mark.parametrize("at_once", [False, True])
def test_a_table_that_is_replaced_while_it_is_decoded_loses_no_row(
    tmp_path: Path, changed_meanwhile: Callable[[Callable[[], None]], None], at_once: bool
) -> None:
    """All rows that were not decoded yet counted as unusable for good: one row at the end took 595 along."""
    board = tables(tmp_path, max_records=100)
    table(board, [1])
    board.look(at_once=True)
    table(board, [1, *ROWS])

    def replaced() -> None:
        table(board, [1, *ROWS, 99], "new")
        (board.root / "new").replace(board.root / "1.csv")

    changed_meanwhile(replaced)
    board.look(at_once=at_once)
    assert rows_of(board) == [(value, value % 3) for value in [1, *ROWS]]
    board.look()
    assert rows_of(board) == [(value, value % 3) for value in [1, 99, *ROWS]]


@pytest.mark.parametrize("at_once", [False, True])
def test_a_row_at_the_front_of_a_table_while_it_is_decoded_keeps_no_other_out(
    tmp_path: Path, changed_meanwhile: Callable[[Callable[[], None]], None], at_once: bool
) -> None:
    """All that follow had others' labels, for good; then they waited for the next look."""
    board = tables(tmp_path, max_records=100)
    table(board, [111])
    board.look(at_once=True)
    table(board, [111, *ROWS])
    changed_meanwhile(lambda: table(board, [112, 111, *ROWS]))
    board.look(at_once=at_once)
    assert rows_of(board) == sorted((value, value % 3) for value in [111, *ROWS])
    board.look()
    assert rows_of(board) == sorted((value, value % 3) for value in [111, 112, *ROWS])


@pytest.mark.parametrize("at_once", [False, True])
def test_a_table_that_is_replaced_while_it_is_listed_keeps_no_row_of_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """The whole look was given up: 20 new rows of another table waited, as long as somebody wrote."""
    board = tables(tmp_path, max_records=100)
    table(board, [1], "a.csv")
    table(board, [2], "b.csv")
    board.look(at_once=True)
    table(board, [1, *ROWS], "a.csv")
    real, changes = decoding.list_declared, []

    def replaced_afterwards(*arguments: Any, **others: Any) -> Any:
        listed = real(*arguments, **others)
        changes.append(1)
        table(board, [200 + len(changes), 2], "new")
        (board.root / "new").replace(board.root / "b.csv")
        return listed

    monkeypatch.setattr(decoding, "list_declared", replaced_afterwards)
    board.look(at_once=at_once)
    assert rows_of(board) == [(value, value % 3) for value in [1, 2, *ROWS]]


@pytest.mark.parametrize("back_s", [3_600.0, 6e8])
def test_a_clock_that_is_set_back_takes_no_picture_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back_s: float
) -> None:
    """All pictures that had changed after that time passed for young; their rows were erased."""
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1, 2))
    board.look(at_once=True)
    write(board.root / named(4)[0], encoded(noise(4)), age_s=0)
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() - int(back_s * 1e9))
    assert contents(board.look()) == expected(0, 1, 2, 4), "also one of a time that is to come"


def test_a_clock_that_is_set_to_when_pictures_were_copied_has_none_decoded_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first start. All passed for young, and the next look took as many as are new at most: there, one
    picture more keeps another out."""
    monkeypatch.setattr(decoding, "LOOK_S", 40.0)
    board = pictures(tmp_path)
    folder_of(board.root, *named(*range(6)))
    changed = (board.root / named(0)[0]).stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: changed + 10**9)
        board.look(at_once=True)
    assert {*contents(board.look())} == {*expected(*range(6))}


def test_a_young_picture_waits_and_one_that_was_known_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1, 2))
    board.look(at_once=True)
    write(board.root / named(4)[0], encoded(noise(4)), age_s=0)
    changed = (board.root / named(0)[0]).stat().st_mtime_ns
    assert contents(board.look()) == expected(0, 1, 2)
    monkeypatch.setattr(time, "time_ns", lambda: changed + 1)
    assert {*expected(0, 1, 2)} <= {*contents(board.look())}


def test_a_file_that_becomes_a_pipe_as_it_is_opened_keeps_no_look_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = tables(tmp_path, max_records=100)
    table(board, [1], "a.csv")
    table(board, [2], "b.csv")
    board.look(at_once=True)
    table(board, [1, 3], "a.csv")
    real = stored.require_readable

    def replaced_afterwards(path: Path) -> None:
        real(path)
        if path.name == "b.csv":
            path.unlink()
            os.mkfifo(path)

    monkeypatch.setattr(stored, "require_readable", replaced_afterwards)
    assert values_in(board.look()) == [1, 3]


def test_a_picture_that_is_away_while_it_would_be_decoded_counts_when_it_is_back(
    tmp_path: Path, changed_meanwhile: Callable[[Callable[[], None]], None]
) -> None:
    """It counted no more for good, though it lay there whole and unchanged."""
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1, 2))
    board.look(at_once=True)
    for seed in (3, 4):
        write(board.root / named(seed)[0], encoded(noise(seed)))
        aged(board.root / named(seed)[0], 60)
    place, away = board.root / named(3)[0], tmp_path / "away"

    def moved() -> None:
        place.rename(away)

    changed_meanwhile(moved)
    assert contents(board.look()) == expected(0, 1, 2, 4)
    away.rename(place)
    rows = board.look()
    assert (contents(rows), rows.origin.left_out) == (expected(0, 1, 2, 3, 4), ())


@pytest.mark.parametrize("name", ["x" * 300, "/proc/self/mem"])
def test_an_entry_of_the_folder_that_cannot_be_looked_at_keeps_no_row_of_others_out(
    tmp_path: Path, name: str
) -> None:
    """A link to a name of 300 letters ended every look."""
    board = tables(tmp_path, max_records=100)
    table(board, [1], "a.csv")
    board.look(at_once=True)
    (board.root / "z.csv").symlink_to(name)
    table(board, [1, 2, 3], "a.csv")
    for _ in range(2):
        assert values_in(board.look()) == [1, 2, 3]


def test_a_table_that_goes_while_the_folder_is_glanced_at_takes_no_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passed for data that are gone: one table that was renamed took the rows of all others along."""
    board = tables(tmp_path, max_records=100)
    table(board, [1, 2], "a.csv")
    table(board, [3], "b_new.csv")
    board.look(at_once=True)
    real = tables_format.table_files

    def renamed_afterwards(path: Path, *arguments: Any) -> list[Path]:
        found = real(path, *arguments)
        if (path / "b_new.csv").exists():
            (path / "b_new.csv").rename(path / "b.csv")
        return found

    monkeypatch.setattr(tables_format, "table_files", renamed_afterwards)
    for _ in range(2):
        assert values_in(board.look()) == [1, 2, 3]


def test_a_table_that_goes_while_it_is_listed_takes_no_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = tables(tmp_path, max_records=100)
    table(board, [1, 2], "a.csv")
    table(board, [3], "b.csv")
    board.look(at_once=True)
    real = tables_format.table_files

    def gone_afterwards(path: Path, *arguments: Any) -> list[Path]:
        found = real(path, *arguments)
        (path / "b.csv").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(tables_format, "table_files", gone_afterwards)
    table(board, [1, 2, 4], "a.csv")
    assert values_in(board.look()) == [1, 2, 4]


def test_a_part_of_a_row_that_is_left_at_an_end_costs_the_next_row_of_its_table_alone(tmp_path: Path) -> None:
    """The threat model has it as open. Lines end, so the row after the next one stands where it belongs."""
    board = tables(tmp_path, max_records=100)
    table(board, [1, 2], "a.csv")
    table(board, [3], "b.csv")
    board.look(at_once=True)
    with (board.root / "a.csv").open("a") as stream:
        stream.write("4")  # Its writer ends here.
        stream.write("5,2\n6,0\n")
    assert values_in(board.look()) == [1, 2, 3, 6, 45]
    with (board.root / "a.csv").open("a") as stream:
        stream.write("7,")
        stream.write("8,2\n9,0\n")
    assert values_in(board.look()) == [1, 2, 3, 6, 9, 45]


def test_a_correction_whose_time_is_set_back_is_found_without_another_record(tmp_path: Path) -> None:
    """It came in when one other record did, which so moved all that were corrected."""
    board = tables(tmp_path, max_records=200)
    table(board, ROWS)
    aged(board.root / "1.csv", 3_600)
    then = (board.root / "1.csv").stat().st_mtime_ns
    board.look(at_once=True)
    board.look()
    table(board, [value + 300 for value in ROWS])
    os.utime(board.root / "1.csv", ns=(then, then))
    assert values_in(board.look()) == [value + 300 for value in ROWS]


@pytest.mark.parametrize("lines", ["\n", "1,1\n"])
@pytest.mark.parametrize("begins", ["x,label\n", ""])
def test_a_table_of_very_many_lines_keeps_no_row_of_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, begins: str
) -> None:
    """71 MB of empty lines took a look longer than it may, and 1.8 million rows took all of its memory."""
    monkeypatch.setattr(formats, "_FEW_RECORDS", 1_000)
    board = tables(tmp_path, max_records=20)
    table(board, [7], "1.csv")
    board.look(at_once=True)
    table(board, [7, 8, 9], "1.csv")
    (board.root / "z.csv").write_text(begins + 500_000 * lines)
    read = []
    real = tables_rows.Lines._next

    def counting(self: tables_rows.Lines) -> bytes:
        read.append(1)
        return real(self)

    monkeypatch.setattr(tables_rows.Lines, "_next", counting)
    rows = board.look()
    assert {7, 8, 9} <= set(values_in(rows))
    assert len(read) < 30_000, "with the lines that a header may come after"
    if begins:
        assert any("what follows line 1,076 is not read" in each for each in rows.origin.left_out)


def test_more_tables_than_files_may_be_open_are_read_one_by_one(tmp_path: Path) -> None:
    board = tables(tmp_path, max_records=1_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(open_now + 60):
        table(board, [number], f"{number}.csv")
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 50, hard))
    try:
        rows = board.look(at_once=True)
        assert values_in(rows) == list(range(open_now + 60))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("kind", ["pictures", "tables"])
def test_of_very_many_entries_a_look_keeps_the_first_that_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It kept and sorted all of them: one hidden file more than memory holds took in nothing."""
    monkeypatch.setattr(formats, "_FEW_RECORDS", 4 - 4 * 8)
    board = pictures(tmp_path) if kind == "pictures" else tables(tmp_path)
    opened = []
    real = glance.open_plain
    monkeypatch.setattr(glance, "open_plain", lambda path: opened.append(path) or real(path))
    if kind == "pictures":
        folder_of(board.root, *named(0, 1))  # two pictures in two folders
    else:
        for value in (0, 1, 2, 3):
            table(board, [], f"{value}.csv")
    before = len(board.look(at_once=True))
    for number in range(50):
        name = f".{number}.png" if number % 2 else f"{number}.txt"
        for folder in (board.root, board.root / "0"):
            folder.mkdir(exist_ok=True)
            (folder / name).touch()
    if kind == "pictures":
        write(board.root / "1" / "z.png", encoded(noise(9)))
        rows = board.look()
        assert contents(rows) == expected(0, 1)
        assert any("more than is looked at" in text for text in rows.origin.left_out)
    else:
        table(board, [5], "9.csv")
        opened.clear()
        assert len(board.look()) == before
        assert {path.name for path in opened} == {f"{value}.csv" for value in range(4)}


def test_a_board_says_the_first_hundred_things_that_it_leaves_out(tmp_path: Path) -> None:
    """A sentence each took more memory than a look has."""
    for name in ("pictures", "tables"):
        (tmp_path / name).mkdir()
    board = pictures(tmp_path / "pictures")
    (board.root / "0").mkdir()
    for number in range(150):
        (board.root / "0" / f"{number}.png").symlink_to("nowhere")
    of_tables = tables(tmp_path / "tables")
    for number in range(150):
        write(of_tables.root / f"{number}.csv", b"y,label\n1,1\n")
    for each in (board, of_tables):
        sentences = list_declared(each.settings, growing=True).origin.left_out
        assert len(sentences) == 101
        assert "50 more" in sentences[-1]
