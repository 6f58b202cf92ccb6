"""What its owner takes away, a board erases from its rows, whatever happened to the look that decoded it."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import encoded, folder_of, noise, write
from row_boards import contents, expected, killed, named, pictures, sign_of, table, tables

from agent import decoding
from agent.bounded_decoding import Outcome
from agent.decoding import bring_up_to_date
from agent.look_messages import LookOrder
from agent.personal_scratch import scratch_in


@pytest.mark.parametrize("at_once", [False, True])
def test_a_record_that_a_killed_look_had_decoded_is_erased_when_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1))
    board.look(at_once=True)
    newer = write(board.root / "2" / "2.png", encoded(noise(2)))
    with killed(monkeypatch):
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
    sign = sign_of(board)
    assert [one for one, _ in contents(board.look())] == kept
    assert sign_of(board) == sign


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


def test_a_look_counts_when_it_is_taken_and_one_that_is_cut_short_leaves_nothing(tmp_path: Path) -> None:
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1))
    board.look(at_once=True)
    (board.root / "1" / "1.png").unlink()
    write(board.root / "2" / "2.png", encoded(noise(2)))
    bring_up_to_date(LookOrder(board.settings, board.state, at_once=False))
    assert contents(board.newest()) == expected(0, 1), "it is done, and does not count yet"
    held = board.store.rows_file.read_bytes()
    assert noise(2).tobytes() in held
    # Its process ends too early.
    board.store.drop_found()
    (board.root / "2" / "2.png").unlink()
    write(board.root / "1" / "1.png", encoded(noise(1)))
    assert contents(board.look()) == expected(0, 1)
    assert noise(2).tobytes() not in board.store.rows_file.read_bytes()


def test_what_a_personalisation_left_that_was_killed_goes_with_a_look(tmp_path: Path) -> None:
    """Features of records, which may be gone by then. Before, they lay there until the command ran again."""
    board = pictures(tmp_path)
    with scratch_in(board.state) as used:
        (used / "features.f32").write_bytes(bytes(99))
        board.look(at_once=True)
        assert used.exists(), "one that runs keeps its own"
    assert not used.exists()
    used.mkdir()
    (used / "features.f32").write_bytes(bytes(99))
    board.look()
    assert not used.exists()
