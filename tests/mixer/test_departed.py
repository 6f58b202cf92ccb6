"""What has left is known again: how much of it, after a restart, and after a crash as it was noted."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from dpagent.errors import StorageError
from mixer.departed import Departed


def batch(start: int, stop: int) -> list[bytes]:
    return [number.to_bytes(4, "big") * 30 for number in range(start, stop)]


def known(departed: Departed, start: int, stop: int) -> int:
    return sum(message in departed for message in batch(start, stop))


def test_what_has_left_is_known_also_after_a_restart(tmp_path: Path) -> None:
    departed = Departed(tmp_path, 100)
    departed.note(batch(0, 4))
    departed.note(batch(4, 8))
    for each in (departed, Departed(tmp_path, 100)):
        assert known(each, 0, 8) == 8
        assert known(each, 8, 12) == 0


@pytest.mark.parametrize("restarts", [False, True])
def test_as_many_as_said_are_remembered_at_least_and_a_batch_more_than_twice_as_many_at_most(
    tmp_path: Path, restarts: bool
) -> None:
    departed = Departed(tmp_path, 8)
    for start in range(0, 60, 3):
        departed.note(batch(start, start + 3))
        if restarts:
            departed = Departed(tmp_path, 8)
        assert known(departed, max(0, start + 3 - 8), start + 3) == min(8, start + 3)
        assert known(departed, 0, start + 3) <= 2 * (8 + 3)


def test_the_files_tell_no_order_and_are_nobody_elses(tmp_path: Path) -> None:
    Departed(tmp_path, 100).note(batch(0, 50))
    data = (tmp_path / "departed").read_bytes()
    digests = [data[at : at + 16] for at in range(0, len(data), 16)]
    assert len(digests) == 50
    assert digests == sorted(digests)
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_digest_that_was_cut_as_it_was_written_spoils_no_later_one(tmp_path: Path) -> None:
    Departed(tmp_path, 100).note(batch(0, 4))
    with (tmp_path / "departed").open("ab") as stream:
        stream.write(b"cut off")
    departed = Departed(tmp_path, 100)
    departed.note(batch(4, 8))
    assert known(Departed(tmp_path, 100), 0, 8) == 8


def test_a_crash_as_the_older_file_is_forgotten_forgets_no_more(tmp_path: Path) -> None:
    departed = Departed(tmp_path, 4)
    departed.note(batch(0, 4))
    # The newer file has become the older one, and there is no newer one yet.
    (tmp_path / "departed").replace(tmp_path / "departed-before")
    departed = Departed(tmp_path, 4)
    assert known(departed, 0, 4) == 4
    departed.note(batch(4, 8))
    assert known(Departed(tmp_path, 4), 0, 8) == 8


def test_nothing_leaves_that_cannot_be_noted(tmp_path: Path) -> None:
    departed = Departed(tmp_path, 100)
    (tmp_path / "departed").unlink()
    (tmp_path / "departed").mkdir()
    with pytest.raises(StorageError, match="departed"):
        departed.note(batch(0, 4))
