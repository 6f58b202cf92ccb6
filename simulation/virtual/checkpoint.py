"""Where a run of a virtual fleet is: its job, and its model and results after each round, in one file.

It is replaced atomically at the end of each round, so whatever ends the program costs the open round alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

import cbor2

from coordinator.job import Job
from coordinator.model_state import ModelState
from dpagent.errors import ConfigurationError
from dpagent.storage import disk_errors, write_atomically
from dpagent.wording import named

_FILE: Final = "checkpoint.cbor"


@dataclass(frozen=True, slots=True)
class RoundDone:
    """The result of a round.

    Attributes:
        accuracy: of the model after it, 0 to 1; None where it was not measured.
        clamped, kept, out_of_range, clip_norm: as of ``coordinator.store.RoundResult``.
        noise_multiplier: of the round.
        epsilon: that the job has spent after it.
        seconds: that it took.
        counted, rejected: fragments.
        least_counted: of the block with the fewest.
        bytes_up, bytes_down: of a device.
    """

    accuracy: float | None
    clamped: int
    kept: float
    out_of_range: tuple[str, ...]
    clip_norm: float | None
    noise_multiplier: float
    epsilon: float
    seconds: float
    counted: int
    rejected: int
    least_counted: int
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a run.

    Attributes:
        job: with its noise.
        model: after the last round.
        rounds: that are done, in order.
        baseline_model: of the run without noise; None before it.
        baseline: accuracy of it after each round.
        is_over: whether no further round follows.
        seconds: that all starts of the run took together.
    """

    job: Job
    model: ModelState
    rounds: tuple[RoundDone, ...] = ()
    baseline_model: ModelState | None = None
    baseline: tuple[float | None, ...] = ()
    is_over: bool = False
    seconds: float = 0.0

    def save(self, directory: Path) -> None:
        """Keep it.

        Raises:
            StorageError: The disk is full, or cannot be written.
        """
        values = {
            "job": self.job.stored(),
            "model": self.model.stored(),
            "rounds": [asdict(each) for each in self.rounds],
            "baseline_model": self.baseline_model and self.baseline_model.stored(),
            "baseline": list(self.baseline),
            "is_over": self.is_over,
            "seconds": self.seconds,
        }
        write_atomically(directory / _FILE, cbor2.dumps(values), mode=0o600)

    @classmethod
    def load(cls, directory: Path) -> Self | None:
        """The one in a directory, or None.

        Raises:
            ConfigurationError: It is damaged.
            StorageError: It cannot be read.
        """
        file = directory / _FILE
        with disk_errors(file):
            if not file.exists():
                return None
            data = file.read_bytes()
        try:
            values = cbor2.loads(data)
            rounds = tuple(
                RoundDone(**{**each, "out_of_range": tuple(each["out_of_range"])})
                for each in values["rounds"]
            )
            baseline_model = values["baseline_model"]
            return cls(
                Job.read(*values["job"]),
                ModelState.read(*values["model"]),
                rounds,
                baseline_model and ModelState.read(*baseline_model),
                tuple(values["baseline"]),
                values["is_over"],
                values["seconds"],
            )
        except (ValueError, TypeError, KeyError, cbor2.CBORDecodeError) as error:
            raise ConfigurationError(
                f"{file} is damaged, or of another version. Give another {named('state_dir')}."
            ) from error
