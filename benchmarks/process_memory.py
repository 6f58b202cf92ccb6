"""The memory of programs with the processes that they start, as the kernel accounts for it.

What several processes share counts once: what is theirs alone by its proportional set size, the pages of a
file by the process that has most of them. So it is what the programs take of a board on which no other has
their files in memory. Here the benchmark itself runs the same Python, and the proportional set size alone
would be too small.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

_LOOK_S: Final = 0.03


def tree_of(process: int) -> Iterator[int]:
    """A process, and those that it has started, and so on, as far as they run."""
    yield process
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children = file.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from tree_of(int(child))


def memory_of(*processes: int, besides: Collection[str] = ()) -> float:
    """Memory of processes together, MiB; of one that has ended, nothing.

    Args:
        processes: their ids.
        besides: names of files whose pages do not count.
    """
    alone = 0
    files: dict[str, int] = defaultdict(int)
    for process in processes:
        try:
            text = Path(f"/proc/{process}/smaps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        own: dict[str, int] = defaultdict(int)
        path = ""
        for line in text.splitlines():
            first, *rest = line.split()
            if not first.endswith(":"):
                path = rest[4] if len(rest) > 4 else ""
            elif first in ("Rss:", "Anonymous:") and path.startswith("/"):
                own[path] += int(rest[0]) * (1 if first == "Rss:" else -1)
            if first == ("Anonymous:" if path.startswith("/") else "Pss:"):
                alone += int(rest[0])
        for path, kib in own.items():
            if path.rpartition("/")[2] not in besides:
                files[path] = max(files[path], kib)
    return (alone + sum(files.values())) / 1024


class Watch:
    """Watches a program and its processes, and keeps the most that they took, by phase.

    Use as a context manager.

    Args:
        process: the program's.
        phase: that begins.
        besides: as of :func:`memory_of`.
    """

    def __init__(self, process: int, phase: str = "", besides: Collection[str] = ()) -> None:
        self._process, self._phase, self._besides = process, phase, besides
        self.most: dict[str, float] = {}
        """MiB, by phase."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="memory", daemon=True)

    def enter(self, phase: str) -> None:
        """What follows belongs to a phase."""
        self._phase = phase

    def _look(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            phase = self._phase
            memory = memory_of(*tree_of(self._process), besides=self._besides)
            if phase == self._phase:
                self.most[phase] = max(memory, self.most.get(phase, 0.0))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
