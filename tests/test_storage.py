"""State on disk: one owner, whole transactions, and a sentence for whatever a disk can do."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from children import PATIENCE_S

from dpagent.database_file import database_errors, open_database, open_readonly, transaction
from dpagent.errors import StateInUseError, StorageError
from dpagent.storage import StateDirectory, disk_errors, real_path, write_atomically

_HOLD = """
import sys
from pathlib import Path
from dpagent.storage import StateDirectory
directory = StateDirectory(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the state directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        process.stdin.close()
        process.stdout.close()


def things(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE things (name TEXT)")


def colours(connection: sqlite3.Connection) -> None:
    connection.execute("ALTER TABLE things ADD COLUMN colour TEXT")
    connection.execute("INSERT INTO things VALUES ('sky', 'blue')")


def version_of(path: Path) -> int:
    connection = sqlite3.connect(path)
    try:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])
    finally:
        connection.close()


# --- the lock -----------------------------------------------------------------------------------


def test_a_second_process_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    with (
        holder(tmp_path / "state") as process,
        pytest.raises(StateInUseError, match=rf"process {process.pid}\."),
    ):
        StateDirectory(tmp_path / "state")


def test_the_lock_falls_with_a_killed_holder(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.kill()
        process.wait(PATIENCE_S)
        with StateDirectory(tmp_path):
            assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_one_process_cannot_hold_it_twice_and_can_take_it_again(tmp_path: Path) -> None:
    with StateDirectory(tmp_path):
        with pytest.raises(StateInUseError, match=f"process {os.getpid()}"):
            StateDirectory(tmp_path)
        with pytest.raises(StateInUseError, match=f"process {os.getpid()}"):
            StateDirectory(tmp_path)
    with StateDirectory(tmp_path):
        pass


def test_the_directory_is_made_private_with_its_parents(tmp_path: Path) -> None:
    with StateDirectory(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_a_file_in_the_place_of_the_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(StorageError, match=re.escape(str(tmp_path / "state"))):
        StateDirectory(tmp_path / "state")


def test_a_disk_that_knows_no_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the program ended with a fault of its own."""

    def flock(_file: object, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StorageError, match=f"{re.escape(str(tmp_path / 'lock'))}: No locks available"):
        StateDirectory(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StorageError, match="is writable"):
            StateDirectory(tmp_path / "state")
    finally:
        tmp_path.chmod(0o700)


@contextmanager
def as_user(number: int) -> Iterator[None]:
    """Be another user than root for a while."""
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a while")
@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_of_another_users_directory_it_is_said_whose_it_is_and_who_asks(mode: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(mode)
        expected = rf"{name} belongs to user 0.* user 10001\..*`chown -R 10001`"
        with as_user(10_001), pytest.raises(StorageError, match=expected):
            StateDirectory(Path(name) / "state")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a while")
def test_of_another_users_database_too() -> None:
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "d.db"
        open_database(file, [things]).close()
        Path(name).chmod(0o777)
        with as_user(10_001), pytest.raises(StorageError, match=rf"{file} belongs to user 0"):
            open_database(file, [things])


# --- databases ----------------------------------------------------------------------------------


def test_a_database_is_durable_and_migrated_once(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    for _ in range(2):
        connection = open_database(path, [things, colours])
        assert connection.execute("PRAGMA synchronous").fetchone()[0] == 2  # FULL
        assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        assert [tuple(row) for row in connection.execute("SELECT * FROM things")] == [("sky", "blue")]
        connection.close()
    assert version_of(path) == 2


def test_a_later_migration_finds_the_data_of_the_earlier_version(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    connection = open_database(path, [things])
    connection.execute("INSERT INTO things VALUES ('old')")
    connection.close()
    connection = open_database(path, [things, colours])
    assert [row["name"] for row in connection.execute("SELECT name FROM things")] == ["old", "sky"]
    connection.close()


def test_a_migration_that_fails_leaves_the_version_before_it(tmp_path: Path) -> None:
    path = tmp_path / "x.db"

    def fails(connection: sqlite3.Connection) -> None:
        colours(connection)
        raise sqlite3.OperationalError("power cut")

    with pytest.raises(StorageError, match="power cut"):
        open_database(path, [things, fails])
    assert not path.exists(), "a database begins with its whole schema"
    open_database(path, [things]).close()
    with pytest.raises(StorageError, match="power cut"):
        open_database(path, [things, fails])
    assert version_of(path) == 1
    connection = open_database(path, [things])
    assert [row["name"] for row in connection.execute("PRAGMA table_info(things)")] == ["name"]
    assert connection.execute("SELECT count(*) FROM things").fetchone()[0] == 0
    connection.close()
    connection = open_database(path, [things, colours])
    assert connection.execute("SELECT count(*) FROM things").fetchone()[0] == 1
    connection.close()


def test_a_schema_of_the_same_number_with_other_tables_is_refused_and_left_alone(tmp_path: Path) -> None:
    """Of a build whose steps were others: before, a board charged a round, and could then not spool it."""
    path = tmp_path / "x.db"
    open_database(path, [things]).close()

    def other_things(connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE things (name TEXT, size REAL)")

    for steps in ([other_things], [other_things, colours]):
        with pytest.raises(
            StorageError, match=r"another build of dpagent: its 'things' is not what schema 1"
        ):
            open_database(path, steps)
        assert version_of(path) == 1
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE room (filler)")
        connection.execute("INSERT INTO things VALUES ('kept')")
        connection.commit()
    connection = open_database(path, [things, colours])
    assert connection.execute("SELECT count(*) FROM things").fetchone()[0] == 2, "one more table is no other"
    connection.close()


def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    open_database(path, [things, colours]).close()
    with pytest.raises(StorageError, match=r"has schema 2; this program supports up to 1\. .*newer dpagent"):
        open_database(path, [things])
    assert version_of(path) == 2


@pytest.mark.parametrize(
    "content", [b"not a database, only text" * 100, b"SQLite format 3\0" + b"\xff" * 4_000]
)
def test_what_is_no_database_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.db"
    path.write_bytes(content)
    with pytest.raises(StorageError, match=re.escape(str(path)) + ".*not a readable database.*backup"):
        open_database(path, [things])
    with pytest.raises(StorageError, match=re.escape(str(path)) + ".*not a readable database.*backup"):
        open_readonly(path)
    assert path.read_bytes() == content


def test_a_database_that_is_not_there_is_not_made_by_reading(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="does not exist"):
        open_readonly(tmp_path / "x.db")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError):
        open_database(tmp_path / "missing" / "x.db", [things])


@pytest.mark.parametrize("name", ["plain.db", "100%41.db", "a?b=c#d.db", "with space.db"])
def test_a_reader_sees_what_a_writer_commits_and_cannot_write(tmp_path: Path, name: str) -> None:
    writer = open_database(tmp_path / name, [things])
    reader = open_readonly(tmp_path / name)
    writer.execute("INSERT INTO things VALUES ('seen')")
    assert reader.execute("SELECT name FROM things").fetchone()["name"] == "seen"
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.execute("DELETE FROM things")
    reader.close()
    writer.close()


def test_a_transaction_is_whole_or_not_at_all(tmp_path: Path) -> None:
    connection = open_database(tmp_path / "x.db", [things])

    def fill() -> None:
        with transaction(connection):
            connection.execute("INSERT INTO things VALUES ('half')")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill()
    assert not connection.in_transaction
    assert connection.execute("SELECT count(*) FROM things").fetchone()[0] == 0
    with transaction(connection):
        connection.execute("INSERT INTO things VALUES ('whole')")
    assert connection.execute("SELECT count(*) FROM things").fetchone()[0] == 1
    connection.close()


def test_a_large_commit_leaves_no_large_log(tmp_path: Path) -> None:
    connection = open_database(tmp_path / "x.db", [things])
    with transaction(connection):
        connection.execute("INSERT INTO things VALUES (?)", ("x" * (8 << 20),))
    log = tmp_path / "x.db-wal"
    assert log.stat().st_size > 8 << 20
    for _ in range(2):  # It begins anew once it is in the database.
        with transaction(connection):
            connection.execute("INSERT INTO things VALUES ('small')")
    assert log.stat().st_size <= 1 << 20
    connection.close()


def test_a_new_database_has_pages_of_the_size_asked_for(tmp_path: Path) -> None:
    open_database(tmp_path / "x.db", [things], page_bytes=1024).close()
    connection = open_database(tmp_path / "x.db", [things])
    assert connection.execute("PRAGMA page_size").fetchone()[0] == 1024, "and keeps it"
    connection.close()


def test_a_full_disk_is_a_sentence_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    connection = open_database(path, [things])
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count={pages + 5}")

    def fill() -> None:
        with database_errors(path), transaction(connection):
            for _ in range(100):
                connection.execute("INSERT INTO things VALUES (?)", ("x" * 1_000,))

    with pytest.raises(StorageError, match=f"^{re.escape(str(path))}: the disk is full"):
        fill()
    assert not connection.in_transaction
    assert connection.execute("SELECT count(*) FROM things").fetchone()[0] == 0
    with database_errors(path), transaction(connection):
        connection.execute("INSERT INTO things VALUES ('small')")
    connection.close()
    connection = open_database(path, [things])
    assert [row["name"] for row in connection.execute("SELECT * FROM things")] == ["small"]
    connection.close()


def test_a_locked_database_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    one, other = open_database(path, [things]), open_database(path, [things])
    other.execute("PRAGMA busy_timeout=10")

    def write() -> None:
        with database_errors(path), transaction(other):
            other.execute("INSERT INTO things VALUES ('late')")

    with transaction(one), pytest.raises(StorageError, match="locked by another program"):
        write()
    one.close()
    other.close()


# --- files --------------------------------------------------------------------------------------


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_atomically(path, b"old")
    write_atomically(path, b"new", mode=0o600)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path) -> None:
    import resource
    import signal

    path = tmp_path / "x"
    write_atomically(path, b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, limits[1]))
    try:
        with pytest.raises(StorageError, match=re.escape(str(path))):
            write_atomically(path, b"n" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["x"], "what is in use wants that room"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_no_space_left_is_called_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, really_open = tmp_path / "x", os.open
    path.write_bytes(b"old")

    def open_on_a_full_disk(file: Path, flags: int, mode: int = 0o777) -> int:
        return really_open("/dev/full", os.O_WRONLY) if flags & os.O_CREAT else really_open(file, flags, mode)

    monkeypatch.setattr(os, "open", open_on_a_full_disk)
    with pytest.raises(StorageError, match="the disk is full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


def test_text_that_is_damaged_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\xff")
    with (
        pytest.raises(StorageError, match=r"text is no text in UTF-8 \(invalid start byte\)"),
        disk_errors(tmp_path / "text"),
    ):
        (tmp_path / "text").read_text(encoding="utf-8")


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_what_is_no_regular_file_is_never_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/"), Path()):
        with pytest.raises(StorageError, match="not a regular file"):
            write_atomically(path, b"new")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_somebody_elses_file_is_not_written_through_the_temporary_name(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / ".x.new").symlink_to(tmp_path / "mine")
    write_atomically(tmp_path / "x", b"new")
    assert (tmp_path / "mine").read_bytes() == b"mine"
    assert (tmp_path / "x").read_bytes() == b"new"


def test_a_file_in_a_directory_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        write_atomically(tmp_path / "missing" / "x", b"new")


def test_a_left_over_temporary_file_does_not_open_a_secret_to_others(tmp_path: Path) -> None:
    (tmp_path / ".x.new").write_bytes(b"of a crash")
    (tmp_path / ".x.new").chmod(0o644)
    write_atomically(tmp_path / "x", b"secret", mode=0o600)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600


# --- errors of the system ------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_without_a_descriptor_the_path_is_not_blamed(number: int) -> None:
    with pytest.raises(StorageError, match=r"x: .*raise the limit") as raised, disk_errors(Path("x")):
        raise OSError(number, os.strerror(number))
    assert "writable" not in str(raised.value)


def test_a_link_to_itself_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert real_path(tmp_path / "loop") == tmp_path / "loop"


# --- a small file that is replaced over a spare one ---------------------------------------------
