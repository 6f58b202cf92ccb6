"""A command of the board's owner that runs beside the agent: nothing waits for it, wherever its file lies. It
ends with the agent, however that ends, also while it stands still.

What it has started belongs to it, and is held and ended with it, for as long as that stays in its process
group; also when the command itself has ended, as a shell does that leaves programs in the background.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

from agent.leash import Leash
from agent.sensors import group_lives

_LAUNCHER: Final = ("/bin/sh", "-c", 'exec "$@"', "sh")
"""Python waits, its lock held, until the system has opened the file of a program that it starts: on a mount
that hangs, for ever. A shell of the board's own waits in its place."""
_ENDS_FIRST: Final = (
    "/bin/sh",
    "-c",
    '{ echo 1000 > /proc/self/oom_score_adj; } 2> /dev/null; exec "$@"',
    "sh",
)
"""The same, as of :func:`agent.priority.end_first`."""
_NOT_OURS: Final = (ProcessLookupError, PermissionError)
"""What the kernel says of a group that has ended, or is another user's, as one is that ``sudo`` began: nobody
here can hold or end that."""
_ENDING_S: Final = 1.0
"""What is killed ends at once, unless the system itself waits for a disk in its name."""
_NOT_RUN: Final = {126: "it is no program that this user may run", 127: "there is no such program"}
"""By the exit code of a shell that has not found the program, or may not run it."""


class OwnersCommand:
    """A command that runs, and the programs that it starts.

    Args:
        command: program and arguments.
        output: for all that it prints; None: nobody reads it.
        is_silent: whether nobody reads what it says of its errors; else it goes where the agent's own does.
        reads_records: whether it may. The system then ends it, with what it starts, before any other program
            where memory runs out: how much it takes is a matter of records.

    Raises:
        OSError: no process can be started.
        ValueError: an argument holds a null character.
    """

    def __init__(
        self,
        command: Sequence[str],
        output: IO[bytes] | None = None,
        *,
        is_silent: bool = False,
        reads_records: bool = False,
    ) -> None:
        self._leash = Leash()
        try:
            self._process = subprocess.Popen(
                [*(_ENDS_FIRST if reads_records else _LAUNCHER), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if output is None else output,
                stderr=subprocess.DEVNULL if is_silent else None,
                pass_fds=[self._leash.descriptor],
                process_group=0,
            )
        except BaseException:
            self._leash.let_go()
            raise
        with contextlib.suppress(ProcessLookupError):  # It has ended.
            self._leash.hold(self._process.pid)

    @property
    def process(self) -> int:
        """The id of its process."""
        return self._process.pid

    def code(self) -> int | None:
        """Its exit code; None: it runs."""
        return self._process.poll()

    def is_over(self) -> bool:
        """Whether it has ended, and all of its process group."""
        if self.code() is None or self._has_left():
            return False
        self.let_be()
        return True

    def _has_left(self) -> bool:
        """Whether it has left programs in its group when it ended that have not ended since. As long as there
        are any, no process gets its number: so one that has it is of another group."""
        if Path(f"/proc/{self._process.pid}").exists():
            return False
        try:
            # In a container they are this process's children now, and of the group until it has waited for
            # them.
            while os.waitpid(-self._process.pid, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            pass
        try:
            os.killpg(self._process.pid, 0)
        except _NOT_OURS:
            return False
        return group_lives(self._process.pid)

    def let_be(self) -> None:
        """It has ended: what it has left may go on."""
        self._leash.let_go()

    def why_not_run(self) -> str | None:
        """Why it could not be run, by its exit code; None: it was."""
        return _NOT_RUN.get(self._process.returncode)

    def hold(self, *, is_held: bool) -> None:
        """Let it stand still, with the programs that it has started, or go on."""
        with contextlib.suppress(*_NOT_OURS):
            if self.code() is None or self._has_left():  # So that nobody else has its number.
                os.killpg(self._process.pid, signal.SIGSTOP if is_held else signal.SIGCONT)

    def kill(self) -> None:
        """Have it end, with the programs that it has started, without waiting until that is over."""
        with contextlib.suppress(*_NOT_OURS):
            if self.code() is None or self._has_left():  # As above.
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> bool:
        """End it, with the programs that it has started; whether it is gone."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_S)
        if self.code() is None:
            return False
        self.let_be()
        return True
