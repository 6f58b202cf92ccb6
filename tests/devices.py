"""A device in the tests' process, on a clock that stands still: real state, real records, no broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
from boards import BoardTree
from clocks import MovableClock
from fleets import DIGITS, write_agent
from ledgers import DATASET, open_state
from lines import Line
from neighbours import decode_here
from numpy.typing import NDArray
from priced_here import PricedHere

from agent.announcements import Announcements
from agent.board_engine import BoardEngine
from agent.cycle import Cycle
from agent.energy import EnergyMeter
from agent.first_rows import open_records
from agent.governor import Governor
from agent.identity import Identity
from agent.looks import Looks
from agent.opening_program import form_of
from agent.profile import load_profile
from agent.publisher import Publisher
from agent.sensors import Sensors
from agent.settings import AgentSettings, load_agent_settings
from agent.state import AgentState
from agent.tokens import Tokens
from agent.training import Trainer, Work
from agent.training_messages import Order, Prepared, Update, WorkerError
from agent.training_settings import TrainingSettings
from agent.worker import ReadsRecords, Worker, training_settings
from dpagent.errors import said
from dpagent.learning.front_end.features import reserve
from dpagent.learning.training.engine import Engine
from dpagent.learning.training.engine_choice import Bench
from dpagent.protocol.chunks import chunked
from dpagent.protocol.fragments import read_block
from dpagent.protocol.messages import Plan, Receipts
from dpagent.protocol.signing import Signer, Verifier, new_signing_secret
from dpagent.protocol.task import RoundTask
from dpagent.protocol.topics import Topics
from dpagent.protocol.update_size import values_of
from dpagent.protocol.weights import weights_to_bytes

SIGNER = Signer(new_signing_secret(), "testers")
KEY = SIGNER.public_key
WEIGHTS = weights_to_bytes(DIGITS.initial_weights(0), "float32")
PERIOD_S = 0.05
"""Of the device's grid."""
SLOT_S = 0.5
"""Of the plans that the tests make."""


ResultT = TypeVar("ResultT")


STAYS_S = 1_200.0
"""How long a device's training process stays."""
_engines: dict[str, Engine] = {}
"""By their purpose. To make one takes longer than most tests, and it keeps nothing of a round."""


class _QuickEngine(BoardEngine):
    def _make(self, bench: Bench, purpose: str) -> Engine:
        if self._settings.engine != "numpy":
            return super()._make(bench, purpose)
        if purpose not in _engines:
            _engines[purpose] = super()._make(bench, purpose)
        return _engines[purpose]


class _QuickTrainer(Trainer):
    def __init__(self, settings: TrainingSettings) -> None:
        super().__init__(settings)
        self._engine = _QuickEngine(settings)


def started_trainer(settings: AgentSettings) -> Trainer:
    """The trainer of an agent that has started: it has seen the records, and taken room for features."""
    settings.state_dir.mkdir(exist_ok=True)
    if not (settings.state_dir / "records.index").exists():
        decode_here(settings.data, settings.state_dir)
    open_records(settings.data, settings.state_dir)
    assert settings.data.max_records is not None
    reserve(settings.state_dir, settings.data.features_mib << 20, settings.data.max_records)
    return _QuickTrainer(training_settings(settings, load_profile("generic-x86-64")))


def worker_of(settings: AgentSettings, beside: ReadsRecords | None = None, **of_profile: Any) -> Worker:
    """A training process of a PC, with its looks."""
    profile = load_profile("generic-x86-64").with_values(of_profile)
    return Worker(settings, profile, Looks(settings.data, settings.state_dir, profile.niceness), beside)


class Looking:
    """Training whose looks no test is about."""

    def hold_look(self) -> None:
        pass

    def resume_look(self) -> None:
        pass


class Unpaused(Looking):
    """Training that a test never finds in the middle."""

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass


class AtOnce(Unpaused):
    """Trains in the tests' process, before it answers. A round takes the time that the test says."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._work: Work | None = None
        self.longest_s = 0.0

    def prepare(self, order: Order) -> Future[Prepared]:
        self._work = None
        return _answer(lambda: self._prepared(order))

    def update(self) -> Future[Update]:
        work = self._work
        assert work is not None, "no round is prepared"
        return _answer(lambda: self._trainer.noisy_update(work).as_sent(work.task.plan))

    def look(self) -> None:
        pass

    def end(self) -> None:
        pass

    def _prepared(self, order: Order) -> Prepared:
        task = RoundTask.of(order.plan)
        weights = task.weights_from(order.weights)
        self._work = self._trainer.prepare(
            task, order.assets, weights, failure=order.failure, is_rehearsal=order.is_rehearsal
        )
        return Prepared(self.longest_s)


def _answer(work: Callable[[], ResultT]) -> Future[ResultT]:
    future: Future[ResultT] = Future()
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001 - as the training process has it
        future.set_exception(WorkerError(said(error)))
    return future


def values_in(update: Update, plan: Plan) -> NDArray[np.int64]:
    """The values of an update that is a noisy sum, from its fragments."""
    task = RoundTask.of(plan)
    blocks = [read_block(each, plan.wire, task.release.blocks)[0] for each in update.fragments]
    return np.concatenate(blocks)[: values_of(plan)].astype(np.int64)


@dataclass
class Device:
    announcements: Announcements
    cycle: Cycle
    state: AgentState
    clock: MovableClock
    trainer: Trainer
    worker: AtOnce
    board: BoardTree
    tokens: Tokens
    line: Line
    asked_at: list[float] = field(default_factory=list)

    def take_plan(self, plan: Plan, *, confirmed: bool = True) -> bool:
        """A plan arrives, and before it, if it is ``confirmed``, a receipt of the round before it."""
        if confirmed:
            with self.state.noted():
                self.state.connection.execute("UPDATE decided SET receipted = spooled")
                self.state.connection.execute(
                    "INSERT INTO probes (digest, job, round, is_counted)"
                    " SELECT randomblob(8), job, spooled, 1 FROM decided"
                )
        return self.announcements.take_plan(plan)

    def give(self, weights: bytes = WEIGHTS) -> None:
        for chunk in chunked(weights):
            self.announcements.take_chunk(chunk)

    def take_receipts(self, receipts: Receipts) -> int:
        return self.state.mark_counted(receipts.each, self.clock.unix())

    def advance(self) -> None:
        """Let the device do all that it can at the next point of its grid."""
        while self.is_ready:
            self.clock.advance(max(self.cycle.due_in_s(), 1e-6))
            self.cycle.advance()

    @property
    def is_ready(self) -> bool:
        """Whether a round waits for nothing but a point of the grid, or the end of its slot."""
        return self.cycle.due_in_s() <= SLOT_S

    def charged(self) -> list[int]:
        rows = self.state.connection.execute("SELECT body ->> 'round' FROM entries WHERE kind = 'charge'")
        return sorted(row[0] for row in rows)

    def declined(self) -> list[tuple[Any, ...]]:
        rows = self.state.connection.execute(
            "SELECT round, reason, changed_at FROM rounds WHERE state = 'declined'"
        )
        return [tuple(row) for row in rows]

    def pending(self) -> dict[int, list[bytes]]:
        """Digests by round."""
        self.state.write_notes()
        rows = self.state.connection.execute(
            "SELECT round, digest FROM fragments JOIN messages USING (number) ORDER BY digest"
        )
        rounds: dict[int, list[bytes]] = {}
        for number, digest in rows:
            rounds.setdefault(number, []).append(digest)
        return rounds

    def probes(self) -> dict[int, list[bytes]]:
        """Digests of probes that leave, by round."""
        rows = self.state.connection.execute(
            "SELECT round, digest FROM probes WHERE message IS NOT NULL ORDER BY digest"
        )
        rounds: dict[int, list[bytes]] = {}
        for number, digest in rows:
            rounds.setdefault(number, []).append(digest)
        return rounds


def at_once(publisher: Publisher) -> None:
    """Let fragments leave when they are due, however many there are."""
    publisher._departures._random.expovariate = lambda rate: 0.0  # type: ignore[method-assign]


@contextmanager
def open_device(directory: Path, *, identity: Identity | None = None, **changes: Any) -> Iterator[Device]:
    """A device with 50 digits, on a board whose kernel tells what a test writes to ``board``.

    Args:
        directory: for its configuration, data and state; what is there of an earlier one goes on.
        identity: by which the fleet knows it, if it has enrolled.
        changes: of its ``agent.yaml``.
    """
    settings = load_agent_settings(write_agent(directory, None, KEY, **({"engine": "numpy"} | changes)))
    clock, board = MovableClock(unix=5_000.0), BoardTree(directory / "board")
    state = open_state(directory / "state")
    line = Line()
    session: Any = line
    asked_at: list[float] = []
    trainer = started_trainer(settings)
    worker = AtOnce(trainer)
    publisher = Publisher(
        state, session, Topics("testers"), messages_per_second=100.0, period_s=PERIOD_S, clock=clock
    )
    at_once(publisher)
    announcements = Announcements(
        DATASET, "testers", settings.limits,
        takes_graphs=settings.engine != "numpy",
        is_member=identity is not None,
        state=state,
        publisher=publisher,
        ask_again=lambda: asked_at.append(clock.monotonic()),
        clock=clock,
    )  # fmt: skip
    tokens = Tokens(
        "testers", identity, verifier=Verifier(KEY, "testers"), topics=Topics("testers"), state=state,
        session=session, publisher=publisher, clock=clock,
    )  # fmt: skip
    cycle = Cycle(
        announcements, DATASET, settings.limits,
        form=form_of(trainer.records.dataset), state=state, prices=PricedHere(), worker=worker,
        publisher=publisher, tokens=tokens,
        governor=Governor(settings.governor, settings.state_dir, Sensors(board.root), clock),
        meter=EnergyMeter(board.root, clock), clock=clock, stays_s=STAYS_S,
    )  # fmt: skip
    try:
        yield Device(announcements, cycle, state, clock, trainer, worker, board, tokens, line, asked_at)
    finally:
        state.close()


def sent_for(device: Device, plan: Plan) -> int:
    """How many messages leave once a plan is announced."""
    publisher, line = device.cycle._publisher, device.cycle._publisher._session
    assert isinstance(line, Line)
    before = len(line.sent)
    device.clock.advance(SLOT_S)
    device.take_plan(plan)
    device.clock.advance(3 * SLOT_S)
    publisher.publish_due()
    return len(line.sent) - before


class Slow(Looking):
    """Training that takes a time on the device's clock.

    Args:
        device: whose training it becomes.
        seconds: until the update of a round is there.
        longest_s: what the trial with made-up records says.
    """

    def __init__(self, device: Device, seconds: float, longest_s: float = 0.0) -> None:
        self._device, self._seconds = device, seconds
        self._at_once = device.worker
        self._at_once.longest_s = longest_s
        self._pending: list[tuple[float, Future[Update], Update]] = []
        self.looked_at: list[float] = []
        self.is_paused = False
        device.cycle._worker = self

    def prepare(self, order: Order) -> Future[Prepared]:
        return self._at_once.prepare(order)

    def update(self) -> Future[Update]:
        future: Future[Update] = Future()
        update = self._at_once.update().result()
        self._pending.append((self._device.clock.monotonic() + self._seconds, future, update))
        return future

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def look(self) -> None:
        self.looked_at.append(self._device.clock.monotonic())

    def end(self) -> None:
        self.is_paused, self._pending = False, []

    def pass_time(self, seconds: float) -> None:
        """Let time pass in small steps, in which the device does what it can."""
        for _ in range(round(seconds / (PERIOD_S / 4))):
            self._device.clock.advance(PERIOD_S / 4)
            if self.is_paused:
                self._pending = [(ends_at + PERIOD_S / 4, *rest) for ends_at, *rest in self._pending]
            for entry in list(self._pending):
                ends_at, future, update = entry
                if self._device.clock.monotonic() >= ends_at:
                    self._pending.remove(entry)
                    future.set_result(update)
            self._device.cycle.advance()


class Mortal(Unpaused):
    """A training process that ends at the first questions of each kind, and then goes on.

    Args:
        device: whose training it becomes, in the place of what trains for it.
        prepares: questions to prepare a round at which it ends.
        updates: questions for an update at which it ends.
    """

    def __init__(self, device: Device, *, prepares: int = 0, updates: int = 0) -> None:
        self._inner, self._prepares, self._updates = device.cycle._worker, prepares, updates
        self.orders: list[Order] = []
        device.cycle._worker = self

    def prepare(self, order: Order) -> Future[Prepared]:
        self.orders.append(order)
        self._prepares -= 1
        return _answer(_end) if self._prepares >= 0 else self._inner.prepare(order)

    def update(self) -> Future[Update]:
        self._updates -= 1
        return _answer(_end) if self._updates >= 0 else self._inner.update()

    def look(self) -> None:
        pass

    def end(self) -> None:
        pass


def _end() -> NoReturn:
    raise WorkerError("the training process ended: signal 9")
