"""Processes whose parent has ended, where the agent is the first process of a container.

There, they become its children, and stay on the system's list for ever when they have ended, unless it waits
for them. Elsewhere the system's first process does.
"""

from __future__ import annotations

import os


class Orphans:
    """Process groups of which each process is another's child, or an orphan by now."""

    def __init__(self) -> None:
        self._groups: set[int] = set()

    def add(self, group: int) -> None:
        """Wait for the processes of a group from now on, without standing still for it.

        Args:
            group: its id. Its leader is no child of this process, or is waited for already.
        """
        self._groups.add(group)

    def wait(self) -> None:
        """Wait for those that have ended."""
        for group in list(self._groups):
            try:
                while os.waitpid(-group, os.WNOHANG) != (0, 0):
                    pass
            except ChildProcessError:  # There is none, or none that is this process's.
                self._groups.discard(group)
