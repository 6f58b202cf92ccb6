"""The device's records when the agent starts: another process opens them, and tells their form.

It decodes what has never been decoded, and takes the room of features (:mod:`agent.opening_program`). The
agent itself never opens them: what it has in memory does not depend on how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.data_form import DataForm
from agent.data_settings import DataSettings
from agent.errand import Errand, ErrandError
from dpagent.errors import DataError

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
    """Starts the process, which gets ready while the agent looks at its ledger, and asks it once.

    Raises:
        DataError: it cannot be started.
    """

    def __init__(self) -> None:
        try:
            self._errand = Errand(_PROGRAM)
        except ErrandError as error:
            raise _not_opened(error) from error

    def form(self, settings: DataSettings, state_dir: Path) -> DataForm:
        """Have the records opened, however long that takes, and what goes with them prepared.

        Args:
            settings: of the data, declared.
            state_dir: the agent's, which it has for itself.

        Raises:
            ConfigurationError: something is not declared.
            DataError: the records cannot be opened, or there are too many.
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


def _not_opened(error: ErrandError) -> DataError:
    return DataError(f"The records cannot be opened: {error}. Start the agent again.")
