"""What is right and what is wrong with a machine, a finding each, for ``dpagent doctor``.

A check never raises: what it cannot find out is a finding too. Nothing here looks at a record.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Final

from dpagent.errors import DpagentError, ExitCode
from dpagent.storage import SPACE_LEFT


class Verdict(StrEnum):
    """Of one check."""

    OK = "ok"
    WARNING = "warning"
    """It works, and may soon not."""
    PROBLEM = "problem"
    SKIPPED = "skipped"
    """It could not be tried, because of a problem that was found before."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        check: its name, in one or two words.
        verdict: of it.
        text: what was found, in one line.
        remedy: what to do; empty where nothing is to be done.
        exit_code: of a problem: that of the program that would end by it.
        is_private: whether it may tell of a record, or of how much room records leave: it is for the owner
            alone.
    """

    check: str
    verdict: Verdict
    text: str
    remedy: str = ""
    exit_code: ExitCode = ExitCode.OK
    is_private: bool = False


def private(finding: Finding) -> Finding:
    """A finding for the owner of the machine alone."""
    return replace(finding, is_private=True)


def fine(check: str, text: str) -> Finding:
    """A check found nothing wrong."""
    return Finding(check, Verdict.OK, text)


def warning(check: str, text: str, remedy: str) -> Finding:
    """A check found what may go wrong."""
    return Finding(check, Verdict.WARNING, text, remedy)


def problem(check: str, text: str, remedy: str, exit_code: ExitCode = ExitCode.CONFIGURATION) -> Finding:
    """A check found what is wrong."""
    return Finding(check, Verdict.PROBLEM, text, remedy, exit_code)


def skipped(check: str, text: str) -> Finding:
    """A check could not be tried."""
    return Finding(check, Verdict.SKIPPED, text)


def problem_of(check: str, error: DpagentError) -> Finding:
    """An expected error, whose text says what to do."""
    return problem(check, " ".join(str(error).split()), "", error.exit_code)


_FIRST_RELEASE: Final = datetime(2026, 11, 1, tzinfo=UTC)
"""No clock that is right shows an earlier time."""
_FAR_FUTURE: Final = datetime(2100, 1, 1, tzinfo=UTC)
_SYNCHRONISED: Final = Path("/run/systemd/timesync/synchronized")
_KEY_BYTES: Final = 32


def clock(now: float | None = None) -> Finding:
    """Whether the clock may be right. A plan's deadline, and a certificate, are judged by it.

    Args:
        now: Unix time; the system's by default.
    """
    moment = datetime.fromtimestamp(time.time() if now is None else now, UTC)
    shown = f"{moment:%Y-%m-%d %H:%M:%S} UTC"
    remedy = "Set it (`timedatectl set-ntp true`): plans and certificates look expired, or not yet valid."
    if not _FIRST_RELEASE <= moment < _FAR_FUTURE:
        return problem("clock", f"it shows {shown}, which cannot be", remedy)
    if _SYNCHRONISED.parent.is_dir() and not _SYNCHRONISED.exists():
        return warning("clock", f"it shows {shown}, and no time server has confirmed that", remedy)
    return fine("clock", shown)


def entropy() -> Finding:
    """Whether the system's entropy is there, of which all noise is made."""
    try:
        os.getrandom(_KEY_BYTES, os.GRND_NONBLOCK)
    except BlockingIOError:
        return problem(
            "entropy", "the system has none yet", "Wait until it has started.",
            ExitCode.STORAGE,
        )  # fmt: skip
    return fine("entropy", "the system's source is ready")


def storage(directory: Path, wanted_bytes: int) -> Iterator[Finding]:
    """Whether there is room in a directory that need not exist yet, and whether it may be written.

    Args:
        directory: the state directory.
        wanted_bytes: that it may yet take.
    """
    place = directory
    # Path.exists raises where it may not look.
    while not os.path.exists(place) and place != place.parent:  # noqa: PTH110
        place = place.parent
    if not place.is_dir():
        yield problem("storage", f"{place} is no directory", "Set state_dir to one.", ExitCode.STORAGE)
        return
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        yield problem("storage", f"{place} is mounted read-only", "Mount it for writing.", ExitCode.STORAGE)
        return
    if not os.access(place, os.W_OK | os.X_OK):
        yield problem(
            "storage", f"this user ({_user()}) may not write to {place}",
            f"Run this as the agent's user, or: chown {os.geteuid()} {place}", ExitCode.STORAGE,
        )  # fmt: skip
        return
    free = shutil.disk_usage(place).free
    text = f"{free >> 20:,} MiB are free in {place}"
    if free < wanted_bytes:
        found = problem(
            "storage", f"{text}; {-(-wanted_bytes >> 20):,} MiB are needed", "Free some space.",
            ExitCode.STORAGE,
        )  # fmt: skip
    elif free < wanted_bytes + SPACE_LEFT:
        found = warning("storage", f"{text}, little more than is needed", "Free some space soon.")
    else:
        found = fine("storage", text)
    # Records may lie on the same disk.
    yield from map(private, (found, *_inodes(place)))
    yield from _wear()


def _inodes(place: Path) -> Iterator[Finding]:
    state = os.statvfs(place)
    if state.f_files and state.f_favail < 100:
        yield problem(
            "storage", f"{place} has room for {state.f_favail} more files", "Delete some.", ExitCode.STORAGE
        )


_BLOCK_DEVICES: Final = Path("/sys/block")
_WORN: Final = 8
"""Tenths of its life that an eMMC has behind it, from which on its owner is warned."""


def _wear(block_devices: Path = _BLOCK_DEVICES) -> Iterator[Finding]:
    """What an eMMC says of its life (JEDEC eMMC 5.0, EXT_CSD 267 to 269). SD cards say nothing."""
    for file in sorted(block_devices.glob("mmcblk*/device/life_time")):
        name = file.parent.parent.name
        try:
            used = max(int(part, 16) for part in file.read_text().split())
        except (OSError, ValueError):
            continue
        if used == 0:
            continue  # It does not say.
        if used > 10:
            yield problem("wear", f"{name} is past the life it is made for", "Replace it.", ExitCode.STORAGE)
        elif used > _WORN:
            yield warning("wear", f"{name} has used up to {10 * used} % of its life", "Plan to replace it.")
        else:
            yield fine("wear", f"{name} has used up to {10 * used} % of its life")


def memory(wanted_mib: int, meminfo: Path = Path("/proc/meminfo")) -> Finding:
    """Whether there is memory for a program that takes so much."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        available = int(lines["MemAvailable"].split()[0]) >> 10
    except (OSError, ValueError, KeyError, IndexError):
        return skipped("memory", f"{meminfo} does not say how much is available")
    text = f"{available:,} MiB are available"
    if available < wanted_mib:
        remedy = "End other programs, or add swap."
        return private(warning("memory", f"{text}; training takes some {wanted_mib:,}", remedy))
    return private(fine("memory", text))


def _user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
