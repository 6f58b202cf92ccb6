"""Has the kernel end a program that the agent has started when the agent ends, however that is.

The leash is a pipe to which nothing is written. The agent has the end that is written to; when that closes,
the kernel sends SIGKILL to the program's process group, which owns the other end. So a group ends that stands
still, too. Of stopped orphans, the kernel else lets go on, and so end, those alone whose new parent is of
another session (:mod:`agent.brake`): in a container, whose first process is of the same one, they stand still
for ever, with all their memory.
"""

from __future__ import annotations

import fcntl
import os
import signal


class Leash:
    """A leash, of which no program is held yet.

    Raises:
        OSError: the system has no descriptors for it.
    """

    def __init__(self) -> None:
        self._held, self._ours = os.pipe()
        self._is_over = False

    @property
    def descriptor(self) -> int:
        """That the program has to inherit."""
        return self._held

    def hold(self, group: int) -> None:
        """Let a process group end with this program.

        Args:
            group: its id: a child of this process that is not waited for yet.
        """
        end_with_pipe(self._held, group)

    def let_go(self) -> None:
        """Let the group be; what is left of it may go on."""
        if not self._is_over:
            self._is_over = True
            fcntl.fcntl(self._held, fcntl.F_SETOWN, 0)
            os.close(self._ours)
            os.close(self._held)


def end_with_pipe(descriptor: int, group: int) -> None:
    """Let the kernel end a process group when the other end of a pipe closes, to which nothing is written.

    Args:
        descriptor: of the end that is read from.
        group: to be ended.

    Raises:
        OSError: there is no such group.
    """
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, -group)
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
