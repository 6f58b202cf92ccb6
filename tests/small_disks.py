"""Small disks of a test's own: file systems in memory, mounted for one process and its children alone."""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest


def on_disks_of_their_own(scenario: Callable[..., None], disks: Mapping[Path, str]) -> None:
    """Run a function of a test's module, with the paths of the disks, where each is mounted.

    Args:
        scenario: what is run, in a process of its own. It fails if it raises.
        disks: the size of each, as mount(8) of tmpfs takes it, by its path.
    """
    if shutil.which("unshare") is None:
        pytest.skip("mounting a small disk needs unshare, of util-linux")
    inside = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    for place in disks:
        place.mkdir(exist_ok=True)
    mounts = " && ".join(f"mount -t tmpfs -o size={size} x {place}" for place, size in disks.items())
    if subprocess.run([*inside, "sh", "-c", mounts], capture_output=True, check=False).returncode != 0:
        pytest.skip("this system lets nobody mount a small disk")
    module = Path(inspect.getfile(scenario))
    program = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent), str(module.parent)]!r}; "
        f"import pathlib, {module.stem} as tests; "
        f"tests.{scenario.__name__}(*map(pathlib.Path, {[str(place) for place in disks]!r}))"
    )
    run = subprocess.run(
        [*inside, "sh", "-c", f'{mounts} && exec "$0" -P -c "$1"', sys.executable, program],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr


def leave(disk: Path, free: int) -> Path:
    """Fill a disk but for so many bytes, or a page less; the file that does it."""
    filler = disk / "filler"
    room = os.statvfs(disk)
    filler.write_bytes(bytes(max(0, room.f_bavail * room.f_frsize - free)))
    return filler


def fill(disk: Path) -> None:
    """Fill a disk to the last byte."""
    with (disk / "filler").open("wb", buffering=0) as filler:
        for size in (1 << 20, 4_096, 1):
            with contextlib.suppress(OSError):
                while True:
                    filler.write(bytes(size))
    assert os.statvfs(disk).f_bavail == 0
