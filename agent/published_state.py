"""Where the schedules of Algorithm 1 are after some rounds of a job: one for each parameter of the model.

Each parameter's remainder follows from its own draws (:mod:`dpagent.privacy.mechanisms.published`), so the
device keeps them from round to round, in a file beside its books. Two rounds are kept, so that one whose
update was lost begins again where it began.
"""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Final

import numpy as np

from dpagent.errors import StorageError
from dpagent.privacy.mechanisms.published import PublishedCap, PublishedState
from dpagent.protocol.messages import Plan
from dpagent.storage import disk_errors, write_atomically

log = logging.getLogger(__name__)

_KEPT: Final = 2


def get_ready() -> None:
    """Load what reads and writes such a file. Before the charge: it takes memory."""
    stream = io.BytesIO()
    np.savez(stream, rounds=np.zeros(0))
    stream.seek(0)
    with np.load(stream) as kept:
        kept["rounds"]


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
        """Keep the state after a round. A disk that fails costs the schedule alone."""
        rounds = self._rounds(plan.job, plan.model.parameters) | {plan.round: state.remainder}
        newest, stream = sorted(rounds)[-_KEPT:], io.BytesIO()
        np.savez(
            stream,
            job=np.frombuffer(plan.job, np.uint8),
            rounds=np.array(newest),
            remainders=np.array([rounds[number] for number in newest]),
        )
        try:
            write_atomically(self._file, stream.getvalue(), mode=0o600)
        except StorageError as error:
            log.warning("the schedules of the published cap begin anew: %s", error)

    def _rounds(self, job: bytes, dimension: int) -> dict[int, np.ndarray]:
        """The remainders after each kept round of a job."""
        try:
            with disk_errors(self._file):
                data = self._file.read_bytes() if self._file.exists() else None
            if data is None:
                return {}
            with np.load(io.BytesIO(data), allow_pickle=False) as kept:
                if kept["job"].tobytes() != job:
                    return {}
                rounds = dict(zip(kept["rounds"].tolist(), kept["remainders"], strict=True))
        except (StorageError, ValueError, KeyError, OSError, EOFError) as error:
            log.warning("the schedules of the published cap begin anew: %s", error)
            return {}
        return {number: kept for number, kept in rounds.items() if kept.shape == (dimension,)}
