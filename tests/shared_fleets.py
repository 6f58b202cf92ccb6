"""A fleet whose coordinator's state is in PostgreSQL: its files, its programs, fragments without devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from brokers import Broker
from fleets import DIGITS, Program, write_fleet
from numpy.typing import NDArray
from observers import Observer
from postgresql import Postgresql

from coordinator.aggregation import fleet_mean, take_step
from coordinator.database.opening import open_postgresql
from coordinator.database.postgresql import PostgresqlDatabase
from coordinator.database.settings import PostgresqlAddress
from coordinator.keys import load_opener, load_signer
from coordinator.model_state import ModelState
from coordinator.reader import RoundRecord, StoreReader
from coordinator.settings import FleetSettings, load_fleet_settings
from coordinator.shared_store import WorkerRecord, workers_at
from dpagent.privacy.mechanisms.wire import round_to_wire
from dpagent.protocol.codec import decode, encode
from dpagent.protocol.fragments import cut, read_block
from dpagent.protocol.messages import Fragment, Plan, Receipts
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.receipts import receipt_digest
from dpagent.protocol.sealing import seal
from dpagent.protocol.signing import Verifier
from dpagent.protocol.task import RoundTask

SOON = {"compute_slot_s": 0.001, "jitter_window_s": 0.0, "device_grid_s": 0.001, "deadline_s": 60.0}


class SharedFleet:
    """The files of a coordinator and its workers."""

    def __init__(
        self, directory: Path, broker: Broker, server: Postgresql, name: str, **changes: Any
    ) -> None:
        self.name, self.directory = name, directory
        self.store = server.settings(server.new_schema())
        changes = {"fleet": name, "round": SOON, "store": self.store, "cap": {"kind": "none"}, **changes}
        self.file = write_fleet(directory / "coordinator", broker, **changes)
        self.settings: FleetSettings = load_fleet_settings(self.file)
        self.key = load_signer(self.settings.keys_dir, name).public_key
        load_opener(self.settings.keys_dir, name)
        self._programs = 0

    @property
    def place(self) -> PostgresqlAddress:
        address = self.settings.store.address()
        assert address is not None
        return address

    def coordinator(self, *options: str, file: Path | None = None) -> Program:
        return self._program("run", *options, file=file)

    def worker(self, *options: str, file: Path | None = None) -> Program:
        return self._program("worker", *options, file=file)

    def _program(self, *words: str, file: Path | None) -> Program:
        self._programs += 1
        log = self.directory / f"{words[0]}-{self._programs}.log"
        return Program("coordinator", *words, "--config", file or self.file, log=log)

    @contextmanager
    def database(self) -> Iterator[PostgresqlDatabase]:
        with closing(open_postgresql(self.place, "test")) as database:
            yield database

    def rounds(self) -> list[RoundRecord]:
        with closing(StoreReader(self.place)) as reader:
            return reader.rounds()

    def counters(self) -> dict[str, int]:
        with closing(StoreReader(self.place)) as reader:
            return reader.counters()

    def workers(self) -> list[WorkerRecord]:
        with self.database() as database:
            return workers_at(database)

    def weights(self) -> bytes:
        with self.database() as database:
            return bytes(database.execute("SELECT weights FROM models").fetchone()[0])

    def plan(self, observer: Observer) -> Plan:
        """The last one that was announced."""
        return Verifier(self.key, self.name).open(observer.plans[-1], Plan, "plan")

    def receipted(self, observer: Observer) -> set[bytes]:
        """Digests of ids."""
        verifier, found = Verifier(self.key, self.name), set()
        for message in observer.receipts:
            digests = verifier.open(message, Receipts, "receipts").digests
            found |= {digests[start : start + 16] for start in range(0, len(digests), 16)}
        return found

    def stepped(self, plan: Plan, fragments: Sequence[bytes]) -> bytes:
        """The weights after a first round in which these fragments count, by sums of Python's own
        integers."""
        task, sums = RoundTask.of(plan), dict[int, tuple[int, list[int]]]()
        assert isinstance(task.release, NoisySum)
        for each in fragments:
            piece = decode(each, Fragment)
            values, _ = read_block(piece, plan.wire, task.release.blocks)
            count, total = sums.get(piece.position, (0, [0] * len(values)))
            sums[piece.position] = count + 1, [a + int(b) for a, b in zip(total, values, strict=True)]
        exact: dict[int, tuple[int, NDArray[np.int64]]] = {
            position: (count, np.array(total, np.int64)) for position, (count, total) in sums.items()
        }
        model = ModelState(DIGITS.initial_weights(0), np.zeros((1, DIGITS.parameter_count)), 1.0, ())
        optimiser, rate = self.settings.optimiser.optimiser(), self.settings.optimiser.learning_rate
        gradient = task.release.clipping.gradient(fleet_mean(task.release, exact))
        return take_step(task.release, gradient, model, optimiser, rate).model.weights.tobytes()


def fragments_of(plan: Plan, devices: int) -> list[bytes]:
    """All devices' encoded fragments for a plan, of noise alone."""
    task = RoundTask.of(plan)
    assert isinstance(task.release, NoisySum)
    made: list[bytes] = []
    for _ in range(devices):
        noise = np.asarray(task.release.mechanism.sampler().sample(task.release.dimension))
        update = round_to_wire(noise, task.release.terms.step)
        made += [encode(piece) for piece in cut(update, plan)]
    return made


def send(observer: Observer, plan: Plan, fragments: Sequence[bytes]) -> None:
    """Send fragments, each sealed anew."""
    for each in fragments:
        observer.publish(observer.topics.fragments, seal(each, plan))


def digest(fragment: bytes) -> bytes:
    """By which a receipt names it."""
    return receipt_digest(decode(fragment, Fragment).id)
