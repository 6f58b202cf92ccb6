"""What is right and what is wrong with a coordinator, before and while it runs; for ``dpagent doctor``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from typing import Final

from coordinator.settings import FleetSettings, require_same_job
from coordinator.store import StoreReader
from dpagent.diagnosis import Finding, clock, entropy, fine, memory, problem, problem_of, storage, warning
from dpagent.errors import DpagentError, StorageError
from dpagent.extras import install_command
from dpagent.learning.data.opening import open_dataset
from dpagent.protocol.topics import Topics
from dpagent.storage import disk_errors
from dpagent.transport.diagnosis import BrokerExamination
from dpagent.wording import counted

_STATE_BYTES: Final = 256 << 20
_MEMORY_MIB: Final = 256


def examine(settings: FleetSettings, *, asks_broker: bool = True) -> Iterator[Finding]:
    """Look at a coordinator: machine, keys, job, broker.

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
    yield _job(settings)
    if settings.test_data is not None:
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
    examination = BrokerExamination(settings.mqtt, reads=(topics.fragments,), writes=(topics.receipts,))
    yield from examination.run()


def _keys(settings: FleetSettings) -> Finding:
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


def _job(settings: FleetSettings) -> Finding:
    if not (settings.state_dir / "coordinator.db").exists():
        return fine("job", "none yet: `dpagent coordinator run` begins it")
    try:
        with closing(StoreReader(settings.state_dir)) as reader:
            job, rounds, is_finished = reader.job(), reader.rounds(), reader.is_finished()
        if job is not None:
            require_same_job(job.terms, settings.job_terms(), settings.state_dir)
    except DpagentError as error:
        return problem_of("job", error)
    if job is None:
        return fine("job", "none yet: `dpagent coordinator run` begins it")
    closed = sum(each.closed_at is not None for each in rounds)
    text = f"{job.id.hex()[:8]}: {closed} of {counted(settings.rounds, 'round')} closed"
    if is_finished:
        return fine("job", f"{text}; it is finished")
    if len(rounds) > closed:
        last = rounds[-1]
        text += f"; round {last.number} has {counted(last.fragments, 'fragment')}"
        if not last.fragments:
            return warning(
                "job", text,
                "If that lasts: do boards connect? `dpagent doctor` on one says what it lacks.",
            )  # fmt: skip
    return fine("job", text)
