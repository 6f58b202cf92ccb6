"""What a look at the data is ordered to do, and what comes of it."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from agent.data_settings import DataSettings

NICENESS: Final = 4
"""More than training has. So a look gets 29 % of a core that a program of training's niceness wants all the
time: enough to be done when what it found counts. While a round is decided on, prepared and trains, it stands
still."""
LONGEST_SENTENCE: Final = 4_096
"""Bytes of a look's last words: a pipe holds more, so a look ends whether anybody reads them or not."""


@dataclass(frozen=True, slots=True)
class LookOrder:
    """What to bring up to date.

    Attributes:
        settings: of the data, declared.
        state_dir: of the rows.
        at_once: whether all that is new is decoded and counts, however long that takes. The agent does not
            run: nobody reads rows, more records than declared are an error, and what was written to a moment
            ago is taken as it is.
        niceness: that the process has at least.
    """

    settings: DataSettings
    state_dir: Path
    at_once: bool
    niceness: int = NICENESS

    def to_bytes(self) -> bytes:
        """For the standard input of the process."""
        return pickle.dumps(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> LookOrder:
        """Inverse of :meth:`to_bytes`."""
        order: LookOrder = pickle.loads(data)
        return order


class LookResult(NamedTuple):
    """What came of a look whose result counts by now. Private.

    Attributes:
        goes_on: whether it has not ended yet: what it finds waits for a later round.
        why_not: why it could not be finished, or None.
    """

    goes_on: bool = False
    why_not: str | None = None
