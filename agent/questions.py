"""A command that is asked again and again, in the background: nothing waits for its answer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Final

from agent.owners_command import OwnersCommand
from dpagent.clock import Clock

_LONGEST_S: Final = 10.0
"""That a command may take."""
_LONGEST: Final = 200
"""Characters of what it said."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command said.

    Attributes:
        code: its exit code; None if it could not be run, or did not end in time.
        text: the last line that it printed, or why there is no exit code.
    """

    code: int | None
    text: str


class Question:
    """A command, and its last answer.

    Args:
        command: program and arguments.
        period_s: after which it is run again.
        clock: the program's.
    """

    def __init__(self, command: Sequence[str], period_s: float, clock: Clock) -> None:
        self._command, self._period_s, self._clock = list(command), period_s, clock
        self._running: OwnersCommand | None = None
        self._is_late = False
        """Whether it has been given up, and does not end."""
        self._output: IO[bytes] | None = None
        self._asked_at = -float("inf")
        self._answer: Answer | None = None

    def answer(self) -> Answer | None:
        """The last answer; None if there is none, or only one that was given long ago."""
        now = self._clock.monotonic()
        if self._running is not None:
            self._take(now)
        elif now >= self._asked_at + self._period_s:
            if now >= self._asked_at + 2 * self._period_s + _LONGEST_S:
                self._answer = None  # Nobody has asked meanwhile.
            self._ask(now)
        return self._answer

    @property
    def process(self) -> int | None:
        """The id of the command's process, while it runs."""
        return None if self._running is None else self._running.process

    def stop(self) -> None:
        """End the command if it runs."""
        if self._running is None or self._running.end():
            self._forget()

    def _ask(self, now: float) -> None:
        self._asked_at = now
        try:
            # A file in memory takes all that it prints, and nobody has to read meanwhile.
            self._output = os.fdopen(os.memfd_create("answer"), "w+b")
            self._running = OwnersCommand(self._command, self._output, is_silent=True)
        except (OSError, ValueError) as error:
            self._answer = Answer(None, f"it cannot be run ({error})")
            self._forget()

    def _take(self, now: float) -> None:
        assert self._running is not None
        assert self._output is not None
        code = self._running.code()
        if code is not None and self._is_late:
            self._forget()
        elif code is not None and (why_not := self._running.why_not_run()) is not None:
            self._answer = Answer(None, f"it cannot be run ({why_not})")
            self._forget()
        elif code is not None:
            self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - 4 * _LONGEST))
            lines = self._output.read().decode(errors="replace").split("\n")
            said = next((line.strip() for line in reversed(lines) if line.strip()), "")
            self._answer = Answer(code, said[-_LONGEST:])
            self._forget()
        elif not self._is_late and now >= self._asked_at + _LONGEST_S:
            self._is_late = True
            self.stop()
            self._answer = Answer(None, f"it has not ended within {_LONGEST_S:g} s")

    def _forget(self) -> None:
        if self._running is not None:
            self._running.let_be()
        if self._output is not None:
            self._output.close()
        self._running, self._output, self._is_late = None, None, False
