"""What another process does when the agent starts: it replays the ledger, opens the records, and tells their
form.

It decodes what has never been decoded, and takes the room of features (:mod:`agent.opening_program`). The
agent itself never opens them: what it has in memory does not depend on how many there are. One process does
both, one after the other: each takes numpy, and a small board has no memory for two at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.charges import Record
from agent.data_form import DataForm
from agent.data_settings import DataSettings
from agent.errand import Errand, ErrandError
from agent.pricing import replay_by

_PROGRAM: Final = "agent.opening_program"


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    """Which records to open.

    Attributes:
        settings: of the data, declared.
        state_dir: the agent's, which it has for itself.
    """

    settings: DataSettings
    state_dir: Path


class Opening:
    """Starts the process, which gets ready while the agent does.

    Raises:
        ErrandError: it cannot be started.
    """

    def __init__(self) -> None:
        try:
            self._errand = Errand(_PROGRAM, stays=True)
        except ErrandError as error:
            raise _not_opened(error) from error

    def give_way(self, niceness: int) -> None:
        """As of :class:`~agent.errand.Errand`: it may decode for long, and began before the agent knew its
        board.

        Args:
            niceness: the agent's.
        """
        self._errand.give_way(niceness)

    def replay(self, records: Sequence[Record]) -> None:
        """As :func:`agent.pricing.replay_apart`, in this process."""
        replay_by(self._errand.answer, records)

    def form(self, settings: DataSettings, state_dir: Path) -> DataForm:
        """Have the records opened, however long that takes, and what goes with them prepared; then the
        process ends.

        Args:
            settings: of the data, declared.
            state_dir: the agent's, which it has for itself.

        Raises:
            ConfigurationError: something is not declared.
            DataError: the records cannot be opened, or there are too many.
            ErrandError: the process ended.
            StorageError: the disk has no room for decoded records, or for features.
        """
        try:
            form: DataForm = self._errand.wait(OpenQuestion(settings, state_dir))
        except ErrandError as error:
            raise _not_opened(error) from error
        return form

    def end(self) -> None:
        """End the process, if nobody needs it any more."""
        self._errand.end()


def _not_opened(error: ErrandError) -> ErrandError:
    return ErrandError(f"The records cannot be opened: {error}. Start the agent again.")
