"""The file that keeps which engine was found the best for a purpose, so that no later training process has
to try.

**It takes no room on the disk.** A process that has to try is seconds later than one that has not, and so is
the answer to its round: if the choice were kept only where the disk has room, a record that takes the last of
it would show. So the agent takes the room when it starts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, NamedTuple

from dpagent.storage import take_room_for, write_over_spare

_BYTES: Final = 1_024
_NAME: Final = "engine.json"


class KeptChoice(NamedTuple):
    """An engine, as the file names it, and the processes that it computes in."""

    engine: str
    processes: int


class EngineFile:
    """The file of one board.

    Args:
        state_dir: of the agent.
    """

    def __init__(self, state_dir: Path) -> None:
        self._file = state_dir / _NAME

    def take_room(self) -> None:
        """Have the room that a choice takes.

        Raises:
            StorageError: The disk has none, or fails.
        """
        take_room_for(self._file, _BYTES)

    def load(self, purpose: str) -> KeptChoice | None:
        """What was found for a purpose; None where it is to be found out.

        Args:
            purpose: a digest of what the engine is for.
        """
        try:
            kept = json.loads(self._file.read_bytes())
            if kept["purpose"] == purpose:
                return KeptChoice(str(kept["engine"]), int(kept["processes"]))
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return None

    def save(self, purpose: str, choice: KeptChoice) -> None:
        """Keep what was found, in place of what was found before.

        Raises:
            StorageError: It cannot be written.
        """
        kept = {"purpose": purpose, "engine": choice.engine, "processes": choice.processes}
        write_over_spare(self._file, json.dumps(kept).encode(), size=_BYTES)
