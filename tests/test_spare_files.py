"""A file that is written over its spare one, which asks the disk for nothing."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from dpagent.errors import StorageError
from dpagent.status_file import StatusPlace
from dpagent.storage import write_over_spare


def test_a_file_changes_places_with_its_spare_and_takes_nothing_new(tmp_path: Path) -> None:
    path, spare = tmp_path / "head", tmp_path / ".head.spare"
    write_over_spare(path, b"first", mode=0o600)
    write_over_spare(path, b"the second", mode=0o600)
    inodes = {path.stat().st_ino, spare.stat().st_ino}
    for content in (b"third", b"", b"the fifth is the longest"):
        before = path.read_bytes()
        write_over_spare(path, content, mode=0o600)
        assert (path.read_bytes(), spare.read_bytes()) == (content, before)
        assert {path.stat().st_ino, spare.stat().st_ino} == inodes
        assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(tmp_path.iterdir()) == [spare, path]


def test_the_names_of_the_files_beside_it_stay_known(tmp_path: Path) -> None:
    """Before, each write took new places in Python's table of names, which grew by them."""
    write_over_spare(tmp_path / f"{tmp_path.name}.head", b"first")
    StatusPlace(tmp_path, {"RUNTIME_DIRECTORY": str(tmp_path)}).write(b"first")
    (status,) = (each.name for each in tmp_path.glob("dpagent-*.json"))
    for name, ending in ((f"{tmp_path.name}.head", "spare"), (f"{tmp_path.name}.head", "old"),
                         (status, "new"), (status, "old")):  # fmt: skip
        made = f".{name}.{ending}"
        assert sys.intern(made) is not made, "there was none, and this one has taken its place"


def test_a_directory_without_room_for_a_name_more_takes_no_spare_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the spare file was gone after one such write, and the next one needed room."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path, spare = tmp_path / "head", tmp_path / ".head.spare"
    for content in (b"first", b"second"):
        write_over_spare(path, content)
    inodes = {path.stat().st_ino, spare.stat().st_ino}
    monkeypatch.setattr("os.link", full)
    for content in (b"third", b"fourth"):
        write_over_spare(path, content)
        assert path.read_bytes() == content
        assert {path.stat().st_ino, spare.stat().st_ino} == inodes


def test_a_spare_that_is_none_is_not_written_through(tmp_path: Path) -> None:
    path, spare, other = tmp_path / "head", tmp_path / ".head.spare", tmp_path / "other"
    other.write_bytes(b"somebody's")
    path.write_bytes(b"old")
    for make in (spare.symlink_to, spare.hardlink_to):
        make(other)
        write_over_spare(path, b"new")
        assert (path.read_bytes(), other.read_bytes()) == (b"new", b"somebody's")
        spare.unlink()
    spare.hardlink_to(path)  # Of a crash.
    path.with_name(".head.old").hardlink_to(path)
    write_over_spare(path, b"newer")
    assert (path.read_bytes(), spare.read_bytes()) == (b"newer", b"new")
    if os.geteuid() == 0:  # Of another user, who may have it open.
        os.chown(spare, 65_534, -1)
        inode = spare.stat().st_ino
        write_over_spare(path, b"newer")
        assert path.stat().st_ino != inode
    spare.unlink()
    spare.mkdir()
    with pytest.raises(StorageError):
        write_over_spare(path, b"newest")
    assert path.read_bytes() == b"newer"


def test_without_hard_links_a_file_is_replaced_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no hard links here")

    monkeypatch.setattr("os.link", link)
    monkeypatch.setattr("dpagent.storage._change_places", lambda *_: False)
    for content in (b"first", b"second", b"third"):
        write_over_spare(tmp_path / "head", content)
        assert [each.read_bytes() for each in tmp_path.iterdir()] == [content]
