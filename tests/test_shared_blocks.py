"""Copies that share their blocks with a state directory, on an XFS of the test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pictures import encoded, noise, write
from row_boards import Board, contents, expected, named, pictures
from small_disks import write_all_it_takes

from agent.decoding import bring_up_to_date
from agent.look_messages import LookOrder
from agent.opening import OpenQuestion
from agent.opening_program import answered
from dpagent import storage
from dpagent.shared_blocks import take_own_blocks


@pytest.fixture
def xfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disk of 300 MiB, the least that XFS takes, of which nothing has to stay free."""
    monkeypatch.setattr(storage, "SPACE_LEFT", 0)
    if os.geteuid() != 0 or shutil.which("mkfs.xfs") is None:
        pytest.skip("nobody but root mounts an XFS, with xfsprogs")
    disk, place = tmp_path / "disk", tmp_path / "mounted"
    place.mkdir()
    with disk.open("wb") as stream:
        stream.truncate(300 << 20)
    subprocess.run(["mkfs.xfs", "-q", str(disk)], check=True)
    mounted = subprocess.run(["mount", "-o", "loop", str(disk), str(place)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"this system mounts no XFS: {mounted.stderr}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", "--reflink=always", str(source), str(target)], check=True)


def is_shared(file: Path) -> bool:
    said = subprocess.run(["filefrag", "-v", str(file)], capture_output=True, text=True, check=True)
    return "shared" in said.stdout


def board_with_a_copy(xfs: Path) -> Board:
    board = pictures(xfs)
    write(board.root / named(0)[0], encoded(noise(0)))
    board.look(at_once=True)
    copy(board.state, xfs / "copy")
    return board


def test_a_look_takes_blocks_that_a_copy_shares_again(xfs: Path) -> None:
    """Before, the next look on a full disk failed, whatever had come: one picture that took the last block
    kept all others out."""
    board = board_with_a_copy(xfs)
    assert is_shared(board.state / "records.index")
    bring_up_to_date(LookOrder(board.settings, board.state, at_once=False))
    assert not any(map(is_shared, board.state.iterdir()))
    for seed in (1, 2, 3):
        write(board.root / named(seed)[0], encoded(noise(seed)))
    write_all_it_takes(xfs)
    assert contents(board.look()) == expected(0, 1, 2, 3)


def test_so_does_the_process_of_a_start(xfs: Path) -> None:
    board = board_with_a_copy(xfs)
    answered(OpenQuestion(board.settings, board.state))
    assert not any(map(is_shared, board.state.iterdir()))


def test_what_a_file_holds_and_what_is_no_file_stays(xfs: Path) -> None:
    state = xfs / "state"
    (state / "folder").mkdir(parents=True)
    os.mkfifo(state / "pipe")
    (state / "link").symlink_to(xfs / "outside")
    held = os.urandom(3 << 20)
    for file in (state / "large", xfs / "outside"):
        file.write_bytes(held)
    (state / "empty").touch()
    copy(state, xfs / "copy")
    copy(xfs / "outside", xfs / "second")
    take_own_blocks(state)
    assert not is_shared(state / "large")
    assert is_shared(xfs / "outside")
    assert (state / "large").read_bytes() == (xfs / "copy" / "large").read_bytes() == held


def test_without_room_or_a_file_system_that_can_nothing_is_raised(xfs: Path, tmp_path: Path) -> None:
    board = board_with_a_copy(xfs)
    write_all_it_takes(xfs)
    take_own_blocks(board.state)
    (tmp_path / "file").write_bytes(b"text")
    take_own_blocks(tmp_path)
    take_own_blocks(tmp_path / "none")


@pytest.mark.parametrize("is_first", [False, True])
def test_where_there_is_room_for_some_alone_the_small_ones_get_it(xfs: Path, *, is_first: bool) -> None:
    """Before, those that the folder lists first: records could take what an agent needs for its start."""
    state = xfs / "state"
    state.mkdir()
    sizes = {"books": 8 << 20, "records": 64 << 20}
    for name in sorted(sizes, reverse=is_first):
        (state / name).write_bytes(os.urandom(sizes[name]))
    os.sync()
    copy(state, xfs / "copy")
    free = os.statvfs(xfs)
    (xfs / "filler").write_bytes(bytes(free.f_bavail * free.f_frsize - (68 << 20)))
    os.sync()
    take_own_blocks(state)
    assert not is_shared(state / "books")
