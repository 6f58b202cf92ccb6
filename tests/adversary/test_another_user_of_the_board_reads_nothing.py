"""Another user of the board looks into a state directory that was there before the device's ledger.

Claim: whatever mode that directory has (a disk of its own that is mounted there, one that its owner made, or
    gave to the user of a container), no other user reads a file of it: neither records, decoded or as
    features, nor what is spooled, in the database and in its log, nor what was spent.
Parameters: a directory of mode 0755, a umask of 0022; the `digits` model; a round of a job that trusts the
    coordinator, whose update waits to be sent.

Before, the database and its log had the mode 0644. The spool holds fragments as they are before they are
sealed: of an update to which the coordinator adds the noise, the update itself. So whoever had an account on
the board had it exactly, by reading a file, where the ledger's figure holds against everybody but the
coordinator. He also could lock the directory, so that no agent began.

Power: no randomness; on the code of before another user reads every fragment.
Outcome: the system opens no file for him.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from devices import open_device
from fleets import update_plan

from dpagent.database_file import open_database
from dpagent.storage import StateDirectory

_STRANGER = 12_345


def _create(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE sums (value INTEGER NOT NULL) STRICT")


@contextmanager
def umask_of(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def read_by_another(directory: Path) -> dict[str, bytes]:
    """What another user reads of a directory's files."""
    found = {}
    os.seteuid(_STRANGER)
    try:
        for file in directory.iterdir():
            try:
                found[file.name] = file.read_bytes()
            except PermissionError:
                continue
    finally:
        os.seteuid(0)
    return found


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that others may look into, as are all above it."""
    with tempfile.TemporaryDirectory() as name, umask_of(0o022):
        Path(name).chmod(0o755)
        (Path(name) / "state").mkdir()
        yield Path(name)


def test_no_file_of_a_board_is_for_others(place: Path) -> None:
    limits = {"methods": ["central"], "trust": ["none", "coordinator"]}
    budget = {"epsilon": 50.0, "delta": 1e-3, "coordinator": {"epsilon": 50.0, "delta": 1e-3}}
    with open_device(place, limits=limits, budget=budget, data={"features_mib": 1}) as device:
        device.take_plan(update_plan())
        device.give()
        device.advance()
        messages = device.state.connection.execute("SELECT message FROM messages").fetchall()
        assert messages
        directory = place / "state"
        assert stat.S_IMODE(directory.stat().st_mode) == 0o755
        names = {file.name for file in directory.iterdir()}
        assert names >= {"ledger.db", "ledger.db-wal", "ledger.head", "records.rows", "features.f32", "lock"}
        open_to_others = [file.name for file in directory.iterdir() if file.stat().st_mode & 0o077]
        assert open_to_others == []
        if os.geteuid() == 0:  # Nobody else can be another user for a while.
            assert read_by_another(directory) == {}


def test_nor_of_a_coordinator(place: Path) -> None:
    """Whose database holds the updates of an open round."""
    with StateDirectory(place / "state") as held:
        database = open_database(held.path / "fleet.db", [_create])
        database.execute("INSERT INTO sums VALUES (1)")
        files = {file.name: stat.S_IMODE(file.stat().st_mode) for file in held.path.iterdir()}
        database.close()
    assert files == dict.fromkeys(("fleet.db", "fleet.db-wal", "fleet.db-shm", "lock"), 0o600)
