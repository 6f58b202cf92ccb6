"""The training process: ``python -m agent.worker_program DESCRIPTOR``, started by :mod:`agent.worker`.

Questions come over a socket and are answered in turn. It has no network and no ledger. It ends when the agent
hangs up, as it does however it ends.
"""

from __future__ import annotations

import logging
import os
import queue
import resource
import signal
import sys
import threading
import time
from typing import Any

from agent.channel import Channel
from agent.child_log import SaidOver
from agent.priority import TRAINING_ENDS_BEFORE, end_before_parent, give_way
from agent.training import Trainer, Work
from agent.training_messages import (
    MORE_NICENESS,
    Failed,
    Order,
    Prepared,
    Reading,
    Start,
    UsedProcessError,
    WorkerError,
)
from dpagent.errors import said
from dpagent.learning.subnormals import flush_subnormals
from dpagent.protocol.task import RoundTask
from dpagent.resident_memory import stay_in_memory

log = logging.getLogger(__name__)


class _Questions:
    """Reads questions as they come, so that the agent never waits until one is taken."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="questions", daemon=True).start()

    def next(self) -> Any:
        """The next one; None: there was no memory for it."""
        return self._queue.get()

    def _read(self) -> None:
        while True:
            try:
                self._queue.put(self._channel.receive())
            except MemoryError:
                self._queue.put(None)
            except (EOFError, OSError):
                os._exit(0)  # Whatever else runs here.


def serve(channel: Channel) -> None:
    """Answer until the agent hangs up, which ends the process."""
    start: Start = channel.receive()
    give_way(start.settings.niceness + MORE_NICENESS)  # Before there are other threads.
    end_before_parent(TRAINING_ENDS_BEFORE)
    stay_in_memory()
    flushes = flush_subnormals()
    answers, questions = SaidOver(channel), _Questions(channel)
    logging.basicConfig(level=start.log_level, handlers=[answers], format="%(message)s")
    if not flushes:
        log.warning("this processor cannot be told to take numbers below 1e-38 for zero: they may be slower")
    trainer: Trainer | None = None
    work: Work | None = None
    has_worked, is_first = False, True
    while True:
        question: Order | Reading | None = questions.next()
        spent = _Spent(trainer, has_worked=has_worked, is_first=is_first)
        is_first = False
        try:
            trainer = trainer or Trainer(start.settings)
            if question is None:
                raise WorkerError("there is no memory for the round on this board now")
            if isinstance(question, Order):
                work = None
                task = RoundTask.of(question.plan)
                weights = task.weights_from(question.weights)
                work = trainer.prepare(
                    task, question.assets, weights,
                    failure=question.failure, is_rehearsal=question.is_rehearsal, adopts=question.adopts,
                )  # fmt: skip
                answers.send(Prepared(work.longest_s, spent.here_s(trainer), spent.by_ended_s()))
            else:
                assert work is not None  # the agent asks for an update once a round is prepared
                has_worked = True
                trainer.try_no_engines()  # From here on, this process tells of records.
                answers.send(trainer.noisy_update(work, question.found).as_sent(work.task.plan))
        except UsedProcessError as error:
            answers.send(Failed(said(error), is_of_use=True, spent_s=spent.in_all_s(trainer)))
        except Exception as error:
            log.debug("the details", exc_info=True)
            answers.send(Failed(said(error), spent_s=spent.in_all_s(trainer)))


class _Spent:
    """Processor time from now on, which no other program lengthens. The start counts with the first question:
    a round waits for it, too.

    Args:
        trainer: whose engine may compute in other processes; None: there is none yet.
        has_worked: whether this process has read records. From then on it begins no fork whose time counts,
            and what those of before have taken since may tell of records.
        is_first: whether the process has answered none yet.
    """

    def __init__(self, trainer: Trainer | None, *, has_worked: bool, is_first: bool) -> None:
        self._has_worked = has_worked
        self._here_s = 0.0 if is_first else time.process_time()
        self._elsewhere_s = 0.0 if trainer is None else trainer.elsewhere_s
        self._by_ended_s = _by_ended_s()

    def here_s(self, trainer: Trainer | None) -> float:
        """Of this process and those that compute with it."""
        elsewhere_s = 0.0 if trainer is None else trainer.elsewhere_s
        return time.process_time() - self._here_s + max(elsewhere_s - self._elsewhere_s, 0.0)

    def by_ended_s(self) -> float:
        """Of forks that have ended, as those do in which engines are tried."""
        return 0.0 if self._has_worked else _by_ended_s() - self._by_ended_s

    def in_all_s(self, trainer: Trainer | None) -> float:
        """Of all of them."""
        return self.here_s(trainer) + self.by_ended_s()


def _by_ended_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Serve on the descriptor that the command line names."""
    # A terminal's Ctrl-C and a service manager's SIGTERM go to all programs; the agent ends this one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    serve(Channel(int(sys.argv[1])))


if __name__ == "__main__":
    main()
