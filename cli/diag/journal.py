"""What the agent's log says that others may see: of the journal, or of a file."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from dpagent.storage import disk_errors
from dpagent.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable

_UNIT: Final = "dpagent-agent.service"
_SINCE: Final = "-31 days"
_JOURNAL: Final = (
    "journalctl", f"--unit={_UNIT}", f"--since={_SINCE}", "--output=cat", "--no-pager", "--quiet",
)  # fmt: skip
_MOST_LINES: Final = 20_000
"""Of the newest that may be shown: those that may not are not counted."""
_MOST_CHARACTERS: Final = 8_192
"""Of a line; a longer one is passed over."""


@dataclass(frozen=True, slots=True)
class Log:
    """The lines that may be shown.

    Attributes:
        lines: the newest.
        source: where they are from, or why there are none, in words.
    """

    lines: tuple[str, ...]
    source: str

    @property
    def in_words(self) -> str:
        """How much there is."""
        return f"{counted(len(self.lines), 'line')} of {self.source}" if self.lines else self.source


def log_of(file: Path | None) -> Log:
    """The log of the agent.

    Args:
        file: with what the agent wrote to standard error; ``-`` is standard input, None the journal.

    Raises:
        StorageError: the file cannot be read.
    """
    if file is None:
        return _of_journal()
    if str(file) == "-":
        return Log(_newest(_lines(sys.stdin)), "standard input")
    with disk_errors(file), file.open(encoding="utf-8", errors="replace") as stream:
        return Log(_newest(_lines(stream)), str(file))


def _of_journal() -> Log:
    missing = "; `--log FILE` takes what `dpagent run` wrote to standard error"
    try:
        with subprocess.Popen(
            _JOURNAL, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            encoding="utf-8", errors="replace",
        ) as program:  # fmt: skip
            assert program.stdout is not None
            lines = _newest(_lines(program.stdout))
    except OSError:
        return Log((), f"no log: there is no journal{missing}")
    if not lines:
        return Log((), f"no log: the journal has none of {_UNIT} that this user may read{missing}")
    return Log(lines, f"the journal of {_UNIT}, of the last 31 days at most")


def _newest(lines: Iterable[str]) -> tuple[str, ...]:
    from agent.marked_log import public_lines
    from cli.notation import printable

    return tuple(map(printable, deque(public_lines(lines), _MOST_LINES)))


def _lines(stream: IO[str]) -> Iterator[str]:
    """The lines of a stream that are not too long."""
    is_within = False
    while part := stream.readline(_MOST_CHARACTERS):
        is_whole = part.endswith("\n")
        if is_whole and not is_within:
            yield part
        is_within = not is_whole
