"""Secret keys on disk: made once, private, whole."""

from __future__ import annotations

import itertools
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dpagent.errors import ConfigurationError, StorageError
from dpagent.keys import read_key

KEY = bytes(range(32))


def test_a_key_is_made_once_and_private(tmp_path: Path) -> None:
    made: list[bytes] = []

    def create() -> bytes:
        made.append(os.urandom(32))
        return made[-1]

    path = tmp_path / "new" / "key"
    assert read_key(path, create, remedy="") == read_key(path, create, remedy="") == made[0]
    assert len(made) == 1
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o610])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    path.write_bytes(KEY)
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match=f"chmod 600 {re.escape(str(path))}"):
        read_key(path, lambda: b"other" * 8, remedy="")
    assert path.read_bytes() == KEY


def test_programs_that_begin_together_have_one_key(tmp_path: Path) -> None:
    made = itertools.count()

    def create() -> bytes:
        time.sleep(0.02)
        return bytes([next(made)]) * 32

    with ThreadPoolExecutor(8) as several:
        keys = list(several.map(lambda _: read_key(tmp_path / "key", create, remedy=""), range(8)))
    assert keys == [bytes(32)] * 8


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_damaged_key_is_refused_and_stays(tmp_path: Path, length: int) -> None:
    path = tmp_path / "key"
    path.write_bytes(bytes(length))
    path.chmod(0o600)
    with pytest.raises(StorageError, match=f"{length} byte.*remove it, and tell everybody\\."):
        read_key(path, lambda: KEY, remedy="tell everybody")
    assert path.read_bytes() == bytes(length)


def test_a_key_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file"):
        read_key(tmp_path / "file" / "key", lambda: KEY, remedy="")
