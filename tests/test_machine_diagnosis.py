"""What is wrong with a machine is named: its clock, entropy, disk, memory."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dpagent import diagnosis
from dpagent.diagnosis import Finding, Verdict, clock, entropy, memory, storage
from dpagent.errors import ExitCode

MIB = 1 << 20


@pytest.mark.parametrize(
    ("moment", "verdict"),
    [
        (datetime(1970, 1, 1, 0, 7, tzinfo=UTC), Verdict.PROBLEM),
        (datetime(2026, 10, 31, tzinfo=UTC), Verdict.PROBLEM),
        (datetime(2026, 12, 1, tzinfo=UTC), Verdict.OK),
        (datetime(2101, 1, 1, tzinfo=UTC), Verdict.PROBLEM),
    ],
)
def test_a_clock_that_cannot_be_right_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, moment: datetime, verdict: Verdict
) -> None:
    monkeypatch.setattr(diagnosis, "_SYNCHRONISED", tmp_path / "nobody" / "synchronized")
    found = clock(moment.timestamp())
    assert found.verdict is verdict
    assert f"{moment:%Y-%m-%d}" in found.text
    assert ("timedatectl" in found.remedy) == (verdict is Verdict.PROBLEM)


def test_a_clock_that_no_server_has_confirmed_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mark = tmp_path / "synchronized"
    monkeypatch.setattr(diagnosis, "_SYNCHRONISED", mark)
    assert clock().verdict is Verdict.WARNING
    mark.touch()
    assert clock().verdict is Verdict.OK


def test_entropy_that_is_not_there_yet_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert entropy().verdict is Verdict.OK

    def not_yet(*_: int) -> bytes:
        raise BlockingIOError

    monkeypatch.setattr(os, "getrandom", not_yet)
    assert entropy().verdict is Verdict.PROBLEM


def first(directory: Path, wanted: int = MIB) -> Finding:
    return next(iter(storage(directory, wanted)))


def test_a_directory_that_is_not_there_yet_is_judged_by_the_next_above(tmp_path: Path) -> None:
    found = first(tmp_path / "a" / "b" / "state")
    assert (found.verdict, found.check) == (Verdict.OK, "storage")
    assert found.text.endswith(f"in {tmp_path}")


def test_a_file_in_the_place_of_the_directory_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    found = first(tmp_path / "state")
    assert (found.verdict, found.exit_code) == (Verdict.PROBLEM, ExitCode.STORAGE)
    assert "is no directory" in found.text


def test_more_than_the_disk_has_is_a_problem_and_little_more_a_warning(tmp_path: Path) -> None:
    state = os.statvfs(tmp_path)
    free = state.f_bavail * state.f_frsize
    assert first(tmp_path, free + 500 * MIB).verdict is Verdict.PROBLEM
    assert first(tmp_path, free - 100 * MIB).verdict is Verdict.WARNING
    assert first(tmp_path, MIB).verdict is Verdict.OK


def test_a_disk_that_is_read_only_is_a_problem() -> None:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    read_only = [
        Path(fields[1]) for fields in mounts if "ro" in fields[3].split(",") and Path(fields[1]).is_dir()
    ]
    if not read_only:
        pytest.skip("nothing is mounted read-only here")
    found = first(read_only[0])
    assert (found.verdict, found.exit_code) == (Verdict.PROBLEM, ExitCode.STORAGE)
    assert "read-only" in found.text


def test_a_directory_of_another_user_is_a_problem_with_this_users_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The tests may run as root, who may write everywhere.
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = first(tmp_path)
    assert found.verdict is Verdict.PROBLEM
    assert f"chown {os.geteuid()} {tmp_path}" in found.remedy


@pytest.mark.parametrize(
    ("life", "verdict"),
    [
        ("0x01 0x02", Verdict.OK),
        ("0x03 0x09", Verdict.WARNING),
        ("0x0b 0x01", Verdict.PROBLEM),
        ("0x00 0x00", None),
        ("garbage", None),
    ],
)
def test_an_emmc_says_how_much_of_its_life_is_behind_it(
    tmp_path: Path, life: str, verdict: Verdict | None
) -> None:
    device = tmp_path / "mmcblk0" / "device"
    device.mkdir(parents=True)
    (device / "life_time").write_text(f"{life}\n")
    found = list(diagnosis._wear(tmp_path))
    assert [finding.verdict for finding in found] == ([] if verdict is None else [verdict])
    assert all("mmcblk0" in finding.text for finding in found)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("MemTotal: 900000 kB\nMemAvailable: 400000 kB\n", Verdict.OK),
        ("MemTotal: 900000 kB\nMemAvailable: 100000 kB\n", Verdict.WARNING),
        ("MemTotal: 900000 kB\n", Verdict.SKIPPED),
        ("MemAvailable: much\n", Verdict.SKIPPED),
    ],
)
def test_memory_that_is_short_is_a_warning(tmp_path: Path, text: str, verdict: Verdict) -> None:
    (tmp_path / "meminfo").write_text(text)
    assert memory(160, tmp_path / "meminfo").verdict is verdict
    assert memory(160, tmp_path / "none").verdict is Verdict.SKIPPED
