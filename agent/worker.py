"""The training process, as the agent sees it: what it is asked, what it answers, and how it ends.

The agent serves the network and keeps the books; records are read, trained on and forgotten in a process of
their own (:mod:`agent.worker_program`). So when the agent acknowledges a message or publishes a fragment
depends on no interpreter lock and no long product of matrices, and whatever memory a plan makes training
take, the system takes it from the training process: a plan that ends that process is declined like any
other that the board cannot run.

The process is started when it is first needed, and ended when it has been idle for a while.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Final, Protocol

from agent.brake import Brake
from agent.channel import Channel
from agent.child_log import ChildLog, Said
from agent.child_programs import KEPT_MEMORY, environment
from agent.leash import Leash
from agent.looks import Looks
from agent.orphans import Orphans
from agent.profile import Profile
from agent.sensors import processor_s_of
from agent.settings import AgentSettings
from agent.training_messages import (
    Failed,
    Order,
    Prepared,
    Reading,
    Start,
    Update,
    WorkerError,
)
from agent.training_settings import TrainingSettings
from dpagent.errors import said

log = logging.getLogger(__name__)

_PROGRAM: Final = "agent.worker_program"
_ENDING_S: Final = 5.0
_HANGING_UP_S: Final = 1.0
"""From the end of its answers to that of the process."""


class Trains(Protocol):
    """Whoever trains for a :class:`~agent.cycle.Cycle`: one round at a time, in two parts."""

    def prepare(self, order: Order) -> Future[Prepared]:
        """Try everything that can be tried without a record.

        The answer raises :class:`~agent.training_messages.WorkerError` if the board cannot run the round, and
        :class:`~agent.training_messages.UsedProcessError` if it is to be asked again after :meth:`end`.
        """
        ...

    def update(self) -> Future[Update]:
        """Read the records, and make the update of the round that was prepared last.

        The answer fails only if no noise can be drawn, or the process has ended.
        """
        ...

    def pause(self) -> None:
        """Keep training from going on, wherever it is, until :meth:`resume`."""
        ...

    def resume(self) -> None:
        """Let training go on."""
        ...

    def look(self) -> None:
        """Begin to look at the data, for later rounds, if a round was to read them.

        When that begins shows later, by which round takes in what it found. So it is asked for at a time that
        does not depend on how long training took.
        """
        ...

    def hold_look(self) -> None:
        """Let a look at the data stand still, if one goes on, until :meth:`resume_look`: while a round is
        priced and prepared, whose processor time is measured, and while it trains, in a time that follows
        from that. What the look found counts later by as much. Likewise the owner's command, which may read
        records.
        """
        ...

    def resume_look(self) -> None:
        """Let it go on."""
        ...

    def end(self) -> None:
        """Let go of what training holds, until it is needed again. What was asked for fails."""
        ...


class ReadsRecords(Protocol):
    """What else on the board may read records, and is stopped for as long as a look is."""

    def hold(self) -> None:
        """Let it stand still until :meth:`go_on`."""
        ...

    def go_on(self) -> None:
        """Let it go on."""
        ...


class Worker:
    """Starts, asks and ends the training process. Implements :class:`Trains`.

    Args:
        settings: ``agent.yaml``.
        profile: the board's.
        looks: at the data.
        beside: the owner's command, if there may be one.
    """

    def __init__(
        self, settings: AgentSettings, profile: Profile, looks: Looks, beside: ReadsRecords | None = None
    ) -> None:
        self._looks, self._beside = looks, beside
        self._start = Start(training_settings(settings, profile), logging.getLogger().getEffectiveLevel())
        self._share = settings.governor.processor_share
        self._running: _Process | None = None
        self._reads = self._adopts = False
        """Whether the round that is prepared reads records, and takes in what a look found."""
        self._has_read = False
        """Whether a round was to read records since this program began."""
        self._taking: Future[Update] | None = None
        """The last round that takes in what a look found."""
        self._orphans = Orphans()
        self._log = ChildLog()

    def prepare(self, order: Order) -> Future[Prepared]:
        """As of :class:`Trains`. Starts the process if there is none."""
        self._orphans.wait()
        self._reads = order.failure is None and not order.is_rehearsal
        # Also where the device sits the round out, which takes as long.
        self._adopts = order.failure is None and self._looks.is_due
        order = replace(order, adopts=self._adopts)
        if self._running is None or self._running.is_over:
            self.end()
            try:
                self._running = _Process(self._start, self._share, self._log)
            except (OSError, RuntimeError) as error:  # of a process; of a thread
                answer: Future[Any] = Future()
                answer.set_exception(WorkerError(f"the training process cannot be started: {error}"))
                return answer
        return self._running.ask(order)

    def update(self) -> Future[Update]:
        """As of :class:`Trains`."""
        assert self._running is not None  # a round was prepared
        self._has_read |= self._reads
        if not (self._reads and self._adopts):
            return self._running.ask(Reading())
        self._taking = self._running.ask(Reading(self._looks.result()))
        return self._taking

    def pause(self) -> None:
        """As of :class:`Trains`. All processes of training stop; the owner's command goes on meanwhile."""
        if self._running is not None:
            self._running.brake.hold()
        if self._beside is not None:
            self._beside.go_on()

    def resume(self) -> None:
        """As of :class:`Trains`."""
        if self._beside is not None:
            self._beside.hold()
        if self._running is not None:
            self._running.brake.release()

    def look(self) -> None:
        """As of :class:`Trains`."""
        if self._taking is not None and self._taking.done():
            if self._taking.exception() is None:
                self._looks.taken()
            self._taking = None
        if self._has_read:
            self._looks.begin()

    def hold_look(self) -> None:
        """As of :class:`Trains`."""
        if self._beside is not None:
            self._beside.hold()
        self._looks.hold()

    def resume_look(self) -> None:
        """As of :class:`Trains`."""
        if self._beside is not None:
            self._beside.go_on()
        self._looks.go_on()

    def end(self) -> None:
        """As of :class:`Trains`; the process is killed."""
        if self._running is not None:
            self._running.kill()
            if self._running.is_over:
                self._orphans.add(self._running.group)
            self._running = None


class _NoMore:
    """In place of a question: there are no more."""


class _Process:
    """A training process that runs, and two threads: one writes questions, which may wait until the process
    reads, one reads its answers, and what it logs.

    Attributes:
        brake: of the process and its forks, which are a group of their own in the agent's session.
    """

    def __init__(self, start: Start, share: float, child_log: ChildLog) -> None:
        self._log = child_log
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as closing:
            closing.enter_context(theirs)
            closing.enter_context(ours)
            self._leash = Leash()
            closing.push(lambda kind, *_: self._leash.let_go() if kind else None)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), self._leash.descriptor],
                env=environment() | KEPT_MEMORY,
                process_group=0,
            )
            with contextlib.suppress(ProcessLookupError):  # It has ended.
                self._leash.hold(self._process.pid)
            self._channel = Channel(ours.detach())
        self._asked: list[Future[Any]] = []
        self._lock = threading.Lock()
        self._is_over = False
        self._spent_before_s = self._spent_s = 0.0
        """Until the last round was to be prepared, and from then to its end."""
        self._has_read = False
        """Whether it was to read records."""
        self._questions: queue.SimpleQueue[Start | Order | Reading | _NoMore] = queue.SimpleQueue()
        self._questions.put(start)
        self._reader = threading.Thread(target=self._read, name="training answers", daemon=True)
        self._writer = threading.Thread(target=self._write, name="training questions", daemon=True)
        with contextlib.ExitStack() as undone:  # The system may have no room for a thread more.
            undone.callback(self._leash.let_go)
            undone.callback(self._process.wait)
            undone.callback(self._process.kill)
            self.brake = Brake(self._process.pid, share)
            undone.callback(self.brake.let_go)
            undone.callback(self._hang_up)
            self._writer.start()
            self._reader.start()
            undone.pop_all()

    @property
    def is_over(self) -> bool:
        """Whether the process has ended."""
        return self._is_over

    def ask(self, question: Order | Reading) -> Future[Any]:
        """The answer to come to a question; questions are answered in turn."""
        answer: Future[Any] = Future()
        with self._lock:
            if self._is_over:
                answer.set_exception(self._ended())
                return answer
            if isinstance(question, Order):
                self._spent_before_s = self._processor_s()
            else:
                self._has_read = True
            self._asked.append(answer)
            self._questions.put(question)
        return answer

    @property
    def group(self) -> int:
        """The id of its process group."""
        return self._process.pid

    def kill(self) -> None:
        """End it and its forks, whatever they are at."""
        self.brake.kill()
        self._reader.join(_ENDING_S)

    def _write(self) -> None:
        """Send questions for as long as the process reads."""
        try:
            while not isinstance(question := self._questions.get(), _NoMore):
                self._channel.send(question)
        except OSError:
            pass  # It has ended; the reader finds out, and how.
        except Exception as error:  # Memory for the question, say, which has a model's weights in it.
            log.debug("the details", exc_info=True)
            log.error("the training process cannot be asked: %s", said(error))
            self._channel.hang_up()  # Who waits for an answer would else wait for ever.

    def _read(self) -> None:
        """Take what the process says until it ends."""
        try:
            while True:
                message = self._channel.receive()
                if isinstance(message, Said):
                    self._log.write(message)
                    continue
                answer = self._asked.pop(0)
                if isinstance(message, Failed):
                    answer.set_exception(message.error())
                else:
                    answer.set_result(message)
        except (EOFError, OSError):
            pass
        finally:
            self.brake.let_go()
            self._spent_s = self._processor_s() - self._spent_before_s
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_HANGING_UP_S)  # Its own exit code says why.
            self._process.kill()
            self._process.wait()
            self._leash.let_go()
            with self._lock:
                self._is_over = True
                left, self._asked = self._asked, []
            self._hang_up()
            for answer in left:
                answer.set_exception(self._ended())

    def _hang_up(self) -> None:
        """Once there is nothing more to ask."""
        self._questions.put(_NoMore())
        self._channel.hang_up()
        if self._writer.ident is not None:  # It has been started.
            self._writer.join()
        self._channel.close()

    def _processor_s(self) -> float:
        """What it has computed so far, and the children that it has waited for, unless they may have read
        records."""
        return processor_s_of(self._process.pid, with_children=not self._has_read)

    def _ended(self) -> WorkerError:
        code = self._process.wait()
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        hint = "; the system may have run out of memory" if code == -signal.SIGKILL else ""
        return WorkerError(f"the training process ended: {how}{hint}", max(self._spent_s, 0.0))


def spent_on(answer: Future[Prepared]) -> float:
    """Processor time of a preparation, however it ended, in seconds. Public.

    Args:
        answer: that has come.
    """
    if (error := answer.exception()) is not None:
        return error.spent_s if isinstance(error, WorkerError) else 0.0
    prepared = answer.result()
    return prepared.took_s + prepared.tried_s


def training_settings(settings: AgentSettings, profile: Profile) -> TrainingSettings:
    """What the training process needs to know.

    Args:
        settings: ``agent.yaml``, with what the profile adds to it.
        profile: the board's.
    """
    return TrainingSettings(
        settings.data, settings.state_dir, settings.engine, settings.trusted_graphs,
        settings.governor.processor_share, profile.microbatch, profile.processes,
        profile.engine_memory_mib, profile.niceness,
    )  # fmt: skip
