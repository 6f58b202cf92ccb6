"""The files of a fleet whose messages and databases a test reads."""

from __future__ import annotations

import itertools
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
from brokers import Broker
from fleets import DIGITS, write_agent, write_fleet
from observers import Observer

from agent.audit import verify
from coordinator.aggregation import fleet_mean, take_step
from coordinator.keys import load_opener, load_signer
from coordinator.model_state import ModelState
from coordinator.reader import RoundRecord, StoreReader
from coordinator.settings import load_fleet_settings
from dpagent.errors import DpagentError
from dpagent.protocol.codec import MessageError
from dpagent.protocol.fragments import read_block
from dpagent.protocol.messages import Plan
from dpagent.protocol.signing import Verifier
from dpagent.protocol.sizes import block_count
from dpagent.protocol.task import RoundTask

SLOW = {"compute_slot_s": 30.0, "jitter_window_s": 60.0, "deadline_s": 600.0, "device_grid_s": 0.001}
"""Times of a round that nobody waits for."""


_numbers = itertools.count()


class WatchedFleet:
    """The files of a coordinator and its devices."""

    def __init__(self, directory: Path, broker: Broker, **changes: Any) -> None:
        self.name = f"watched-{next(_numbers)}"
        self.directory, self.broker = directory, broker
        changes["round"] = SLOW | changes.get("round", {})
        self.changes = {"fleet": self.name, **changes}
        self.file = write_fleet(directory / "coordinator", broker, **self.changes)
        self.settings = load_fleet_settings(self.file)
        self.state = self.settings.state_dir
        self.public_key = load_signer(self.settings.keys_dir, self.name).public_key
        self.opener = load_opener(self.settings.keys_dir, self.name)
        self.verifier = Verifier(self.public_key, self.name)

    def agent(self, number: int) -> Path:
        return write_agent(
            self.directory / f"device-{number}", self.broker, self.public_key, number, fleet=self.name
        )

    @property
    def blocks(self) -> int:
        block = -(-DIGITS.parameter_count // self.settings.fragments_per_update)
        return block_count(DIGITS.parameter_count, block)

    def reader(self) -> StoreReader:
        return StoreReader(self.state)

    def counted(self) -> dict[bytes, int]:
        """Rounds of the counted fragments, by id."""
        try:
            reader = self.reader()
        except DpagentError:
            return {}
        try:
            return {identity: number for identity, (number, _) in reader.fragments().items()}
        except DpagentError:
            return {}
        finally:
            reader.close()

    def rounds(self) -> list[RoundRecord]:
        reader = self.reader()
        try:
            return reader.rounds()
        finally:
            reader.close()

    def counters(self) -> dict[str, int]:
        reader = self.reader()
        try:
            return reader.counters()
        finally:
            reader.close()

    @property
    def job(self) -> bytes:
        reader = self.reader()
        try:
            job = reader.job()
            return b"" if job is None else job.id
        finally:
            reader.close()

    def model(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        connection = sqlite3.connect(self.state / "coordinator.db")
        try:
            return np.frombuffer(connection.execute("SELECT weights FROM models").fetchone()[0], np.float32)
        finally:
            connection.close()

    def plans(self, observer: Observer) -> dict[int, Plan]:
        """The plan of each round, as it was announced."""
        plans: dict[int, Plan] = {}
        for message in observer.plans:
            try:
                plan = self.verifier.open(message, Plan, "plan")
            except MessageError:
                continue  # a stranger's
            if plan.state == "open":
                plans[plan.round] = plan
        return plans

    def replayed_model(self, observer: Observer) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The model computed again from what the broker carried, with Python's own integers."""
        pieces: dict[bytes, Any] = {}
        for message in observer.fragments:
            try:
                piece = self.opener.open(message, self.job)
            except MessageError:
                continue
            pieces.setdefault(piece.id, piece)
        counted = self.counted()
        model = ModelState(DIGITS.initial_weights(0), np.zeros((1, DIGITS.parameter_count)), 1.0, ())
        optimiser, rate = self.settings.optimiser.optimiser(), self.settings.optimiser.learning_rate
        for number, plan in sorted(self.plans(observer).items()):
            sums: dict[int, tuple[int, Any]] = {}
            for identity, piece in pieces.items():
                if counted.get(identity) == number:
                    position = piece.position
                    values, _ = read_block(piece, plan.wire, self.blocks)
                    count, total = sums.get(position, (0, 0))
                    sums[position] = (count + 1, total + values.astype(np.int64))
            task = RoundTask.of(plan)
            gradient = task.release.clipping.gradient(fleet_mean(task.release, sums))
            model = take_step(task.release, gradient, model, optimiser, rate).model
        return model.weights

    def is_counted(self, message: bytes) -> bool:
        try:
            return self.opener.open(message, self.job).id in self.counted()
        except MessageError:
            return False

    def is_farewell(self, message: bytes) -> bool:
        try:
            return self.verifier.open(message, Plan, "plan").state == "finished"
        except MessageError:
            return False


_verified: dict[Path, tuple[bytes, int]] = {}
"""The head of a device's ledger, and the charges that were found with it."""


def charges(*files: Path) -> int:
    """Charges in the ledgers of devices, each of which is verified once for each of its heads: tests wait for
    charges, and look often."""
    return sum(_charges(file.parent / "state") for file in files)


def _charges(state: Path) -> int:
    try:
        head = (state / "ledger.head").read_bytes()
    except FileNotFoundError:
        return 0
    if _verified.get(state, (b"", 0))[0] != head:
        _verified[state] = head, verify(state).charges
    return _verified[state][1]
