"""The spool: what is due, what a receipt or the end of a round takes from it, and what stays."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent.spool import Spool, SpooledFragment, create_spool
from dpagent.database_file import transaction


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:")
    create_spool(connection)
    yield connection
    connection.close()


@pytest.fixture
def spool(connection: sqlite3.Connection) -> Spool:
    """Due at 1, 2 and 3: ``a1``, ``a2`` and ``a3`` of round 1."""
    spool = Spool(connection)
    spool.put("job", 1, [SpooledFragment(b"a%d" % at, b"message %d" % at, float(at)) for at in (3, 1, 2)])
    return spool


def lines(connection: sqlite3.Connection) -> dict[bytes, tuple[Any, ...]]:
    """By digest: state, whether its bytes are there, when it was first sent."""
    rows = connection.execute(
        "SELECT digest, state, number IN (SELECT number FROM messages), first_sent_at FROM fragments"
    )
    return {digest: tuple(rest) for digest, *rest in rows}


def test_what_is_due_comes_earliest_first_and_no_more_than_is_asked_for(spool: Spool) -> None:
    assert spool.due(0.999, 10) == {}
    assert spool.due(1.0, 10) == {b"a1": 1.0}
    assert spool.message(b"a1") == b"message 1"
    assert list(spool.due(9.0, 10)) == [b"a1", b"a2", b"a3"]
    assert list(spool.due(9.0, 2)) == [b"a1", b"a2"]
    assert spool.due(9.0, 0) == {}
    assert spool.next_due_at() == 1.0


def test_of_more_that_are_due_than_leave_next_any_are_taken(spool: Spool) -> None:
    assert list(spool.next_ones(2.5, 2, ())) == [b"a1", b"a2"]
    assert list(spool.next_ones(0.0, 9, ())) == [b"a1", b"a2", b"a3"]
    assert {next(iter(spool.next_ones(9.0, 1, ()))) for _ in range(100)} == {b"a1", b"a2", b"a3"}
    assert {tuple(spool.next_ones(9.0, 2, {b"a3"})) for _ in range(100)} == {(b"a1", b"a3"), (b"a2", b"a3")}
    assert spool.next_ones(9.0, 1, {b"a2", b"another"}) == {b"a2": 2.0}


def test_what_has_no_time_yet_is_never_due(connection: sqlite3.Connection) -> None:
    spool = Spool(connection)
    assert spool.next_due_at() is None
    spool.put("job", 1, [SpooledFragment(b"a", b"message")])
    assert spool.due(1e300, 10) == {}
    spool.reschedule([(5.0, b"a")])
    assert spool.next_due_at() == 5.0


def test_when_it_was_first_sent_stays(spool: Spool, connection: sqlite3.Connection) -> None:
    spool.mark_sent(b"a1", 1_000.0, 7.0)
    spool.mark_sent(b"a1", 1_006.0, 13.0)
    assert lines(connection)[b"a1"] == ("sent", 1, 1_000.0)
    assert lines(connection)[b"a2"] == ("waiting", 1, None)
    assert list(spool.due(12.9, 10)) == [b"a2", b"a3"]
    assert list(spool.due(13.0, 10)) == [b"a2", b"a3", b"a1"]


def test_a_receipt_counts_each_fragment_of_ours_once(spool: Spool, connection: sqlite3.Connection) -> None:
    assert spool.mark_counted([b"a1", b"another device's", b"a3"]) == 2
    assert spool.mark_counted([b"a1", b"a2"]) == 1
    assert spool.mark_counted([]) == 0
    assert spool.message(b"a1") is None
    spool.drop_settled()
    assert {line[:2] for line in lines(connection).values()} == {("counted", 0)}
    assert spool.pending() == {}
    assert spool.next_due_at() is None
    # A PUBACK that comes after the receipt does not bring it back.
    spool.mark_sent(b"a1", 1_000.0, 7.0)
    assert lines(connection)[b"a1"] == ("counted", 0, None)


@pytest.mark.parametrize(
    ("job", "number", "left"),
    [("job", 1, [b"a1", b"a2", b"a3"]), ("job", 2, [b"b"]), ("other", 2, [b"c"]), ("other", 1, [])],
)  # fmt: skip
def test_only_the_fragments_of_one_round_outlive_the_end_of_the_others(
    spool: Spool, connection: sqlite3.Connection, job: str, number: int, left: list[bytes]
) -> None:
    spool.put("job", 2, [SpooledFragment(b"b", b"message", 1.0)])
    spool.put("other", 2, [SpooledFragment(b"c", b"message", 1.0)])
    assert spool.expire_others(job, number) == 5 - len(left)
    assert sorted(spool.pending()) == left
    assert spool.expire_others(job, number) == 0
    assert [spool.message(digest) is not None for digest in (b"a1", b"b", b"c")] == [
        digest in left for digest in (b"a1", b"b", b"c")
    ]
    spool.drop_settled()
    expired = {digest for digest, line in lines(connection).items() if line[:2] == ("expired", 0)}
    assert expired == {b"a1", b"a2", b"a3", b"b", b"c"} - set(left)


def test_a_late_receipt_still_counts_what_expired(spool: Spool, connection: sqlite3.Connection) -> None:
    spool.put("other", 1, [SpooledFragment(b"c", b"message", 1.0)])
    assert spool.expire_job("job") == 3
    assert list(spool.pending()) == [b"c"]
    assert spool.mark_counted([b"a2"]) == 1
    assert lines(connection)[b"a2"][0] == "counted"


def test_lines_of_other_jobs_are_forgotten_unless_they_are_pending(
    spool: Spool, connection: sqlite3.Connection
) -> None:
    spool.put("new", 1, [SpooledFragment(b"b", b"message", 1.0)])
    spool.mark_counted([b"a1", b"b"])
    spool.forget_other_jobs("new")
    assert set(lines(connection)) == {b"a2", b"a3", b"b"}


def test_lines_of_settled_fragments_are_bounded(
    spool: Spool, connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may have thousands of rounds of as many fragments as an update has coordinates."""
    monkeypatch.setattr("agent.spool.SETTLED_KEPT", 2)
    spool.mark_counted([b"a1", b"a2"])
    spool.put("job", 2, [SpooledFragment(b"b", b"message", 1.0)])
    assert set(lines(connection)) == {b"a1", b"a2", b"a3", b"b"}
    spool.expire_others("job", 2)
    spool.put("job", 3, [SpooledFragment(b"c", b"message", 1.0)])
    assert set(lines(connection)) == {b"b", b"c"}, "what is pending stays"


def test_time_and_message_of_a_row_that_goes_go_with_it(spool: Spool, connection: sqlite3.Connection) -> None:
    """Dummies of a round that another replaces are dropped, sent or not. A time that stayed would be due for
    ever, and the agent look for it a thousand times a second."""
    connection.execute("DELETE FROM fragments WHERE digest = ?", (b"a1",))
    assert spool.next_due_at() == 2.0
    assert connection.execute("SELECT count(*) FROM messages").fetchone() == (2,)
    connection.execute("DELETE FROM fragments")
    assert spool.next_due_at() is None
    assert connection.execute("SELECT count(*) FROM messages").fetchone() == (0,)


def test_a_round_writes_as_many_pages_after_a_long_job(tmp_path: Path) -> None:
    """An index of all digests, which are random, had a page written for each fragment: 16 more by here."""
    file, pages = tmp_path / "spool.db", []
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        for name, value in (("page_size", 1024), ("journal_mode", "WAL"), ("wal_autocheckpoint", 0)):
            connection.execute(f"PRAGMA {name} = {value}")
        connection.execute("PRAGMA secure_delete = FAST")
        create_spool(connection)
        spool, log = Spool(connection), Path(f"{file}-wal")
        for number in range(200):
            before = log.stat().st_size
            fragments = [SpooledFragment(os.urandom(16), bytes(1_600)) for _ in range(16)]
            with transaction(connection):
                spool.put("job" * 10, number, fragments)
            with transaction(connection):
                spool.mark_counted([each.digest for each in fragments])
                spool.drop_settled()
            pages.append((log.stat().st_size - before) / (1024 + 24))
    least = 2 * 16  # Of the messages, each of which has two.
    assert least < max(pages[5:]) <= least + 16
