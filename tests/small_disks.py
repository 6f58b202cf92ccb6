"""Small disks of a test's own: file systems in memory, mounted for one process and its children alone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from children import leave_to_parent
from launching.starts import EXECUTED
from storms import in_a_child

_LIBRARY: Final = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS: Final = 0x0002_0000
_NEW_USERS: Final = 0x1000_0000
"""As in linux/sched.h."""
_RECURSIVE: Final = 1 << 14
_PRIVATE: Final = 1 << 18
"""As in linux/mount.h."""
_LONGEST: Final = 32_000
"""Bytes of a traceback: the pipe holds them."""


def on_disks_of_their_own(scenario: Callable[..., None], disks: Mapping[Path, str]) -> None:
    """Run a function with the paths of the disks, where each is mounted.

    Args:
        scenario: what is run, in a process of its own. It fails if it raises.
        disks: the size of each, as mount(8) of tmpfs takes it, by its path.
    """
    for place in disks:
        place.mkdir(exist_ok=True)
    reading, writing = os.pipe()

    def mounted() -> None:
        try:
            _mount(disks)
        except OSError as error:
            os.write(writing, str(error).encode())
            return
        os.environ[EXECUTED] = "1"  # A fork of another process would not see the disks.
        leave_to_parent()
        try:
            scenario(*disks)
        except BaseException:
            os.write(writing, traceback.format_exc().encode()[-_LONGEST:])
            raise

    with os.fdopen(reading, errors="replace") as said:
        try:
            assert not in_a_child(mounted), "it was killed"
        except AssertionError as error:
            os.close(writing)
            pytest.fail(said.read() or str(error))
        os.close(writing)
        if why := said.read():
            pytest.skip(f"this system lets nobody mount a small disk: {why}")


def _mount(disks: Mapping[Path, str]) -> None:
    """Mount them for this process and its children alone.

    Raises:
        OSError: the system lets nobody do that.
    """
    user, group = os.geteuid(), os.getegid()
    _call(_LIBRARY.unshare, _NEW_MOUNTS | (0 if user == 0 else _NEW_USERS))
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _call(_LIBRARY.mount, None, b"/", None, _PRIVATE | _RECURSIVE, None)
    for place, size in disks.items():
        _call(_LIBRARY.mount, b"x", os.fsencode(place), b"tmpfs", 0, f"size={size}".encode())


def _call(function: Any, *arguments: Any) -> None:
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def leave(disk: Path, free: int) -> Path:
    """Fill a disk but for so many bytes, or a page less; the file that does it."""
    filler = disk / "filler"
    room = os.statvfs(disk)
    filler.write_bytes(bytes(max(0, room.f_bavail * room.f_frsize - free)))
    return filler


def fill(disk: Path) -> None:
    """Fill a disk to the last byte."""
    write_all_it_takes(disk)
    assert os.statvfs(disk).f_bavail == 0


def write_all_it_takes(disk: Path) -> None:
    """Write until a disk takes no byte more; some file systems count blocks as free that nobody gets."""
    with (disk / "filler").open("wb", buffering=0) as filler:
        for size in (1 << 20, 4_096, 1):
            with contextlib.suppress(OSError):
                while True:
                    filler.write(bytes(size))
        os.fsync(filler.fileno())
