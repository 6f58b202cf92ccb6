"""PostgreSQL under several programs at once: the sums are exact, and nobody waits for ever."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import closing

import numpy as np
import psycopg
import pytest
from children import PATIENCE_S
from postgresql import Postgresql, new_place
from stores import begin, open_store

from coordinator.database import schema
from coordinator.database.opening import open_database, open_postgresql
from coordinator.database.postgresql import PostgresqlDatabase
from coordinator.database.settings import PostgresqlAddress
from coordinator.model_state import ModelState
from coordinator.seats import OpenedFragment
from coordinator.shared_store import SharedStore
from coordinator.store import Store
from dpagent.errors import ConfigurationError, DatabaseAwayError, NotReadyError, StorageError

MODEL = ModelState(np.zeros(4, np.float32), np.zeros((1, 4)), 1.0, ())
WORKERS = 4


@pytest.fixture
def place(postgresql: Postgresql) -> PostgresqlAddress:
    return new_place(postgresql)


def opened(place: PostgresqlAddress) -> Store:
    store = open_store(place)
    begin(store, MODEL)
    store.start_round(1, 10.0, 20.0)
    return store


def fragment(number: int, positions: int) -> OpenedFragment:
    values = np.random.default_rng(number).integers(-(2**20), 2**20, 5)
    return OpenedFragment(number.to_bytes(16, "big"), 1, number % positions, values, 0.0)


def beside_each_other(work: Callable[[int], None]) -> None:
    """All workers' work at the same time; what one of them raises fails the test."""
    errors: list[BaseException] = []
    start = threading.Barrier(WORKERS)

    def run(number: int) -> None:
        try:
            start.wait()
            work(number)
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("seats", [50, 12, None])
def test_workers_beside_each_other_count_each_fragment_once_and_the_same_ones(
    place: PostgresqlAddress, seats: int | None
) -> None:
    """With too few seats, too: the least tickets have them, whoever came first, to whichever worker."""
    positions = 3
    fragments = [fragment(number, positions) for number in range(150)]
    outcomes = []
    for alone in (True, False):
        store = opened(place) if alone else Store(open_postgresql(place, "test"), 1)

        def work(number: int, alone: bool = alone) -> None:
            if alone and number:
                return
            mine = random.Random(number).sample(fragments, len(fragments))  # each fragment to each worker
            with closing(open_postgresql(place, "worker")) as database:
                for start in range(0, len(mine), 13):
                    SharedStore(database, 1, number + 1).count(
                        mine[start : start + 13], 1, seats=seats, keeps_values=seats is not None
                    )

        beside_each_other(work)
        store.stop_counting(1, 15.0, seats=seats)
        (sums,) = store.sums(1)
        outcomes.append(
            (
                store.counts(1),
                {at: (count, total.tolist()) for at, (count, total) in sums.items()},
                {bytes(row["id"]) for row in store.database.execute("SELECT id FROM fragments")},
            )
        )
        for table in ("fragments", "partial_sums", "tallies"):
            store.database.execute(f"DELETE FROM {table}")
        store.database.execute("UPDATE rounds SET counted_at = NULL")
        store.database.close()
    assert outcomes[0] == outcomes[1]
    counts, sums, known = outcomes[0]
    most = 50 if seats is None else seats
    assert counts == dict.fromkeys(range(positions), most)
    for position in range(positions):
        exact = [each.values for each in fragments if each.id in known and each.position == position]
        assert sums[position] == (most, np.sum(exact, axis=0).tolist())


def test_a_round_that_closes_waits_for_the_batches_that_are_under_way(place: PostgresqlAddress) -> None:
    store = opened(place)
    counting, closed = threading.Event(), threading.Event()

    def close() -> None:
        counting.wait()
        with closing(open_postgresql(place, "leader")) as database:
            Store(database, 1).stop_counting(1, 15.0, seats=9)
        closed.set()

    thread = threading.Thread(target=close)
    thread.start()
    with closing(open_postgresql(place, "worker")) as database:
        with database.transaction(shared=True):
            SharedStore(database, 1, 1)._seats.take([fragment(1, 1)], 1, 9)
            counting.set()
            assert not closed.wait(0.3), "a batch is under way"
        assert closed.wait(20.0)
        assert SharedStore(database, 1, 1).count([fragment(2, 1)], 1, seats=9).late == 1
    thread.join()
    assert store.counts(1) == {0: 1}
    store.database.close()


def test_one_of_two_leads_and_the_other_one_after_it(place: PostgresqlAddress) -> None:
    first, second = (open_postgresql(place, "coordinator") for _ in range(2))
    assert first.lead()
    assert not second.lead()
    first.close()
    assert second.lead()
    second.close()


def test_who_starts_again_leads_at_once(place: PostgresqlAddress) -> None:
    """Before, the server let go of the last one's lock when it came to it, and the next one stood by."""
    with closing(open_postgresql(place, "coordinator")) as maker:
        assert maker.lead()
    for _ in range(30):
        with closing(open_postgresql(place, "next")) as second:
            with closing(open_postgresql(place, "coordinator")) as first:
                assert first.lead()
            assert second.lead()


def test_who_leads_no_more_cannot_write(place: PostgresqlAddress, postgresql: Postgresql) -> None:
    """The lock and the means to write are one session: it ends, and both are gone."""
    with closing(open_postgresql(place, "other")) as other:
        leader = open_postgresql(place, "coordinator")
        assert leader.lead()
        (pid,) = leader.execute("SELECT pg_backend_pid()").fetchone()
        with postgresql.connect() as connection:
            connection.execute("SELECT pg_terminate_backend(%s)", (pid,))
        until = time.monotonic() + PATIENCE_S
        while not other.lead():
            assert time.monotonic() < until
        with pytest.raises(DatabaseAwayError, match="is away"), leader.transaction():
            leader.execute("DELETE FROM jobs")
        leader.close()


# --- tables and errors ---------------------------------------------------------------------------------


def test_a_step_that_fails_leaves_the_tables_as_they_were(
    place: PostgresqlAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash in it too: the server undoes what was not committed."""
    open_database(place).close()
    known = schema.STEPS

    def half(tables: schema.Schema) -> None:
        tables.create("new", "x INTEGER")
        tables.execute("INSERT INTO nowhere VALUES (1)")

    monkeypatch.setattr(schema, "STEPS", (*known, (schema.Part.ROUNDS, half)))
    with closing(open_postgresql(place, "coordinator")) as database:
        with pytest.raises(StorageError, match="nowhere"):
            database.lead()
        assert database.schema_version() == len(known)
        with pytest.raises(StorageError), database.errors():
            database.execute("SELECT * FROM new")
    whole = (schema.Part.ROUNDS, lambda tables: tables.create("new", "x INTEGER"))
    monkeypatch.setattr(schema, "STEPS", (*known, whole))
    for use in (PostgresqlDatabase.create, PostgresqlDatabase.require_current):
        database = open_postgresql(place, "command")
        with pytest.raises(StorageError, match="Start the coordinator of this version first"):
            use(database)
        database.close()
    with closing(open_postgresql(place, "coordinator")) as leader:
        assert leader.lead()
        assert leader.execute("SELECT count(*) FROM new").fetchone()[0] == 0


def test_the_tables_of_a_later_version_are_left_alone(
    place: PostgresqlAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = open_database(place)
    database.execute("UPDATE schema_version SET steps = 99")
    database.close()
    for use in (lambda: open_database(place), lambda: open_postgresql(place, "worker")):
        with pytest.raises(StorageError, match="has schema 99; this program supports up to"):
            use()


def test_no_tables_yet_is_a_sentence(place: PostgresqlAddress) -> None:
    with (
        closing(open_postgresql(place, "worker")) as database,
        pytest.raises(NotReadyError, match="coordinator run"),
    ):
        database.require_current()


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda url: url.replace("/postgres?", "/nowhere?"), ConfigurationError, "does not exist"),
        (lambda url: url.replace("tester@", "nobody@"), ConfigurationError, "Check store.url"),
        (lambda url: url.replace("fleet_", "no_"), StorageError, "the search path has no schema"),
        (lambda url: url + "&colour=green", ConfigurationError, "colour"),
    ],
)  # fmt: skip
def test_an_address_that_is_wrong_is_a_sentence(
    place: PostgresqlAddress, change: Callable[[str], str], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words) as raised:
        open_postgresql(PostgresqlAddress(change(place.url), place.password), "test")
    assert place.password not in str(raised.value)


def test_a_server_that_is_away_is_a_sentence(place: PostgresqlAddress, postgresql: Postgresql) -> None:
    away = PostgresqlAddress(place.url.replace(str(postgresql.port), "1"), place.password)
    with pytest.raises(DatabaseAwayError, match="No PostgreSQL answers at"):
        open_postgresql(away, "test")


def test_a_full_disk_counts_nothing_of_a_batch_and_is_a_sentence(
    place: PostgresqlAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(place)
    store.count([fragment(1, 1)], 1, seats=9)
    add = store._seats._add

    def full(*arguments: object, **named: object) -> None:
        add(*arguments, **named)  # type: ignore[arg-type]
        raise psycopg.errors.DiskFull("could not extend file: No space left on device")

    monkeypatch.setattr(store._seats, "_add", full)
    with pytest.raises(StorageError, match=r"the disk of the database is full. Nothing was lost"):
        store.count([fragment(2, 1)], 1, seats=9)
    monkeypatch.undo()
    assert store.counts(1) == {0: 1}
    assert len(store.count([fragment(2, 1)], 1, seats=9).fresh) == 1
    store.database.close()


def test_a_user_who_may_not_make_tables_is_told_so(place: PostgresqlAddress, postgresql: Postgresql) -> None:
    with postgresql.connect() as connection:
        connection.execute("CREATE ROLE guest LOGIN PASSWORD 'guest'")
        try:
            name = place.url.rpartition("%3D")[2]
            connection.execute(f"GRANT USAGE ON SCHEMA {name} TO guest")
            url = place.url.replace("tester@", "guest@")
            with pytest.raises(StorageError, match=r"may not do that.*own its schema"):
                open_database(PostgresqlAddress(url, "guest"))
        finally:
            connection.execute(f"REVOKE USAGE ON SCHEMA {name} FROM guest")
            connection.execute("DROP ROLE guest")


def test_a_job_that_trusts_the_coordinator_is_warned_that_deleted_values_stay(
    place: PostgresqlAddress, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(open_database(place)) as database:
        for _ in range(2):
            database.erase_what_is_deleted()
    assert caplog.text.count("keeps what is deleted, in its files for a while and in its log") == 1


def test_tables_that_are_being_made_are_none_to_others(
    postgresql: Postgresql, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that came meanwhile took half of them for an earlier version's, and was refused."""
    address = new_place(postgresql)
    seen: list[int] = []
    part, last = schema.STEPS[-1]

    def looked_at(tables: schema.Schema) -> None:
        with closing(open_postgresql(address, "another")) as other:
            seen.append(other.require_known())
        last(tables)

    monkeypatch.setattr(schema, "STEPS", (*schema.STEPS[:-1], (part, looked_at)))
    with closing(open_postgresql(address, "command")) as database:
        database.create()
        assert database.require_known() == len(schema.STEPS)
    assert seen == [0]
