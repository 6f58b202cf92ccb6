"""The queue: which job goes on, what may be done to each, and who wins where two change one."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fleets import write_job, write_shared
from hypothesis import given
from hypothesis import strategies as st
from stores import JOB

from coordinator.columns import together
from coordinator.database import schema
from coordinator.database.interface import Database
from coordinator.database.opening import open_beside, open_database
from coordinator.database.settings import StorePlace
from coordinator.database.sqlite import database_file
from coordinator.job import Job, NoiseOfDevices
from coordinator.model_state import ModelState
from coordinator.orders import Kind
from coordinator.planning import new_job
from coordinator.queue import Queue, find, next_in, require_name
from coordinator.queued_job import JobState
from coordinator.reader import StoreReader
from coordinator.settings import (
    FleetSettings,
    JobSettings,
    load_coordinator_settings,
    load_job_settings,
)
from coordinator.store import Store
from dpagent.errors import ConfigurationError, StateInUseError, StorageError, UsageError
from dpagent.privacy.mechanisms.job_noise import JobNoise
from dpagent.storage import StateDirectory

MODEL = ModelState(np.zeros(4, np.float32), np.zeros((1, 4)), 1.0, ())


@pytest.fixture
def database(place: StorePlace) -> Iterator[Database]:
    database = open_database(place)
    yield database
    database.close()


@pytest.fixture
def queue(database: Database) -> Queue:
    """Three jobs that wait."""
    queue = Queue(database)
    for number, name in enumerate(("one", "two", "three")):
        queue.add(name, replace(JOB, id=bytes([number]) * 16), "{}", float(number))
    return queue


def dumped(database: Database) -> list[tuple[object, ...]]:
    """The whole queue."""
    return [tuple(row) for row in database.execute("SELECT * FROM jobs ORDER BY number")]


def chosen(queue: Queue) -> str | None:
    found = next_in(queue.jobs())
    return None if found is None else found.name


def begin(queue: Queue, name: str) -> None:
    assert queue.begin(find(queue.jobs(), name).number, MODEL, 5.0)


def state(queue: Queue, name: str) -> JobState:
    return find(queue.jobs(), name).state


def test_jobs_go_on_in_the_order_in_which_they_came(queue: Queue) -> None:
    for name in ("one", "two", "three"):
        assert chosen(queue) == name
        begin(queue, name)
        assert chosen(queue) == name
        queue.end(find(queue.jobs(), name).number, 9.0)
    assert chosen(queue) is None
    assert {each.state for each in queue.jobs()} == {JobState.FINISHED}


def test_a_job_that_has_begun_keeps_all_others_waiting_also_while_it_is_paused(queue: Queue) -> None:
    """A board ends a job when it is charged for another one: the first could not go on."""
    queue.pause("one")
    assert chosen(queue) == "two", "one that has not begun is passed over"
    begin(queue, "two")
    queue.resume("one")
    assert chosen(queue) == "two", "the one that has begun comes first"
    queue.pause("two")
    assert chosen(queue) is None
    queue.resume("two")
    assert chosen(queue) == "two"


def test_an_open_round_of_a_paused_job_goes_on_and_no_other_one_opens(
    queue: Queue, database: Database
) -> None:
    begin(queue, "one")
    store = Store(database, 1)
    assert store.start_round(1, 10.0, 20.0) is not None
    queue.pause("one")
    assert chosen(queue) == "one"
    assert store.start_round(1, 15.0, 30.0) is not None, "another deadline"
    database.execute("UPDATE rounds SET closed_at = 20.0")
    assert chosen(queue) is None
    assert store.start_round(2, 30.0, 40.0) is None
    assert store.open_round() is None
    queue.resume("one")
    assert store.start_round(2, 30.0, 40.0) is not None


@pytest.mark.parametrize("ends", ["cancel", "pause"])
def test_no_round_opens_after_a_command_has_said_so(
    queue: Queue, database: Database, place: StorePlace, ends: str
) -> None:
    """The daemon chose the job before: a command came in between, over a connection of its own."""
    begin(queue, "one")
    wanted = next_in(queue.jobs())
    assert wanted is not None
    command = open_beside(place)
    before = database.version()
    if ends == "cancel":
        Queue(command).cancel("one", 6.0, sends_model=False)
    else:
        Queue(command).pause("one")
    command.close()
    assert database.version() != before, "the daemon looks at the queue again"
    assert Store(database, wanted.number).start_round(1, 10.0, 20.0) is None


def test_a_job_that_is_cancelled_before_it_begins_does_not_begin(queue: Queue) -> None:
    wanted = next_in(queue.jobs())
    assert wanted is not None
    assert queue.cancel("one", 6.0, sends_model=False).state is JobState.CANCELLED
    assert not queue.begin(wanted.number, MODEL, 7.0)
    (one, *_) = queue.jobs()
    assert (one.state, one.begun_at, one.ended_at) == (JobState.CANCELLED, None, 6.0)


def test_a_job_that_is_paused_before_it_begins_does_not_begin(queue: Queue) -> None:
    """It would keep the others waiting, where one that has not begun is passed over."""
    wanted = next_in(queue.jobs())
    assert wanted is not None
    queue.pause("one")
    assert not queue.begin(wanted.number, MODEL, 7.0)
    assert chosen(queue) == "two"


def test_a_job_that_the_coordinator_has_paused_does_not_go_on_with_its_open_round(
    queue: Queue, database: Database
) -> None:
    begin(queue, "one")
    Store(database, 1).start_round(1, 10.0, 20.0)
    queue.halt(1, "its test data are gone")
    assert chosen(queue) is None
    queue.resume("one")
    assert chosen(queue) == "one"


def test_a_job_that_its_operator_has_paused_is_paused_by_the_coordinator_too(
    queue: Queue, database: Database
) -> None:
    """Its round is open, so it is taken up again after a restart, which may fail."""
    begin(queue, "one")
    Store(database, 1).start_round(1, 10.0, 20.0)
    queue.pause("one")
    assert chosen(queue) == "one"
    queue.halt(1, "its test data are gone")
    assert chosen(queue) is None
    assert find(queue.jobs(), "one").trouble_now == "its test data are gone"
    queue.resume("one")
    assert chosen(queue) == "one"


def test_a_paused_job_without_a_round_left_goes_on_to_its_end(queue: Queue, database: Database) -> None:
    begin(queue, "one")
    for number in (1, 2, 3):
        assert chosen(queue) == "one"
        Store(database, 1).start_round(number, 10.0, 20.0)
        database.execute("UPDATE rounds SET closed_at = 20.0")
    queue.pause("one")
    assert chosen(queue) == "one"
    assert Store(database, 1).start_round(4, 30.0, 40.0) is None


def test_a_job_cancelled_while_it_runs_is_over_once_the_devices_are_told(queue: Queue) -> None:
    begin(queue, "one")
    queue.pause("one")
    assert queue.cancel("one", 6.0, sends_model=True).state is JobState.CANCELLING
    assert chosen(queue) == "one", "to be told, though it is paused"
    queue.end(1, 8.0)
    (one, *_) = queue.jobs()
    assert (one.state, one.sends_model, one.ended_at) == (JobState.CANCELLED, True, 8.0)
    queue.end(1, 99.0)
    assert queue.jobs()[0].ended_at == 8.0


def test_each_refusal_is_a_sentence_and_changes_nothing(queue: Queue, database: Database) -> None:
    begin(queue, "one")
    queue.end(1, 9.0)
    queue.cancel("two", 9.0, sends_model=False)
    before = dumped(database)
    for change, kind, words in (
        (lambda: queue.cancel("one", 9.0, sends_model=False), UsageError, "is finished; expected"),
        (lambda: queue.cancel("two", 9.0, sends_model=True), UsageError, "cancelled already"),
        (lambda: queue.pause("two"), UsageError, "cancelled already"),
        (lambda: queue.resume("three"), UsageError, "is not paused"),
        (lambda: queue.resume("one"), UsageError, "is finished"),
        (lambda: queue.set_deadline("one", 9.0, lambda _: None), UsageError, "is finished"),
        (lambda: queue.set_minimum("one", 1, lambda _: None), UsageError, "is finished"),
        (lambda: queue.pause("four"), ConfigurationError, "There is no job 'four': the queue has one, two"),
        (lambda: queue.add("one", JOB, "{}", 9.0), ConfigurationError, "a job 'one' already"),
    ):
        with pytest.raises(kind, match=words):
            change()
    assert dumped(database) == before
    queue.pause("three")
    with pytest.raises(UsageError, match="paused already"):
        queue.pause("three")


def test_of_many_that_add_one_name_one_does(place: StorePlace) -> None:
    """The directory is not there either: one makes the database, and none loses what another wrote."""
    state = place / "state" if isinstance(place, Path) else place
    outcomes: list[str] = []
    start = threading.Barrier(8)

    def add(number: int) -> None:
        start.wait()
        database = open_beside(state)
        try:
            Queue(database).add("same", replace(JOB, id=bytes([number]) * 16), "{}", 0.0)
            outcomes.append("added")
        except ConfigurationError:
            outcomes.append("refused")
        finally:
            database.close()

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["added"] + ["refused"] * 7
    reader = StoreReader(state)
    assert [each.name for each in reader.jobs()] == ["same"]
    reader.close()


def test_a_directory_that_another_program_holds_without_a_database_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.database.sqlite._PATIENCE_S", 0.1)
    with StateDirectory(tmp_path), pytest.raises(StateInUseError):
        open_beside(tmp_path)


def test_a_command_of_a_newer_version_changes_no_tables_under_a_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_database(tmp_path).close()
    known = schema.STEPS
    new = (schema.Part.ROUNDS, lambda tables: tables.create("new", "x INTEGER"))
    monkeypatch.setattr(schema, "STEPS", (*known, new))
    monkeypatch.setattr("coordinator.database.sqlite._PATIENCE_S", 0.1)
    with StateDirectory(tmp_path), pytest.raises(StateInUseError):
        open_beside(tmp_path)
    before = sqlite3.connect(database_file(tmp_path))
    assert before.execute("PRAGMA user_version").fetchone() == (len(schema.steps_of(schema.Part.ROUNDS)) - 1,)
    before.close()
    after = open_beside(tmp_path)
    assert after.execute("SELECT count(*) FROM new").fetchone()[0] == 0
    after.close()


def test_jobs_do_not_see_the_rounds_of_others(queue: Queue, database: Database, place: StorePlace) -> None:
    begin(queue, "one")
    first, second = Store(database, 1), Store(database, 2)
    first.start_round(1, 10.0, 20.0)
    first.reject("malformed", 2)
    first.give_up_round(1, noise_multiplier=2.0, epsilon=0.25, least=0, given_up_at=15.0)
    assert (first.last_round(), first.over_rounds(), first.last_closed(), first.open_round()) == (
        1,
        1,
        0,
        None,
    )
    queue.cancel("one", 16.0, sends_model=False)
    queue.end(1, 17.0)
    begin(queue, "two")
    assert (second.last_round(), second.open_round()) == (0, None)
    opened = second.start_round(1, 30.0, 40.0)
    assert opened is not None
    assert opened.opened_at == 30.0
    one, two = (StoreReader(place, name) for name in ("one", "two"))
    assert [(each.given_up_at, each.epsilon) for each in one.rounds()] == [(15.0, 0.25)]
    assert [(each.given_up_at, each.opened_at) for each in two.rounds()] == [(None, 30.0)]
    assert (one.counters(), two.counters()) == ({"rejected: malformed": 2}, {})
    # By default, the one that goes on.
    current = StoreReader(place)
    assert current.queued() == two.queued()
    for reader in (one, two, current):
        reader.close()


def test_a_reader_of_an_unknown_job_is_told_the_names(queue: Queue, place: StorePlace) -> None:
    with pytest.raises(ConfigurationError, match="one, two, three"):
        StoreReader(place, "four")


def test_a_state_that_is_none_is_not_stored(database: Database, queue: Queue) -> None:
    with pytest.raises(StorageError, match="constraint"), database.transaction():
        database.execute("UPDATE jobs SET state = 'asleep'")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"privacy": {"method": "ldp-fl", "epsilon": 9.0}, "cap": {"kind": "none"}},
        {"privacy": {"method": "central", "epsilon": 8.0, "device_noise": {"epsilon": 30.0}},
         "cap": {"kind": "none"}},
        {"privacy": {"schedule": {"kind": None, "ratio": 2.0}}, "keep_models": "last"},
        {"model": {"name": "digits", "classes": [str(n) for n in range(10)],
                   "augmentation": {"views": 2, "shift": 1}}},
        {"test_data": {"path": "test.npz"}, "aggregation": {"kind": "median-of-means", "groups": 2}},
    ],
)  # fmt: skip
def test_the_settings_of_a_job_are_kept_as_they_were(tmp_path: Path, changes: dict[str, object]) -> None:
    job = load_job_settings(write_job(tmp_path / "jobs" / "job.yaml", **changes))
    shared = load_coordinator_settings(write_shared(tmp_path, None))
    assert not isinstance(shared, FleetSettings)
    again = JobSettings.from_json(job.stored())
    assert again == job
    settings = shared.with_job(again, "job")
    assert settings.job() == job
    assert settings.job_terms() == shared.with_job(job, "job").job_terms()
    assert settings.privacy.spending == job.privacy.spending
    if job.test_data is not None:
        assert settings.test_data is not None
        assert settings.test_data.path == tmp_path / "jobs" / "test.npz", "relative to the job file"
    assert Job.read(*(made := new_job(settings)).stored()) == made


def test_costs_are_summed_by_scope_over_jobs() -> None:
    """What hides a whole device hides each of its records, and boards' ledgers add it up so."""
    central = JobNoise.announced("central-gaussian", [1.0, 1.0], {"resolution": 1 << 14})
    own = JobNoise.announced("device-gaussian", [1.0, 1.0], {"resolution": 1 << 14})
    terms = {"privacy": {"delta": 1e-5}, "rounds": 2}
    records = Job(b"r" * 16, terms, JobNoise.chosen("discrete-gaussian", [2.0, 2.0]), (1.0, 2.0))
    whole = Job(b"w" * 16, terms, central, (1.0, 3.0), NoiseOfDevices(own, (10.0, 20.0)))
    sums = together([("a", records), ("b", whole), ("c", records), ("d", whole)])
    assert [(names, str(each.unit), str(each.trust), each.epsilon) for names, each in sums] == [
        (["a", "b", "c", "d"], "record", "none", 44.0),
        (["b", "d"], "device", "coordinator", 6.0),
        (["b", "d"], "device", "none", 40.0),
    ]
    assert sums[0][1].delta == pytest.approx(4e-5)


def test_the_daemon_sees_each_order_of_another_program(queue: Queue, place: StorePlace) -> None:
    begin(queue, "one")
    looking = open_beside(place)
    try:
        seen = [looking.version()]
        for order in (
            lambda: queue.set_deadline("one", 60.0, lambda known: None),
            lambda: queue.set_minimum("one", 2, lambda known: None),
            lambda: queue.set_minimum("one", 1, lambda known: None),
            lambda: queue.pause("one"),
        ):
            order()
            seen.append(looking.version())
    finally:
        looking.close()
    assert len(set(seen)) == len(seen)


def test_each_order_is_on_record_with_who_gave_it(database: Database, place: StorePlace) -> None:
    operator = Queue(database, "alice, by the page")
    operator.add("one", JOB, "{}", 1.0, is_paused=True)
    operator.resume("one")
    with pytest.raises(UsageError):
        operator.resume("one")  # refused, and so not on record
    Queue(database).halt(1, "its test data are gone")
    operator.set_deadline("one", 60.0, lambda known: None)
    operator.set_minimum("one", 2, lambda known: None)
    operator.cancel("one", 6.0, sends_model=True)
    reader = StoreReader(place)
    try:
        orders = reader.orders(most=10)
        assert [(each.by, each.kind, each.job, each.detail) for each in reversed(orders)] == [
            ("alice, by the page", Kind.ADD, "one", "paused"),
            ("alice, by the page", Kind.RESUME, "one", ""),
            ("coordinator", Kind.PAUSE, "one", "its test data are gone"),
            ("alice, by the page", Kind.DEADLINE, "one", "60 s a round"),
            ("alice, by the page", Kind.MINIMUM, "one", "2 boards a round"),
            ("alice, by the page", Kind.CANCEL, "one", "devices get the model so far"),
        ]
        assert [each.kind for each in reader.orders(most=2)] == [Kind.CANCEL, Kind.MINIMUM]
    finally:
        reader.close()


def test_a_job_that_is_added_paused_lets_others_go_before_it(database: Database) -> None:
    queue = Queue(database)
    queue.add("later", JOB, "{}", 1.0, is_paused=True)
    queue.add("now", replace(JOB, id=b"n" * 16), "{}", 2.0)
    wanted = next_in(queue.jobs())
    assert wanted is not None
    assert wanted.name == "now"


@given(st.text(max_size=80))
def test_no_name_leads_out_of_the_directory_of_jobs(name: str) -> None:
    try:
        require_name(name)
    except UsageError:
        return
    assert Path("jobs", name).resolve().parent == Path("jobs").resolve()


def test_a_reader_hears_of_each_write(database: Database, place: StorePlace) -> None:
    queue = Queue(database)
    queue.add("one", JOB, "{}", 1.0)
    reader = StoreReader(place)
    try:
        before = reader.mark()
        queue.pause("one")
        after = reader.mark()
        assert after != before
        if isinstance(place, Path):  # In PostgreSQL, others' writes show too.
            assert reader.mark() == after
    finally:
        reader.close()
