"""A process that answers a question and ends, with the memory that the answer took.

The agent serves the network and keeps the books. What needs numpy, and libraries that take tens of MiB, is
asked of such a process: the memory is there while it computes, and the system's again when it has ended.
The program (:mod:`agent.errand_program`) gets the question over a socket, and ends when the agent does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

from agent.channel import Channel
from agent.child_log import Said
from agent.child_programs import environment
from agent.sensors import processor_s_of
from dpagent.errors import DpagentError, ExitCode, said

log = logging.getLogger(__name__)

_ENDING_S: Final = 5.0


class ErrandError(DpagentError):
    """A process could not be started, or ended without an answer; the text gives the reason."""

    exit_code = ExitCode.CHILD  # It may pass: the system has ended it for want of memory, say.


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a question.

    Attributes:
        value: the answer.
        spent_s: processor time that it took the process, in seconds; the start counts with the first one.
        asked_at: when the process had started, and had the question (monotonic).
    """

    value: Any
    spent_s: float
    asked_at: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """That there is no answer.

    Attributes:
        kind: of the error, one that the agent knows.
        reason: in words.
        spent_s, asked_at: as of :class:`Answer`; ``asked_at`` is None if it did not come so far.
    """

    kind: type[DpagentError]
    reason: str
    spent_s: float
    asked_at: float | None = None

    def error(self) -> DpagentError:
        """What the one who asked is to see."""
        error = self.kind.__new__(self.kind)  # Some put their sentence together from parts.
        error.args = (self.reason,)
        return error


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question that waits for its answer."""

    question: object
    answer: Future[Answer | Refusal]


class Errand:
    """Starts a program, asks it, and takes what it says.

    Args:
        program: a module that calls :func:`agent.errand_program.answer`. It gets ready at once.
        stays: whether it waits for another question after an answer, with the memory that it has then.

    Raises:
        ErrandError: it cannot be started.
    """

    def __init__(self, program: str, *, stays: bool = False) -> None:
        try:
            ours, theirs = socket.socketpair()
            with contextlib.ExitStack() as closing:
                closing.enter_context(theirs)
                closing.enter_context(ours)
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", program, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=environment() | {"OPENBLAS_NUM_THREADS": "1"},
                    process_group=0,
                )
                self._channel = Channel(ours.detach())
        except OSError as error:
            raise ErrandError(f"the process {program} cannot be started: {error}") from error
        self._program, self._stays = program, stays
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=program, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # The system has no room for one more.
            self._channel.close()
            self._kill()
            self._process.wait()
            raise ErrandError(f"the process {program} cannot be asked: {error}") from error

    @property
    def process(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def may_be_asked(self) -> bool:
        """Whether the process is there, and nobody has ended it."""
        return self._process.poll() is None

    def ask(self, question: object) -> Future[Answer | Refusal]:
        """Ask a question, once the one before is answered.

        Args:
            question: that can be pickled, as the answer can.

        Returns:
            An :class:`Answer`, or a :class:`Refusal`; if the process ends without one, of
            :class:`ErrandError`.
        """
        asked = _Asked(question, Future())
        self._asked.put(asked)
        return asked.answer

    def answer(self, question: object) -> Any:
        """The answer to the question, once it is there.

        Args:
            question: as of :meth:`ask`.

        Raises:
            DpagentError: as the program has it; or the process ended.
        """
        answer = self.ask(question).result()
        if isinstance(answer, Refusal):
            raise answer.error()
        return answer.value

    def wait(self, question: object) -> Any:
        """As :meth:`answer`; ends the process in any case."""
        try:
            return self.answer(question)
        finally:
            self.end()

    def give_way(self, niceness: int) -> None:
        """Let the process, and what it starts from here on, run at this niceness.

        Args:
            niceness: at least that of this program.
        """
        with contextlib.suppress(ProcessLookupError):
            if self.may_be_asked:  # so that nobody else has its number
                os.setpriority(os.PRIO_PGRP, self._process.pid, niceness)

    def end(self) -> None:
        """End the process, whatever it is at."""
        self._asked.put(None)
        self._kill()
        self._thread.join(_ENDING_S)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:  # so that nobody else has its number
                os.killpg(self._process.pid, signal.SIGKILL)

    def _run(self) -> None:
        """Have each question answered: who waits for an answer would else wait for ever."""
        asked, answer, problem = self._asked.get(), None, ""
        with self._channel as channel:
            while asked is not None:
                answer = None
                try:
                    answer = _heard(channel, asked.question)
                except (EOFError, OSError):
                    break  # It has ended; how, is below.
                except Exception as error:  # Memory for the question, say, which has a model's weights in it.
                    log.debug("the details", exc_info=True)
                    problem = f"the process {self._program} cannot be asked: {said(error)}"
                    self._kill()
                    break
                if not self._stays:
                    break
                asked.answer.set_result(answer)
                asked = self._asked.get()
        # The memory is the system's again before whoever asked goes on.
        spent_s = processor_s_of(self._process.pid, with_children=False)
        code = self._process.wait()
        if asked is None:
            return
        if answer is None:
            how = f"exit code {code}" if code >= 0 else f"signal {-code}"
            hint = "; the system may have run out of memory" if code == -signal.SIGKILL else ""
            problem = problem or f"the process {self._program} ended: {how}{hint}"
            answer = Refusal(ErrandError, problem, spent_s)
        asked.answer.set_result(answer)


def _heard(channel: Channel, question: object) -> Answer | Refusal:
    """What the process answers.

    Raises:
        EOFError, OSError: it has ended.
        Exception: the question cannot be put, or the answer not be understood.
    """
    channel.send((logging.getLogger().getEffectiveLevel(), question))
    while isinstance(message := channel.receive(), Said):
        message.log()
    answer: Answer | Refusal = message
    return answer


def ask(program: str, question: object) -> Any:
    """The answer to a question, once it is there.

    Args:
        program: as of :class:`Errand`.
        question: as of :meth:`Errand.ask`.

    Raises:
        DpagentError: as the program has it; or the process cannot be started, or ended.
    """
    return Errand(program).wait(question)
