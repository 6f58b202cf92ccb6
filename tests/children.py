"""Child processes of the tests. One that fails unasked ends the next wait, with its code and last words."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PATIENCE_S = 90.0
"""For what has to come. A machine that is busy is no finding."""
_TAIL = 1_500
_watched: list[Child] = []


class Child:
    """A process whose output goes to a log, watched until a test asks how it ended.

    Args:
        command: of the process.
        log: to which its output is appended.
        start: that starts it; ``subprocess.Popen`` if None.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        log: Path,
        start: Callable[..., subprocess.Popen[Any]] | None = None,
    ) -> None:
        self.log = log
        self._command = [str(part) for part in command]
        with log.open("ab") as stream:
            self.process = (start or subprocess.Popen)(self._command, stdout=stream, stderr=stream)
        _watched.append(self)

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        """The exit code."""
        try:
            code = self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended after {patience_s:g} s: {self.state()}") from None
        self._forget()
        return code

    def said(self) -> str:
        return self.log.read_text()

    def is_running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self._forget()

    def stop(self) -> int:
        """SIGTERM, and the exit code; SIGKILL if that takes long."""
        self.process.terminate()
        self._forget()
        try:
            return self.wait(PATIENCE_S)
        finally:
            self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    def state(self) -> str:
        """Whether it runs, and the end of its log."""
        code = self.process.poll()
        name = " ".join(part for part in self._command if not part.startswith("-"))
        how = "runs" if code is None else f"ended with exit code {code}"
        return f"`{name}` {how}; its log ends:\n{self.said()[-_TAIL:]}"

    def _forget(self) -> None:
        if self in _watched:
            _watched.remove(self)


def deaths() -> list[str]:
    """The children that failed though no test ended them or waited for their end."""
    return [child.state() for child in _watched if child.process.poll() not in (None, 0)]


def states() -> list[str]:
    """All children that no test has ended yet."""
    return [child.state() for child in _watched]


def leave_to_parent() -> None:
    """In a fork of the tests' process: watch none of the children of that process."""
    _watched.clear()
