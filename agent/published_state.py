"""Where the schedules of Algorithm 1 are after some rounds of a job: one for each parameter of the model.

Each parameter's remainder follows from its own draws (:mod:`dpagent.privacy.mechanisms.published`), so the
device keeps them from round to round, in a file beside its books. Two rounds are kept, so that one whose
update was lost begins again where it began. A round that the device sits out is kept as well, and uses up
nothing: the file has as many rounds whoever takes part, and what is read and written tells nobody who does.

Nothing here fails once a round is charged: a file that is damaged, or a disk that is full, costs the
schedules alone.
"""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import StorageError, said
from dpagent.privacy.mechanisms.published import PublishedCap, PublishedState
from dpagent.protocol.messages import Plan
from dpagent.storage import disk_errors, write_atomically

log = logging.getLogger(__name__)

_Remainders = dict[int, NDArray[np.float64]]

_KEPT: Final = 2


def try_in_memory(plan: Plan, state: PublishedState) -> None:
    """Make what a file holds, and read it, as after the charge: that takes memory and time.

    Args:
        plan: of the round.
        state: of as many parameters.

    Raises:
        MemoryError: there is none.
    """
    rounds = {plan.round - number: state.remainder for number in range(1, _KEPT + 1)}
    read = _unpacked(_packed(plan.job, rounds), plan.job, len(state.remainder))
    _packed(plan.job, read | {plan.round: state.remainder})


class PublishedStateFile:
    """The states of the job that runs.

    Args:
        state_dir: the device's.
    """

    def __init__(self, state_dir: Path) -> None:
        self._file = state_dir / "published.npz"

    def before(self, plan: Plan, cap: PublishedCap) -> PublishedState:
        """The state that a round begins with; that before the first one where none is kept.

        Rounds that the device missed leave their budget to those that follow, as the paper's restart does.
        """
        dimension = plan.model.parameters
        rounds = self._rounds(plan.job, dimension)
        if not (earlier := [number for number in rounds if number < plan.round]):
            return PublishedState(plan.round - 1, cap.start(dimension).remainder)
        return PublishedState(plan.round - 1, rounds[max(earlier)])

    def save(self, plan: Plan, state: PublishedState) -> None:
        """Keep the state after a round, which is that before it where the device has sat it out.

        A disk that fails costs the schedule alone.
        """
        rounds = self._rounds(plan.job, plan.model.parameters) | {plan.round: state.remainder}
        try:
            write_atomically(self._file, _packed(plan.job, rounds), mode=0o600)
        except (StorageError, MemoryError) as error:
            log.warning("the schedules of the published cap begin anew: %s", said(error))

    def _rounds(self, job: bytes, dimension: int) -> _Remainders:
        """The remainders after each kept round of a job."""
        try:
            with disk_errors(self._file):
                data = self._file.read_bytes() if self._file.exists() else None
            return {} if data is None else _unpacked(data, job, dimension)
        except Exception as error:  # noqa: BLE001 - an archive that is damaged fails in many ways
            log.warning("the schedules of the published cap begin anew: %s", said(error))
            return {}


def _packed(job: bytes, rounds: _Remainders) -> bytes:
    newest, stream = sorted(rounds)[-_KEPT:], io.BytesIO()
    np.savez(
        stream,
        job=np.frombuffer(job, np.uint8),
        rounds=np.array(newest),
        remainders=np.array([rounds[number] for number in newest]),
    )
    return stream.getvalue()


def _unpacked(data: bytes, job: bytes, dimension: int) -> _Remainders:
    with np.load(io.BytesIO(data), allow_pickle=False) as kept:
        if kept["job"].tobytes() != job:
            return {}
        rounds = dict(zip(kept["rounds"].tolist(), kept["remainders"], strict=True))
    return {number: each for number, each in rounds.items() if each.shape == (dimension,)}
