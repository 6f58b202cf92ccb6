"""Counting: once or not at all, and the same bits in any order, in any batches, across restarts."""

from __future__ import annotations

import _sqlite3
import ctypes
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from postgresql import Postgresql, new_place
from stores import JOB, begin, open_store

from coordinator.database.settings import StorePlace
from coordinator.database.sqlite import SqliteDatabase
from coordinator.measurements import Traffic
from coordinator.model_state import ModelState
from coordinator.queue import Queue
from coordinator.reader import StoreReader
from coordinator.seats import Counted, OpenedFragment
from coordinator.shared_store import SharedStore, Workers
from coordinator.store import RoundResult, Shown, Store
from dpagent import faults
from dpagent.errors import StorageError
from dpagent.faults import FaultPoint
from dpagent.learning.inference.evaluation import Evaluation
from dpagent.protocol.receipts import receipt_digest

BLOCK = 7
WEIGHTS = np.array([0.1, -0.0, np.inf, 1e-40], np.float32)
MODEL = ModelState(WEIGHTS, np.zeros((1, 4)), 1.5, (0.1, 0.2))
Sums = dict[int, tuple[int, list[int]]]


def fragment(
    number: int, position: int = 0, round_number: int = 1, value: int | None = None
) -> OpenedFragment:
    values = (
        np.random.default_rng(number).integers(-(2**31), 2**31, BLOCK)
        if value is None else np.full(BLOCK, value, np.int64)
    )  # fmt: skip
    return OpenedFragment(number.to_bytes(16, "big"), round_number, position, values, float(number))


def sums_of(store: Store, number: int = 1) -> Sums:
    (sums,) = store.sums(number)
    return {position: (count, total.tolist()) for position, (count, total) in sums.items()}


def count(store: Store, fragments: list[OpenedFragment], open_round: int = 1, seats: int = 1_000) -> Counted:
    return store.count(fragments, open_round, seats=seats)


def plain_sums(fragments: list[OpenedFragment]) -> Sums:
    """The same with Python's integers and a dictionary of ids."""
    result: Sums = {}
    for one in {item.id: item for item in reversed(fragments)}.values():
        count, total = result.get(one.position, (0, [0] * BLOCK))
        result[one.position] = (count + 1, [a + int(b) for a, b in zip(total, one.values, strict=True)])
    return result


@pytest.fixture
def store(place: StorePlace) -> Iterator[Store]:
    store = open_store(place)
    yield store
    store.database.close()


@pytest.fixture
def file_store(tmp_path: Path) -> Iterator[Store]:
    """One in SQLite."""
    store = open_store(tmp_path)
    yield store
    store.database.close()


def connection_of(store: Store) -> sqlite3.Connection:
    assert isinstance(store.database, SqliteDatabase)
    return store.database.connection


@settings(max_examples=25)
@given(data=st.data())
def test_any_order_any_batches_any_restarts_give_the_same_bits(data: st.DataObject) -> None:
    fragments = [fragment(number, position=number % 3) for number in range(data.draw(st.integers(1, 12)))]
    repeats = data.draw(st.lists(st.sampled_from(fragments), max_size=6))
    arrivals = data.draw(st.permutations(fragments + repeats))
    with tempfile.TemporaryDirectory() as directory:
        store = open_store(Path(directory))
        fresh: list[bytes] = []
        while arrivals:
            size = data.draw(st.integers(1, len(arrivals)))
            counted = count(store, arrivals[:size], 1)
            assert len(counted.fresh) + len(counted.repeated) == size
            fresh += counted.fresh
            arrivals = arrivals[size:]
            if data.draw(st.booleans()):
                store.database.close()
                store = open_store(Path(directory))
        result, counts = sums_of(store), store.counts(1)
        store.database.close()
    assert sorted(fresh) == sorted(one.id for one in fragments)
    assert result == plain_sums(fragments)
    assert counts == {position: count for position, (count, _) in result.items()}


def test_sums_are_exact_at_the_ends_of_the_wire_range(store: Store) -> None:
    low, high = -(2**31), 2**31 - 1
    count(store, [fragment(number, value=low) for number in range(300)], 1)
    count(store, [fragment(number, 1, value=high) for number in range(300, 600)], 1)
    assert sums_of(store) == {0: (300, [300 * low] * BLOCK), 1: (300, [300 * high] * BLOCK)}


def test_the_first_of_two_fragments_with_one_id_counts(store: Store) -> None:
    counted = count(store, [fragment(1, value=5), fragment(1, value=9), fragment(1, position=2, value=9)], 1)
    assert (len(counted.fresh), len(counted.repeated), counted.spent) == (1, 0, 2)
    assert sums_of(store) == {0: (1, [5] * BLOCK)}


def test_a_repeated_fragment_is_named_again_for_its_receipt(store: Store, place: StorePlace) -> None:
    count(store, [fragment(1), fragment(2)], 1)
    counted = count(store, [fragment(2), fragment(3)], 1)
    assert counted.fresh == (fragment(3).id,)
    assert counted.repeated == (fragment(2).id,)
    reader = StoreReader(place)
    assert reader.counters() == {"duplicates": 1}
    reader.close()


def begun(store: Store) -> Store:
    begin(store, MODEL)
    store.start_round(1, 10.0, 20.0)
    return store


HALF = Evaluation(np.array([[2, 1], [1, 0]]), 0.75)


def close(store: Store, number: int = 1, evaluation: Evaluation | None = None) -> None:
    store.close_round(
        number,
        ModelState(WEIGHTS, np.ones((1, 4)), 0.7, (0.3, 0.4)),
        RoundResult(evaluation, 3, 0.75, 2.5, 0.1, ("dense 1",), 0.25, Traffic(700, 900)),
        closed_at=25.0,
    )


def test_late_messages_are_a_number_and_never_in_a_sum(store: Store, place: StorePlace) -> None:
    count(begun(store), [fragment(1)], 1)
    close(store)
    store.start_round(2, 30.0, 40.0)
    counted = count(store, [fragment(5), fragment(6, round_number=2), fragment(1), fragment(5)], 2)
    assert counted.fresh == (fragment(6).id,)
    assert counted.receipted == [fragment(6).id], "none for a closed round, as for its dummies"
    assert counted.late == 3, "one a message, the same one twice"
    assert set(sums_of(store, 2)) == {0}
    assert sums_of(store, 1) == {}
    reader = StoreReader(place)
    assert reader.counters() == {"late": 3}
    assert set(reader.fragments()) == {fragment(1).id, fragment(6).id}
    assert [record.fragments for record in reader.rounds()] == [1, 1]
    reader.close()


def test_a_flood_of_late_fragments_does_not_fill_the_disk(file_store: Store) -> None:
    store, connection = file_store, connection_of(file_store)
    begun(store)
    close(store)
    store.start_round(2, 30.0, 40.0)
    count(store, [fragment(0)], 2)  # the counter's own row
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    for start in range(1, 3_001, 300):
        count(store, [fragment(number) for number in range(start, start + 300)], 2)
    assert connection.execute("PRAGMA page_count").fetchone()[0] == pages


def test_a_replay_of_a_late_fragment_under_the_open_round_is_counted_once_at_most(store: Store) -> None:
    begun(store)
    close(store)
    store.start_round(2, 30.0, 40.0)
    count(store, [fragment(5)], 2)
    counted = count(store, [fragment(5, round_number=2), fragment(5, round_number=2)], 2)
    assert len(counted.fresh) <= 1
    assert sum(count for count, _ in sums_of(store, 2).values()) == len(counted.fresh)


def test_closing_a_round_takes_the_model_and_drops_the_sums(store: Store, place: StorePlace) -> None:
    count(begun(store), [fragment(1), fragment(2), fragment(3, 1)], 1)
    assert store.over_rounds() == 0
    assert store.open_round() is not None
    close(store, evaluation=HALF)
    assert sums_of(store) == {}
    assert store.open_round() is None
    assert store.over_rounds() == 1
    model = store.model()
    assert model.weights.tobytes() == WEIGHTS.tobytes()
    assert model.moments.tolist() == [[1.0] * 4]
    assert model.clip_norm == 0.7
    assert model.radii == (0.3, 0.4)
    reader = StoreReader(place)
    (record,) = reader.rounds()
    measured = reader.measured_of(1)[1]
    reader.close()
    assert (measured.loss, measured.by_class) == (0.75, ((3, 2, 3), (1, 0, 1)))
    assert measured.confusion is not None
    assert measured.confusion.tolist() == [[2, 1], [1, 0]]
    assert measured.majority_class_accuracy == 0.75
    assert (measured.received, measured.published) == (700, 900)
    assert (record.fragments, record.accuracy, record.clamped, record.epsilon) == (3, 0.5, 3, 0.1)
    assert (record.kept, record.noise_multiplier, record.out_of_range) == (0.75, 2.5, ("dense 1",))
    assert record.clip_norm == 0.25
    assert (record.opened_at, record.closed_at) == (10.0, 25.0)


def test_a_full_disk_counts_nothing_of_a_batch(file_store: Store) -> None:
    store, connection = file_store, connection_of(file_store)
    count(store, [fragment(1)], 1)
    before = sums_of(store)
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count={pages + 2}")
    with pytest.raises(StorageError, match="disk is full"):
        count(store, [fragment(number, position=number) for number in range(2, 400)], 1)
    assert sums_of(store) == before
    assert connection.execute("SELECT count(*) FROM fragments").fetchone()[0] == 1
    connection.execute("PRAGMA max_page_count=1000000")
    assert len(count(store, [fragment(number, position=number) for number in range(2, 400)], 1).fresh) == 398


def test_a_full_disk_does_not_close_a_round_by_half(file_store: Store) -> None:
    store, connection = file_store, connection_of(file_store)
    count(begun(store), [fragment(1)], 1)
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count={pages + 1}")
    large = np.ones(100_000, np.float32)
    with pytest.raises(StorageError, match="disk is full"):
        store.close_round(
            1,
            ModelState(large, large[np.newaxis].astype(np.float64), 1.0, ()),
            RoundResult(None, 0, 1.0, 1.0, 0.1),
            closed_at=25.0,
        )
    assert store.open_round() is not None
    assert set(sums_of(store)) == {0}
    assert len(store.model().weights) == 4


def test_pages_in_memory_are_bounded_however_large_the_database_grows(file_store: Store) -> None:
    """By default SQLite kept 2 MiB of them, the last after a thousand rounds of a small fleet."""
    used = ctypes.CDLL(_sqlite3.__file__).sqlite3_memory_used
    used.restype = ctypes.c_int64
    before = used()
    for _ in range(1_000):
        with file_store.database.transaction():
            file_store.database.execute("INSERT INTO receipts (digests) VALUES (?)", (bytes(3_000),))
    assert used() - before < 3 << 18


def test_a_job_is_the_same_after_a_restart(place: StorePlace) -> None:
    begun(open_store(place)).database.close()
    store = open_store(place)
    (queued,) = Queue(store.database).jobs()
    assert queued.job == JOB
    model = store.model()
    assert model.weights.tobytes() == WEIGHTS.tobytes()
    assert model.moments.tolist() == [[0.0] * 4]
    assert model.clip_norm == 1.5
    assert model.radii == (0.1, 0.2)
    assert not Queue(store.database).begin(1, MODEL, 9.0), "it has begun"
    store.database.close()


def test_a_new_deadline_keeps_the_round(store: Store) -> None:
    count(begun(store), [fragment(1)], 1)
    current = store.start_round(1, 99.0, 200.0)
    assert (current.number, current.opened_at, current.deadline) == (1, 10.0, 200.0)
    assert set(sums_of(store)) == {0}


def test_the_first_announcement_is_remembered_for_its_round(store: Store, place: StorePlace) -> None:
    begun(store)
    current = store.open_round()
    assert current is not None
    assert current.announced_at is None
    store.mark_announced(1, 11.0)
    store.mark_announced(1, 99.0)
    again = open_store(place)
    assert again.start_round(1, 50.0, 70.0).announced_at == 11.0
    again.database.close()
    close(store)
    assert store.start_round(2, 80.0, 90.0).announced_at is None


def test_the_end_is_remembered(store: Store, place: StorePlace) -> None:
    begun(store)
    reader = StoreReader(place)
    assert not reader.is_finished()
    Queue(store.database).end(1, 30.0)
    assert reader.is_finished()
    assert reader.job() == JOB
    reader.close()


def test_a_reader_cannot_write(store: Store, place: StorePlace) -> None:
    reader = StoreReader(place)
    with pytest.raises(StorageError, match=r"read-?only"), reader._database.errors():
        reader._database.execute("DELETE FROM fragments")
    reader.close()


def test_a_reader_needs_a_database(tmp_path: Path, postgresql: Postgresql) -> None:
    with pytest.raises(StorageError, match="does not exist"):
        StoreReader(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="start `dpagent coordinator run`, which creates them"):
        StoreReader(new_place(postgresql))


def test_totals_are_values_of_their_own(store: Store) -> None:
    values: NDArray[np.int64] = np.arange(BLOCK)
    count(store, [OpenedFragment(b"a" * 16, 1, 0, values, 0.0)], 1)
    values += 100
    assert sums_of(store)[0][1] == list(range(BLOCK))


@pytest.mark.parametrize("is_given_up", [False, True])
@pytest.mark.parametrize("erases", [True, False])
def test_a_closed_round_leaves_no_byte_of_its_values(tmp_path: Path, erases: bool, is_given_up: bool) -> None:
    """Where no noise hides them; otherwise they may stay in free pages, which this test would see."""
    store = open_store(tmp_path)
    if erases:
        store.database.erase_what_is_deleted()
    begin(store, MODEL)
    store.start_round(1, 0.0, 1.0)
    marks = [fragment(number, position=number % 5) for number in range(400)]
    count(store, marks)
    if is_given_up:
        store.give_up_round(1, noise_multiplier=1.0, epsilon=0.5, least=0, given_up_at=1.0)
    else:
        store.close_round(1, MODEL, RoundResult(None, 0, 1.0, 1.0, 0.5), closed_at=1.0)
    found = found_on_disk(tmp_path, marks)
    store.database.close()
    assert bool(found) == (not erases)


def found_on_disk(directory: Path, fragments: list[OpenedFragment]) -> list[OpenedFragment]:
    """Those whose values stand in some file of the database, in any width."""
    on_disk = b"".join(file.read_bytes() for file in sorted(directory.glob("coordinator.db*")))
    return [
        each
        for each in fragments
        if any(each.values.astype(kind).tobytes() in on_disk for kind in ("<i4", "<i8"))
    ]


class PowerCut(BaseException):
    pass


def test_the_start_after_a_crash_behind_a_close_erases_what_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crash leaves the log as it is: a copy of the files stands for the dead process's."""
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    store = open_store(before)
    store.database.erase_what_is_deleted()
    begin(store, MODEL)
    store.start_round(1, 0.0, 1.0)
    marks = [fragment(number, position=number % 5) for number in range(400)]
    count(store, marks)

    def cut(reached: FaultPoint) -> None:
        if reached is FaultPoint.COORDINATOR_CLOSED:
            raise PowerCut

    monkeypatch.setattr(faults, "reached", cut)
    with pytest.raises(PowerCut):
        close(store)
    shutil.copytree(before, after)
    store.database.close()
    assert found_on_disk(after, marks)
    restarted = open_store(after)
    restarted.database.erase_what_is_deleted()
    left = found_on_disk(after, marks)
    restarted.database.close()
    assert not left


def test_a_reader_that_keeps_deleted_values_in_the_log_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    store.database.erase_what_is_deleted()
    begin(store, MODEL)
    store.start_round(1, 0.0, 1.0)
    marks = [fragment(number) for number in range(40)]
    count(store, marks)
    connection_of(store).execute("PRAGMA busy_timeout = 10")
    reader = sqlite3.connect(store.database.name)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM fragments").fetchone()
    close(store)
    assert "coordinator.db-wal: another program reads" in caplog.text
    reader.close()
    store.database.erase_what_is_deleted()
    left = found_on_disk(tmp_path, marks)
    store.database.close()
    assert not left


@given(seats=st.integers(1, 4), strangers=st.integers(0, 6), comes_last=st.booleans())
@settings(max_examples=30)
def test_zeros_in_place_of_an_update_change_the_sum_by_that_update_alone(
    seats: int, strangers: int, comes_last: bool
) -> None:
    """Also where more fragments come than there are seats. Silence would change it by two fragments: that of
    the device, and one that takes its seat."""
    own, others = fragment(0), [fragment(number) for number in range(1, 1 + strangers)]
    totals, seated = [], []
    with tempfile.TemporaryDirectory() as directory:
        store = open_store(Path(directory))  # One: tickets go by its secret and by the ids.
        for sent in (own, own._replace(values=np.zeros(BLOCK, np.int64))):
            count(store, [*others, sent] if comes_last else [sent, *others], seats=seats)
            (sums,) = store.sums(1)
            totals.append(sums[0][1])
            seated.append(own.id in {row["id"] for row in store.database.execute("SELECT id FROM fragments")})
            for table in ("fragments", "partial_sums", "tallies"):
                store.database.execute(f"DELETE FROM {table}")
        store.database.close()
    assert seated[0] == seated[1]
    assert (totals[0] - totals[1]).tolist() == (own.values * seated[0]).tolist()


def test_the_scarcest_block_of_closed_rounds_is_found(store: Store, place: StorePlace) -> None:
    reader = StoreReader(place)
    begun(store)
    assert reader.least_counted() == 0
    count(store, [fragment(1), fragment(2), fragment(3), fragment(4, position=1), fragment(5, position=1)], 1)
    assert reader.least_counted() == 0, "the round is open"
    close(store)
    assert reader.least_counted() == 2
    reader.close()


def test_the_directions_that_a_round_finds_are_kept_for_whoever_goes_on(
    store: Store, place: StorePlace
) -> None:
    begun(store)
    assert store.projection() is None
    result = RoundResult(None, 0, 1.0, 1.0, 0.1)
    store.close_round(1, MODEL, result, closed_at=25.0, projection=b"directions")
    store.start_round(2, 30.0, 40.0)
    store.close_round(2, MODEL, result, closed_at=45.0)
    again = open_store(place)
    assert again.projection() == b"directions"
    again.database.close()


def test_nothing_counts_in_a_round_that_is_not_counted_any_more_until_it_is_started_again(
    place: StorePlace,
) -> None:
    """Of what workers know."""
    store = begun(open_store(place))
    worker = SharedStore(store.database, 1, 7)
    assert len(worker.count([fragment(1)], 1, seats=5).fresh) == 1
    store.stop_counting(1, 15.0, seats=5)
    stopped = worker.count([fragment(1), fragment(2)], 1, seats=5)
    assert (stopped.fresh, stopped.receipted, stopped.late) == ((), [], 2)
    store.start_round(1, 10.0, 30.0)
    again = worker.count([fragment(1), fragment(2)], 1, seats=5)
    assert (again.fresh, again.repeated) == ((fragment(2).id,), (fragment(1).id,))
    assert sums_of(store) == plain_sums([fragment(1), fragment(2)])
    close(store)
    assert worker.count([fragment(3)], 1, seats=5).fresh == ()
    left = b"".join(row["digests"] for row in store.database.execute("SELECT digests FROM receipts"))
    assert left == b"".join(receipt_digest(fragment(number).id) for number in (1, *sorted((1, 2))))
    store.database.close()


def test_a_fragment_of_no_round_counts_nowhere(place: StorePlace) -> None:
    """Before, one that said it was of round 0 counted there while a round closed: it had a receipt without a
    token, and a row for good."""
    store = begun(open_store(place))
    worker = SharedStore(store.database, 1, 7)
    store.stop_counting(1, 15.0, seats=5)
    none = OpenedFragment(b"n" * 16, 0, 0, np.zeros(0, np.int64), 0.0)
    counted = worker.count([none], 1, seats=None)
    assert (counted.fresh, counted.receipted, counted.late) == ((), [], 1)
    for table in ("fragments", "tallies", "partial_sums"):
        assert store.database.execute(f"SELECT * FROM {table}").fetchall() == []
    store.database.close()


def test_workers_see_that_a_round_goes_on_with_other_devices(place: StorePlace) -> None:
    """A coordinator that starts again may expect more of them; workers would go on to refuse theirs."""
    store = begun(open_store(place))
    workers = Workers(store.database)
    store.start_round(1, 10.0, 20.0, Shown(3, b"plan"))
    before = workers.place()
    store.start_round(1, 10.0, 30.0, Shown(3, b"plan"))
    assert workers.place() == before
    store.start_round(1, 10.0, 40.0, Shown(5, b"plan"))
    now, found = workers.place(), workers.round()
    assert found is not None
    assert now == (found.job, found.number, found.devices) == (1, 1, 5)
    store.database.close()
