"""What is right and what is wrong with a coordinator, before and while it runs; for ``dpagent doctor``."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib.util import find_spec
from typing import Final

from coordinator.database.opening import is_there, open_postgresql
from coordinator.passed_rounds import in_words
from coordinator.queue import current_in
from coordinator.queued_job import QueuedJob
from coordinator.reader import RoundRecord, StoreReader
from coordinator.settings import FIRST_JOB, CoordinatorSettings, FleetSettings, require_same_job
from coordinator.shared_store import workers_at
from dpagent.diagnosis import Finding, clock, entropy, fine, memory, problem, problem_of, storage, warning
from dpagent.errors import DpagentError, StorageError
from dpagent.extras import install_command
from dpagent.learning.data.opening import open_dataset
from dpagent.protocol.receipts import receipt_place
from dpagent.protocol.topics import Topics
from dpagent.storage import disk_errors
from dpagent.transport.diagnosis import BrokerExamination
from dpagent.wording import counted

_STATE_BYTES: Final = 256 << 20
_MEMORY_MIB: Final = 256


def examine(settings: CoordinatorSettings, *, asks_broker: bool = True) -> Iterator[Finding]:
    """Look at a coordinator: machine, keys, jobs, broker.

    Args:
        settings: ``fleet.yaml``.
        asks_broker: whether to connect.
    """
    yield clock()
    yield entropy()
    yield memory(_MEMORY_MIB)
    yield from storage(settings.state_dir, _STATE_BYTES)
    if find_spec("onnx") is None:
        yield problem("packages", "onnx is not installed", install_command("coordinator"))
    else:
        yield fine("packages", "the coordinator's are installed")
    yield _keys(settings)
    if settings.store.url is not None:
        yield _store(settings)
    yield from _jobs(settings)
    if isinstance(settings, FleetSettings) and settings.test_data is not None:
        try:
            number = len(open_dataset(settings.test_data))
        except DpagentError as error:
            yield problem_of("test data", error)
        else:
            yield fine("test data", counted(number, "record"))
    if not asks_broker:
        return
    topics = Topics(settings.fleet)
    # An empty plan would end what is retained; receipts of nothing are dropped by every device.
    writes = [topics.receipts]
    if isinstance(settings, FleetSettings) and settings.receipt_topics == "fragment":
        writes.append(topics.receipt(receipt_place(os.urandom(16))))
    examination = BrokerExamination(settings.mqtt, reads=(topics.fragments, topics.plan), writes=writes)
    yield from examination.run()


def _keys(settings: CoordinatorSettings) -> Finding:
    files = [settings.keys_dir / name for name in ("signing.key", "sealing.key")]
    try:
        with disk_errors(settings.keys_dir):
            there = {file: file.stat().st_mode for file in files if file.exists()}
    except StorageError as error:
        return problem_of("keys", error)
    if not there:
        return fine("keys", f"none yet in {settings.keys_dir}: `dpagent coordinator key` makes them")
    for file in files:
        if file not in there:
            return problem(
                "keys", f"{file} is missing, and the other key is there", "Put it back from a backup."
            )
        if there[file] & 0o077:
            return problem("keys", f"other users may read {file}", f"Run: chmod 600 {file}")
    return fine("keys", f"both are in {settings.keys_dir}, and nobody else reads them")


def _store(settings: CoordinatorSettings) -> Finding:
    """PostgreSQL, and who uses it."""
    try:
        address = settings.store.address()
        assert address is not None
        with open_postgresql(address, "doctor") as database:
            leader = database.leader()
            if leader is None:
                return fine("store", f"{database.name} answers; no coordinator has used it yet")
            with database.errors():
                workers = workers_at(database)
            who = f"led by {leader}" if database.is_led() else f"nobody leads; last {leader}"
            text = f"{database.name}: {who}; {counted(len(workers), 'worker')}"
    except DpagentError as error:
        return problem_of("store", error)
    if not workers:
        return warning(
            "store", text, "No fragment counts: start `dpagent coordinator worker`, on any machine."
        )
    return fine("store", text)


def _jobs(settings: CoordinatorSettings) -> Iterator[Finding]:
    """The queue, and the job that goes on."""
    jobs: list[QueuedJob] = []
    rounds: list[RoundRecord] = []
    passed = 0
    try:
        if is_there(settings.store_place):
            with closing(StoreReader(settings.store_place)) as reader:
                jobs, rounds = reader.jobs(), reader.rounds()
                if (current := current_in(jobs)) is not None:
                    passed = reader.passed_round_of(current.number)
    except DpagentError as error:
        yield problem_of("jobs", error)
        return
    own = settings if isinstance(settings, FleetSettings) else None
    if own is not None and all(each.name != FIRST_JOB for each in jobs):
        yield fine("job", "none yet: `dpagent coordinator run` begins the one in fleet.yaml")
    elif not jobs:
        yield warning("job", "none yet", "`dpagent coordinator job add FILE` adds one.")
    if (current := current_in(jobs)) is not None:
        yield fine("jobs", _queue_in_words(jobs))
        yield from _paused(jobs)
        yield _current(current, rounds, own, passed)


def _queue_in_words(jobs: Sequence[QueuedJob]) -> str:
    states = Counter(str(each.state) for each in jobs)
    return (
        f"{counted(len(jobs), 'job')}: {', '.join(f'{number} {state}' for state, number in states.items())}"
    )


def _paused(jobs: Sequence[QueuedJob]) -> Iterator[Finding]:
    for each in jobs:
        if each.is_paused and not each.state.is_over:
            text = f"{each.name} is paused" + (f": {each.trouble}" if each.trouble else "")
            yield warning("jobs", text, f"To let it go on: dpagent coordinator job resume {each.name}")


def _current(
    current: QueuedJob, rounds: Sequence[RoundRecord], own: FleetSettings | None, passed: int
) -> Finding:
    try:
        if own is not None and current.name == FIRST_JOB:
            require_same_job(current.job.terms, own.job_terms(), current.name)
    except DpagentError as error:
        return problem_of("job", error)
    closed = sum(each.closed_at is not None for each in rounds)
    text = f"{current.name}: {closed} of {counted(current.job.rounds, 'round')} closed"
    if current.state.is_over:
        return fine("job", f"{text}; it is {current.state}")
    if passed > closed:
        return problem("job", f"{text}, and the fleet was given round {passed}", in_words(passed))
    if current.is_open:
        last = rounds[-1]
        text += f"; round {last.number} has {counted(last.fragments, 'fragment')}"
        if not last.fragments:
            return warning(
                "job", text,
                "If that lasts: do boards connect? `dpagent doctor` on one says what it lacks.",
            )  # fmt: skip
    return fine("job", text)
