"""Rows brought up to date: what is new is decoded, what is known stays, and no reader is disturbed."""

from __future__ import annotations

import os
import resource
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pictures import aged, damaged_inside, encoded, folder_of, noise, write
from row_boards import Board, contents, expected, named, pictures, table, tables, values_in

from agent import decoding, effort
from agent.bounded_decoding import Outcome
from agent.decoding import Order, bring_up_to_date
from agent.records import Records
from agent.rows import RowStore
from dpagent.errors import ConfigurationError, DataError
from dpagent.learning.data import stored
from dpagent.learning.data.formats.tables import dataset as tables_dataset
from dpagent.learning.data.formats.tables import format as tables_format
from dpagent.learning.data.formats.tables import rows as tables_rows


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records each look decoded."""
    counts: list[int] = []
    real = decoding.decode_apart

    def counting(dataset: Any, numbers: Any, *others: Any) -> Any:
        counts.append(len(numbers))
        return real(dataset, numbers, *others)

    monkeypatch.setattr(decoding, "decode_apart", counting)
    return counts


def test_only_what_is_new_or_changed_is_decoded(tmp_path: Path, decoded: list[int]) -> None:
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1, 2))
    assert contents(board.look(at_once=True)) == expected(0, 1, 2)
    sign = board.store.sign()
    for at_once in (True, False):
        assert contents(board.look(at_once=at_once)) == expected(0, 1, 2)
    assert board.store.sign() == sign  # nothing was written
    write(board.root / "0" / "3.png", encoded(noise(3)))
    write(board.root / "1" / "1.png", encoded(noise(4)), age_s=30)
    (board.root / "2" / "2.png").unlink()
    assert contents(board.look()) == expected(0, 3, 4)
    assert decoded == [3, 0, 0, 2]


def test_a_broken_picture_is_not_tried_again_until_it_changes(tmp_path: Path, decoded: list[int]) -> None:
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1))
    broken = write(board.root / "2" / "2.png", damaged_inside(encoded(noise(2))))
    for _ in range(2):
        rows = board.look(at_once=True)
        assert contents(rows) == expected(0, 1)
        (sentence,) = rows.origin.left_out
        assert sentence == f"{board.root}: 2/2.png: broken data stream when reading image file."
    write(broken, encoded(noise(2)), age_s=30)
    rows = board.look()
    assert (contents(rows), rows.origin.left_out) == (expected(0, 1, 2), ())
    assert decoded == [3, 0, 1]


def test_other_limits_try_a_broken_record_again(tmp_path: Path, decoded: list[int]) -> None:
    folder_of(tmp_path / "data", *named(0, 1))
    write(tmp_path / "data" / "2" / "2.png", damaged_inside(encoded(noise(2))))
    for seconds in (5, 5, 6):
        board = pictures(tmp_path, decoding={"seconds": seconds})
        rows = board.look(at_once=True)
        assert contents(rows) == expected(0, 1)
        assert len(rows.origin.left_out) == 1
    assert decoded == [3, 0, 1]


def test_what_the_board_had_no_time_for_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = tables(tmp_path)
    table(board, [1, 2, 3])
    real = decoding.decode_apart

    def late(dataset: Any, numbers: Any, *others: Any) -> Any:
        for number, outcome in zip(numbers, real(dataset, numbers, *others), strict=True):
            yield Outcome(0, "row 2: late.", is_final=False) if number == 1 else outcome

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "decode_apart", late)
        rows = board.look(at_once=True)
    assert (values_in(rows), rows.origin.left_out) == ([1, 3], ("row 2: late.",))
    rows = board.look()
    assert (values_in(rows), rows.origin.left_out) == ([1, 2, 3], ())


def test_tables_that_did_not_change_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = tables(tmp_path)
    table(board, [1, 2])
    board.look(at_once=True)
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "list_declared", None)
        assert values_in(board.look()) == [1, 2]
    table(board, [1, 2, 3])
    assert values_in(board.look()) == [1, 2, 3]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_reader_keeps_its_records_while_a_look_replaces_them(tmp_path: Path, at_once: bool) -> None:
    """With all rows taken, a look has to wait with what is new; when the agent starts, nobody reads yet."""
    board = tables(tmp_path, max_records=3)
    table(board, [1, 2, 3])
    reader = board.look(at_once=True)
    table(board, [1, 4, 5])
    now = board.look(at_once=at_once)
    if at_once:
        assert values_in(now) == [1, 4, 5]
        assert reader.try_read(np.arange(3))[1].keys() == {1, 2}  # it notices, and mixes nothing up
        return
    assert (values_in(reader), values_in(now)) == ([1, 2, 3], [1])
    os.utime(board.root / "1.csv")  # as any change to the folder does
    assert values_in(board.look()) == [1, 4, 5]


def test_a_look_that_is_killed_leaves_the_rows_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = tables(tmp_path, max_records=4)
    table(board, [1, 2, 3])
    board.look(at_once=True)
    table(board, [2, 4, 5])
    real = decoding.decode_apart

    def dies(*arguments: Any) -> Any:
        yield next(real(*arguments))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "decode_apart", dies)
        with pytest.raises(KeyboardInterrupt):
            board.look(at_once=True)
    assert values_in(board.newest()) == [2]
    assert values_in(board.look(at_once=True)) == [2, 4, 5]


@pytest.mark.parametrize("at_once", [False, True])
def test_a_record_that_a_killed_look_had_decoded_is_erased_when_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1))
    board.look(at_once=True)
    newer = write(board.root / "2" / "2.png", encoded(noise(2)))
    real = decoding.decode_apart

    def dies(*arguments: Any) -> Any:
        yield next(real(*arguments))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "decode_apart", dies)
        with pytest.raises(KeyboardInterrupt):
            board.look(at_once=at_once)
    assert noise(2).tobytes() in board.store.rows_file.read_bytes()
    newer.unlink()
    assert contents(board.look(at_once=at_once)) == expected(0, 1)
    assert noise(2).tobytes() not in board.store.rows_file.read_bytes()


def test_a_record_that_was_not_finished_in_the_row_of_another_is_erased_when_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1))
    board.look(at_once=True)
    (board.root / named(0)[0]).unlink()
    board.look()
    newer = write(board.root / "2" / "2.png", encoded(noise(2)))
    real = decoding.decode_apart

    def late(*arguments: Any) -> Any:
        for _ in real(*arguments):
            yield Outcome(0, "late.", is_final=False)

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "decode_apart", late)
        board.look()
    rows = board.store.rows_file.read_bytes()
    assert [noise(seed).tobytes() in rows for seed in (0, 1, 2)] == [False, True, True]
    newer.unlink()
    board.look()
    assert noise(2).tobytes() not in board.store.rows_file.read_bytes()


def test_what_is_decoded_is_published_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_PUBLISH_S", 0.0)
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1, 2))
    seen, publish = [], RowStore.publish

    def noted(store: RowStore, index: Any) -> None:
        publish(store, index)
        seen.append(contents(store.open(index)))

    monkeypatch.setattr(RowStore, "publish", noted)
    board.look(at_once=True)
    assert seen[0] == []
    assert [len(each) for each in seen][-4:] == [1, 2, 3, 3], "the last says that these are all"
    assert seen[-1] == expected(0, 1, 2)


def test_other_settings_begin_anew(tmp_path: Path, decoded: list[int]) -> None:
    folder_of(tmp_path / "data", *named(0, 1))
    pictures(tmp_path).look(at_once=True)
    small = {"size": [2, 2], "mode": "grey", "folder": "."}
    other = pictures(tmp_path, images=small)
    assert other.store.load() is None
    assert other.look(at_once=True).shape == (2, 2, 1)
    assert other.store.rows_file.stat().st_size == 8 * 4
    # The rows of before are gone: going back finds none of them.
    again = pictures(tmp_path)
    assert again.store.load() is None
    assert contents(again.look(at_once=True)) == expected(0, 1)
    # Limits and the ledger's name give no row its meaning.
    named_otherwise = pictures(tmp_path, name="yours", features_mib=3, decoding={"seconds": 1})
    assert contents(named_otherwise.look(at_once=True)) == expected(0, 1)
    assert decoded == [2, 2, 2, 0]


def test_with_more_than_declared_a_board_does_not_start(tmp_path: Path) -> None:
    board = pictures(tmp_path, max_records=3)
    folder_of(board.root, *named(0, 1, 2, 3))
    with pytest.raises(DataError, match=r"holds 4 records; expected at most 3\. Raise `max_records`"):
        board.look(at_once=True)


def test_a_record_that_is_used_stays_and_a_free_row_goes_to_the_first_that_waits(tmp_path: Path) -> None:
    board = pictures(tmp_path, max_records=2)
    folder_of(board.root, "1/1.png", "2/2.png")
    before = contents(board.look(at_once=True))
    write(board.root / "0" / "3.png", encoded(noise(3)))
    rows = board.look()
    assert contents(rows) == before
    assert rows.origin.left_out == (
        "1 record beyond `max_records: 2` are not used. Raise it, or remove records.",
    )
    (board.root / "2" / "2.png").unlink()
    board.look()
    now = contents(board.look())
    assert len(now) == 2
    assert set(before) - set(now) == {(noise(1).tobytes(), 2)}


@pytest.mark.heavy
@settings(
    max_examples=25, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(
    stages=st.lists(st.sets(st.integers(0, 12), max_size=6), min_size=1, max_size=4),
    most=st.integers(2, 8),
    newcomer=st.integers(20, 30),
    begins=st.integers(0, 3),
    restarts=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_one_record_more_changes_itself_alone_and_at_the_bound_one_other(
    tmp_path_factory: pytest.TempPathFactory,
    stages: list[set[int]],
    most: int,
    newcomer: int,
    begins: int,
    restarts: list[bool],
) -> None:
    """Sets that grow only, as folders and tables do, with restarts between."""
    folder = tmp_path_factory.mktemp("boards")
    boards = []
    for name in ("one", "other"):
        (folder / name).mkdir()
        boards.append(tables(folder / name, max_records=most))
    grown = [sorted(set().union(*stages[: stage + 1])) for stage in range(len(stages))]
    more = [sorted({*each, newcomer}) if stage >= begins else each for stage, each in enumerate(grown)]
    for stage, sets in enumerate(zip(grown, more, strict=True)):
        used = []
        for board, values in zip(boards, sets, strict=True):
            table(board, values)
            fits = len(values) <= most
            used.append(set(values_in(board.look(at_once=fits and (stage == 0 or restarts[stage])))))
        assert len(used[0] ^ used[1]) <= (1 if len(sets[1]) <= most else 2)


@pytest.mark.parametrize("gone", ["one", "all", "the folder"])
def test_what_its_owner_takes_away_is_erased(tmp_path: Path, gone: str) -> None:
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1))
    board.look(at_once=True)
    if gone == "the folder":
        board.root.rename(tmp_path / "elsewhere")
    else:
        for seed in (0, 1) if gone == "all" else (0,):
            (board.root / named(seed)[0]).unlink()
    kept = [noise(1).tobytes()] if gone == "one" else []
    held = []
    for _ in range(2):
        board.look()
        rows = board.store.rows_file.read_bytes()
        held.append([noise(seed).tobytes() in rows for seed in (0, 1)])
    assert held == [[True, True], [False, bool(kept)]]  # a reader may have had it, the first time
    sign = board.store.sign()
    assert [one for one, _ in contents(board.look())] == kept
    assert board.store.sign() == sign


def test_a_row_that_its_owner_takes_from_a_table_is_erased(tmp_path: Path) -> None:
    board = tables(tmp_path)
    table(board, [1, 2, 77])
    board.look(at_once=True)
    table(board, [1, 2])
    for erased in (False, True):
        board.look()
        rows = np.fromfile(board.store.rows_file, np.float32)
        assert (77.0 not in rows) == erased


def test_a_record_whose_row_has_the_checksum_0_is_erased_too(tmp_path: Path) -> None:
    """0 was what an erased row has, so that this one stayed on the disk for good."""
    odd = np.frombuffer(bytes.fromhex("9d0ad96d"), "<f4")[0]
    assert zlib.crc32(odd.tobytes()) == 0
    for change in ("taken away", "no folder"):
        (tmp_path / change).mkdir()
        board = tables(tmp_path / change)
        write(board.root / "1.csv", f"x,label\n1,1\n{float(odd)!r},1\n".encode())
        board.look(at_once=True)
        if change == "taken away":
            table(board, [1])
        else:
            board.root.rename(tmp_path / "elsewhere")
        for _ in range(2):
            board.look()
        assert odd not in np.frombuffer(board.store.rows_file.read_bytes(), "<f4")


def test_a_last_row_without_an_end_stays_where_it_is_known(tmp_path: Path) -> None:
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
    assert values_in(board.look()) == [1, 2, 3, 9], "4 may still become 42"
    aged(board.root / "1.csv", 60)
    assert values_in(board.look()) == [1, 2, 3, 4, 9]


ROWS = [*range(100, 160)]


def rows_of(board: Board) -> list[tuple[int, int]]:
    """The number in each row, and its label."""
    rows = board.newest()
    inputs, labels = rows.batch(np.arange(len(rows)))
    return sorted(zip(inputs.ravel().astype(int).tolist(), labels.tolist(), strict=True))


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
def test_a_table_that_is_written_anew_while_it_is_decoded_gives_no_row_the_label_of_another(
    tmp_path: Path, changed_meanwhile: Callable[[Callable[[], None]], None], at_once: bool
) -> None:
    """A row more at the front did so with all that follow, and for good."""
    board = tables(tmp_path, max_records=100)
    table(board, [111])
    board.look(at_once=True)
    table(board, [111, *ROWS])
    changed_meanwhile(lambda: table(board, [112, 111, *ROWS]))
    board.look(at_once=at_once)
    assert {label == value % 3 for value, label in rows_of(board)} == {True}
    if not at_once:  # What is left for later is tried again at the next look.
        assert rows_of(board) == [(111, 0)]
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

    def renamed_afterwards(path: Path) -> list[Path]:
        found = real(path)
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
    real = tables_dataset.table_files

    def gone_afterwards(path: Path) -> list[Path]:
        found = real(path)
        (path / "b.csv").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(tables_dataset, "table_files", gone_afterwards)
    table(board, [1, 2, 4], "a.csv")
    assert values_in(board.look()) == [1, 2, 4]


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
    monkeypatch.setattr(tables_format, "_SMALL_LINES", 1_000)
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
        assert any("what follows line 1,080 is not read" in each for each in rows.origin.left_out)


def test_a_limit_on_address_space_that_a_look_may_need_keeps_the_agent_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At such a limit one row more took all that were new along; whether it starts depends on no record."""
    board = tables(tmp_path)
    table(board, [1])
    board.look(at_once=True)
    wanted = decoding.listing_bytes(board.settings)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (wanted - (1 << 20), wanted - (1 << 20)))
    with pytest.raises(ConfigurationError, match=r"ulimit -v.*data\.max_records 8"):
        Records(board.settings, board.state)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (wanted + (64 << 20), wanted + (64 << 20)))
    assert len(Records(board.settings, board.state).dataset) == 1


def test_more_tables_than_files_may_be_open_are_read_one_by_one(tmp_path: Path) -> None:
    board = tables(tmp_path, max_records=100)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(open_now + 60):
        table(board, [number], f"{number}.csv")
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 50, hard))
    try:
        rows = board.look(at_once=True)
        assert values_in(rows) == list(range(min(100, open_now + 60)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_a_look_had_found_counts_at_a_start_that_decodes_and_is_not_decoded_again(
    tmp_path: Path, decoded: list[int]
) -> None:
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1))
    board.look(at_once=True)
    write(board.root / "2" / "2.png", encoded(noise(2)))
    bring_up_to_date(Order(board.settings, board.state, at_once=False))
    assert contents(board.look(at_once=True)) == expected(0, 1, 2)
    assert decoded == [2, 1, 0]


def test_a_look_forgets_what_one_before_it_found_also_where_nothing_is_new(tmp_path: Path) -> None:
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1))
    board.look(at_once=True)
    file, away = board.root / named(1)[0], tmp_path / "away.png"
    file.rename(away)
    bring_up_to_date(Order(board.settings, board.state, at_once=False))
    away.rename(file)
    assert contents(board.look()) == expected(0, 1)


def test_at_the_start_what_is_gone_is_erased_at_once(tmp_path: Path) -> None:
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1))
    board.look(at_once=True)
    (board.root / "0" / "0.png").unlink()
    board.look(at_once=True)
    assert noise(0).tobytes() not in board.store.rows_file.read_bytes()
    # Rows of other settings mean something else, and are gone whole.
    write(board.root / "2" / "2.png", encoded(noise(2)))
    board.look(at_once=True)
    (board.root / "2" / "2.png").unlink()
    pictures(tmp_path, classes=4).look(at_once=True)
    rows = board.store.rows_file.read_bytes()
    assert len(rows) == 8 * 12 * 8 * 3
    assert [noise(seed).tobytes() in rows for seed in (0, 1, 2)] == [False, True, False]


def test_what_is_gone_is_used_no_more_and_comes_back(tmp_path: Path) -> None:
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1))
    write(board.root / "2" / "2.png", damaged_inside(encoded(noise(2))))
    board.look(at_once=True)
    board.root.rename(tmp_path / "elsewhere")
    rows = board.look()
    assert len(rows) == 0
    (sentence,) = rows.origin.left_out
    assert "There is no file or directory" in sentence
    (tmp_path / "elsewhere").rename(board.root)
    aged(board.root, 30)
    assert contents(board.look()) == expected(0, 1)


def test_data_that_were_away_for_several_looks_come_back(tmp_path: Path) -> None:
    """Whether a table changed is seen by its size and its time, which are those of before."""
    board = tables(tmp_path)
    table(board, [1, 2])
    board.look(at_once=True)
    board.root.rename(tmp_path / "elsewhere")
    left = []
    for _ in range(2):
        assert values_in(board.look()) == []
        index = board.store.load()
        assert index is not None
        left.append(len(index.stale))
    assert left == [2, 0], "a reader may have had them, the first time"
    (tmp_path / "elsewhere").rename(board.root)
    assert values_in(board.look()) == [1, 2]


def test_a_look_counts_when_it_is_taken_and_one_that_is_cut_short_leaves_nothing(tmp_path: Path) -> None:
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1))
    board.look(at_once=True)
    (board.root / "1" / "1.png").unlink()
    write(board.root / "2" / "2.png", encoded(noise(2)))
    bring_up_to_date(Order(board.settings, board.state, at_once=False))
    assert contents(board.newest()) == expected(0, 1), "it is done, and does not count yet"
    held = board.store.rows_file.read_bytes()
    assert noise(2).tobytes() in held
    # Its process ends too early.
    board.store.drop_found()
    (board.root / "2" / "2.png").unlink()
    write(board.root / "1" / "1.png", encoded(noise(1)))
    assert contents(board.look()) == expected(0, 1)
    assert noise(2).tobytes() not in board.store.rows_file.read_bytes()


def test_a_look_beside_training_on_one_core_is_done_when_it_counts_and_training_keeps_its_slots() -> None:
    """A step of niceness is a factor of 1.25 (sched(7))."""
    share = 1 / (1 + 1.25**decoding.NICENESS)
    assert decoding.LOOK_S / share < decoding.COUNTS_AFTER_S
    assert 1 / (1 - share) < effort._SPARE
