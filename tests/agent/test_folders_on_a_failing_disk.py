"""Where the disk cannot tell all that a folder holds, no record is gone that may be there; the rest counts.

One record more may be what a folder has taken a block for that cannot be read.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing_disks import fails_at
from pictures import encoded, noise, write
from row_boards import Board, contents, expected, named, pictures, table, tables, values_in

from agent.rows import Rows


class Cut:
    """A folder of which some entries are listed, and then none any more."""

    def __init__(self, found: Any, count: int, number: int) -> None:
        self._found, self._left, self._number = found, count, number

    def __enter__(self) -> Cut:
        return self

    def __exit__(self, *_: object) -> None:
        self._found.close()

    def __iter__(self) -> Iterator[Any]:
        yield from sorted(self._found, key=lambda each: str(each.name))[: self._left]
        raise OSError(self._number, os.strerror(self._number))


def lists(patch: pytest.MonkeyPatch, folder: Path, count: int | None, number: int = errno.EIO) -> None:
    """Let the disk list so many entries of a folder, or not open it."""
    real = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path) != folder:
            return real(path)
        if count is None:
            raise OSError(number, os.strerror(number))
        return Cut(real(path), count, number)

    patch.setattr(os, "scandir", scandir)


def fails(patch: pytest.MonkeyPatch, function: str, place: Path) -> None:
    """Let the disk not find what it knows of one file, or its bytes."""
    real: Callable[..., Any] = getattr(os, function)

    def faulty(path: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(path, str | os.PathLike) and Path(path) == place:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *arguments, **named)

    patch.setattr(os, function, faulty)


def put(board: Board, *seeds: int) -> None:
    for seed in seeds:
        write(board.root / named(seed)[0], encoded(noise(seed)))


def filled(folder: Path) -> Board:
    """A board whose class 0 has pictures 0, 3 and 6, and whose class 1 has 1."""
    board = pictures(folder)
    put(board, 0, 3, 6, 1)
    assert contents(board.look(at_once=True)) == expected(0, 3, 6, 1)
    return board


def whole(board: Board, *seeds: int) -> None:
    """All that is there counts, once the disk can tell."""
    assert contents(board.look()) == expected(*seeds)
    assert contents(board.look()) == expected(*seeds)


def said(rows: Rows) -> str:
    return " ".join(rows.origin.left_out)


@pytest.mark.parametrize("count", [None, 0, 2])
def test_a_folder_that_is_not_listed_to_its_end_loses_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int | None
) -> None:
    """Before, all that it held were gone, and erased by the look after."""
    board = filled(tmp_path)
    put(board, 4, 9)
    (board.root / named(1)[0]).unlink()
    with monkeypatch.context() as patch:
        lists(patch, board.root / "0", count)
        for _ in range(3):
            rows = board.look()
            # What is new or gone elsewhere counts.
            assert contents(rows) == expected(0, 3, 6, 4)
        assert "cannot list" in said(rows)
    whole(board, 0, 3, 6, 4, 9)


def test_what_is_listed_before_the_bad_place_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, of a folder with one name more than the disk can list, no new picture counted."""
    board = filled(tmp_path)
    write(board.root / "0" / "1.png", encoded(noise(9)))
    with monkeypatch.context() as patch:
        lists(patch, board.root / "0", 2)  # 0.png and 1.png
        assert contents(board.look()) == expected(0, 3, 6, 1, 9)


def test_a_list_of_classes_that_ends_in_the_middle_keeps_no_class_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, nothing new counted in any class. An odd file may be what the folder takes a block for."""
    board = filled(tmp_path)
    put(board, 9, 2)
    with monkeypatch.context() as patch:
        lists(patch, board.root, 1)
        assert contents(board.look()) == expected(0, 3, 6, 1, 2, 9)


def test_an_entry_that_may_not_be_listed_is_left_out_with_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else somebody could keep records that their owner has taken away, by one folder."""
    board = filled(tmp_path)
    with monkeypatch.context() as patch:
        lists(patch, board.root / "0", None, errno.EACCES)
        assert contents(board.look()) == expected(1)
    whole(board, 0, 3, 6, 1)


def test_a_file_that_the_disk_does_not_find_stays_as_it_was_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a picture was gone, and what other files have in the same block of inodes with it."""
    board = filled(tmp_path)
    with monkeypatch.context() as patch:
        fails(patch, "lstat", board.root / named(3)[0])
        assert contents(board.look()) == expected(0, 3, 6, 1)
    whole(board, 0, 3, 6, 1)


def test_tables_that_are_not_listed_keep_no_row_of_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, nothing new of any table counted, for one table more than the disk can list."""
    board = tables(tmp_path)
    for name, values in (("1.csv", [1]), ("2.csv", [2]), ("3.csv", [3])):
        table(board, values, name)
    board.look(at_once=True)
    table(board, [1, 4], "1.csv")
    for file in board.root.iterdir():
        os.utime(file, (1e9, 1e9))
    with monkeypatch.context() as patch:
        lists(patch, board.root, 2)
        assert values_in(board.look()) == [1, 2, 3, 4]
    (board.root / "3.csv").unlink()
    # No other record has to come for a look to list again.
    assert values_in(board.look()) == [1, 2, 4]


@pytest.mark.parametrize("place", ["opened", "header"])
def test_a_table_that_cannot_be_read_at_its_beginning_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Before, its rows were gone, and those of all tables whose inodes share a block."""
    board = tables(tmp_path)
    table(board, [1, 2], "1.csv")
    table(board, [3], "2.csv")
    board.look(at_once=True)
    table(board, [3, 4], "2.csv")
    with monkeypatch.context() as patch:
        if place == "opened":
            fails(patch, "open", board.root / "1.csv")
        else:
            fails_at(patch, "1.csv", 0, "read")
        assert values_in(board.look()) == [1, 2, 3, 4]
    assert values_in(board.look()) == [1, 2, 3, 4]


def test_a_link_to_what_nobody_can_read_keeps_no_record_that_its_owner_takes_away(tmp_path: Path) -> None:
    """Any user can make one that the system answers with EIO."""
    board = tables(tmp_path)
    table(board, [1], "1.csv")
    table(board, [2], "2.csv")
    board.look(at_once=True)
    (board.root / "0.csv").symlink_to("/proc/self/mem")
    (board.root / "2.csv").unlink()
    assert values_in(board.look()) == [1]


def test_a_picture_whose_link_leads_to_nothing_the_disk_finds_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = filled(tmp_path)
    (board.root / "0" / "odd.png").symlink_to(tmp_path / "dead")
    (board.root / named(3)[0]).unlink()
    real = Path.stat

    def stat(path: Path, **named: Any) -> os.stat_result:
        if path.name == "odd.png" and named.get("follow_symlinks", True):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", stat)
        assert contents(board.look()) == expected(0, 6, 1)


def test_files_of_records_that_are_not_found_stay_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, all of one file were gone, and where none was found the board took all of its data for gone."""
    board = Board(tmp_path, kind="cifar", cifar={"layout": "cifar-10"}, classes=10)
    for number in (1, 2):
        write(board.root / f"data_batch_{number}.bin", bytes([number]) * 3_073)
    assert labels(board.look(at_once=True)) == [1, 2]
    write(board.root / "data_batch_1.bin", bytes([1]) * 3_073 + bytes([3]) * 3_073)
    os.utime(board.root / "data_batch_1.bin", (1e9, 1e9))
    real = Path.lstat
    for lost, counts in (({2}, [1, 2, 3]), ({1, 2}, [1, 2, 3])):
        gone = [board.root / f"data_batch_{number}.bin" for number in lost]

        def lstat(path: Path, *, gone: list[Path] = gone) -> os.stat_result:
            if path in gone:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(path)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "lstat", lstat)
            for each in gone:
                fails(patch, "open", each)
            for _ in range(2):
                assert labels(board.look()) == counts
    assert labels(board.look()) == [1, 2, 3]


def labels(rows: Rows) -> list[int]:
    return sorted(np.asarray(rows.labels).tolist())


@pytest.mark.parametrize("fault", ["list", "picture"])
def test_a_picture_that_its_owner_corrects_meanwhile_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Before, as it was and as it is, and once more for each correction: so much less was it protected."""
    board = filled(tmp_path)
    with monkeypatch.context() as patch:
        if fault == "list":
            lists(patch, board.root / "0", 2)  # 0.png and 3.png
        else:
            fails(patch, "lstat", board.root / named(6)[0])
        for seed in (9, 12):
            write(board.root / named(3)[0], encoded(noise(seed)))
            assert contents(board.look()) == expected(0, seed, 6, 1)


@pytest.mark.parametrize("fault", ["list", "table"])
def test_a_row_that_its_owner_corrects_meanwhile_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Before, a row that changed in each look took one place more each time, until no other had any."""
    board = tables(tmp_path)
    table(board, [1, 2], "1.csv")
    table(board, [3], "2.csv")
    board.look(at_once=True)
    with monkeypatch.context() as patch:
        if fault == "list":
            lists(patch, board.root, 1)
        else:
            fails(patch, "open", board.root / "2.csv")
        for value in range(4, 16):
            table(board, [1, value], "1.csv")
            os.utime(board.root / "1.csv", (1e9 + value, 1e9 + value))
            assert values_in(board.look()) == [1, 3, value]


def test_what_its_owner_takes_away_is_gone_where_another_file_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = tables(tmp_path)
    for name, values in (("1.csv", [1]), ("2.csv", [2]), ("3.csv", [3])):
        table(board, values, name)
    board.look(at_once=True)
    (board.root / "3.csv").unlink()
    with monkeypatch.context() as patch:
        fails(patch, "open", board.root / "2.csv")
        assert values_in(board.look()) == [1, 2]
