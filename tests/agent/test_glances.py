"""What comes in between a look's glance at the files and its listing waits, whatever else had come before.

A look that finds nothing new by its glance lists nothing. So one record that had come before brought in
another, a look before its time.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from row_boards import Board, tables, values_in

from agent import decoding
from dpagent.learning.data import glance, stamp
from dpagent.learning.data.formats.tables import index, rows

KNOWN, BEFORE, SINCE = [1, 2, 3], 4, 5
AGE_S = 60.0


def _aged(file: Path) -> None:
    """No file is young: a glance at one that is tells nothing, so the look lists it."""
    changed = file.stat().st_mtime - AGE_S
    os.utime(file, (changed, changed))


def _lines(values: list[int], end: str = "\n") -> bytes:
    return ("x,label\n" + "\n".join(f"{value},{value % 3}" for value in values) + end).encode()


def _cifar(values: list[int]) -> bytes:
    return b"".join(bytes([value]) * 3073 for value in values)


def _append(file: Path, data: bytes) -> None:
    with file.open("ab") as stream:
        stream.write(data)


def _replace(file: Path, data: bytes) -> None:
    new = file.with_name(".new")
    new.write_bytes(data)
    _aged(new)
    new.replace(file)


def _values_of_bytes(board: Board) -> list[int]:
    rows = board.newest()
    return sorted(int(record.flat[0]) for record in rows.batch(np.arange(len(rows)))[0])


def _begun(folder: Path, kind: str) -> tuple[Board, Path, Callable[[list[int]], bytes]]:
    """A board that knows three records, and how a file of its data is written."""
    if kind == "csv":
        board, encode = tables(folder, max_records=40), _lines
        file = board.root / "1.csv"
    elif kind == "cifar":
        board = Board(folder, kind="cifar", classes=10, max_records=40, cifar={"layout": "cifar-10"})
        file, encode = board.root / "data_batch_1.bin", _cifar
    else:
        file = folder / "data" / "data.npz"
        declared: dict[str, Any] = {"shape": [8, 8, 1], "dtype": "uint8", "path": file}
        board = Board(folder, kind="npz", classes=10, max_records=40, **declared)
        encode = _npz
    file.write_bytes(encode(KNOWN))
    _aged(file)
    board.look(at_once=True)
    board.look()
    return board, file, encode


def _npz(values: list[int]) -> bytes:
    pixels, stream = np.repeat(np.array(values, np.uint8), 64).reshape(-1, 8, 8, 1), io.BytesIO()
    np.savez(stream, inputs=pixels, labels=np.array(values, np.int64))
    return stream.getvalue()


def _values(board: Board, kind: str) -> list[int]:
    return values_in(board.newest()) if kind == "csv" else _values_of_bytes(board)


SINCE_THEN: dict[str, tuple[str, Callable[[Path, list[int]], None]]] = {
    "a row at the end of the table": ("csv", lambda file, _: _append(file, f"{SINCE},2\n".encode())),
    "a table": ("csv", lambda file, _: _replace(file.with_name("2.csv"), _lines([SINCE]))),
    "the table, replaced": ("csv", lambda file, there: _replace(file, _lines([SINCE, *there]))),
    "a record at the end of the file": ("cifar", lambda file, _: _append(file, _cifar([SINCE]))),
    "a file of records": (
        "cifar", lambda file, _: _replace(file.with_name("data_batch_2.bin"), _cifar([SINCE])),
    ),
    "an archive, replaced": ("npz", lambda file, there: _replace(file, _npz([*there, SINCE]))),
}  # fmt: skip


@pytest.mark.parametrize("before", [[], [BEFORE]], ids=["nothing before", "a record before"])
@pytest.mark.parametrize("since", SINCE_THEN)
def test_what_comes_in_since_the_glance_waits_whatever_had_come_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: list[int], since: str
) -> None:
    kind, come_in = SINCE_THEN[since]
    board, file, encode = _begun(tmp_path, kind)
    if before:
        _replace(file, encode([*KNOWN, *before]))
    real = decoding.glance_declared

    def glanced(settings: Any) -> Any:
        glance = real(settings)
        come_in(file, [*KNOWN, *before])
        return glance

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "glance_declared", glanced)
        board.look()
    assert _values(board, kind) == [*KNOWN, *before]
    board.look()
    assert _values(board, kind) == [*KNOWN, *before, SINCE]


@pytest.mark.parametrize("is_young", [False, True])
@pytest.mark.parametrize("more", [b"", b"\n5,2\n", b"\n"], ids=["nothing", "a row", "an end"])
def test_a_last_row_is_whole_by_what_the_glance_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_young: bool, more: bytes
) -> None:
    """A row without an end counts once its file is old, or is seen not to change for as long; what follows
    brings it in no sooner."""
    board, file, _ = _begun(tmp_path, "csv")
    file.write_bytes(_lines([*KNOWN, BEFORE], end=""))
    if not is_young:
        _aged(file)
    real = decoding.glance_declared

    def glanced(settings: Any) -> Any:
        glance = real(settings)
        if more:
            _append(file, more)
        return glance

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "glance_declared", glanced)
        board.look()
    assert _values(board, "csv") == (KNOWN if is_young and more else [*KNOWN, BEFORE])


def test_a_clock_that_is_set_to_when_a_last_row_was_written_has_no_row_bring_it_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each look. It waited until another row was written behind it, by when its file looked old."""
    counted = []
    for name, text, age_s in (("without", b"4,1", 86_400), ("with", b"4,1\n5,2", 3_600)):
        (folder := tmp_path / name).mkdir()
        board, file, _ = _begun(folder, "csv")
        _append(file, text)
        os.utime(file, (time.time() - age_s,) * 2)
        with monkeypatch.context() as patch:
            patch.setattr(time, "time_ns", lambda: int((time.time() - 86_400) * 1e9))
            board.look()
        counted.append(_values(board, "csv"))
    assert counted == [[*KNOWN, BEFORE], [*KNOWN, BEFORE, SINCE]]


@pytest.mark.parametrize("end", ["", "\n"], ids=["no end", "an end"])
def test_how_long_a_look_watches_is_no_matter_of_a_last_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Before, a file was watched where its last row had no end, and then only."""
    board, file, _ = _begun(tmp_path, "csv")
    file.write_bytes(_lines([*KNOWN, BEFORE], end=end))
    watched = list[float]()
    with monkeypatch.context() as patch:
        patch.setattr(stamp, "REST_S", 4.0)
        patch.setattr(time, "sleep", watched.append)
        board.look()
    assert len([each for each in watched if each > 3.0]) == 1
    assert _values(board, "csv") == [*KNOWN, BEFORE]


@pytest.mark.parametrize("most_open", [256, 0], ids=["open", "more than may be open"])
def test_a_row_that_is_slow_to_read_keeps_no_last_row_of_another_table_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_open: int
) -> None:
    """By seconds, on a disk that fails. Before, the other one was watched until its turn came, so that a row
    which was written to it meanwhile kept its last one out."""
    board, file, _ = _begun(tmp_path, "csv")
    other = file.with_name("2.csv")
    file.write_bytes(_lines([*KNOWN, BEFORE]))
    other.write_bytes(_lines([SINCE], end=""))
    real = rows.checked_rows

    def read(*arguments: Any) -> Any:
        for row in real(*arguments):
            if row.cells[0] == str(BEFORE) and not other.read_bytes().endswith(b"\n"):
                _append(other, b"\n6,0\n")
            yield row

    with monkeypatch.context() as patch:
        patch.setattr(glance, "_MOST_OPEN", most_open)
        patch.setattr(index, "checked_rows", read)
        board.look()
    assert _values(board, "csv") == [*KNOWN, BEFORE, SINCE]
    board.look()
    assert _values(board, "csv") == [*KNOWN, BEFORE, SINCE, 6]


def test_of_more_tables_than_may_be_open_what_is_appended_since_the_glance_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpagent.learning.data.glance._MOST_OPEN", 0)
    since = "a row at the end of the table"
    test_what_comes_in_since_the_glance_waits_whatever_had_come_before(tmp_path, monkeypatch, [BEFORE], since)
