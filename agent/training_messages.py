"""What the agent and its training process say to each other, and the errors that an answer may raise.

Both programs know these messages, and neither has to know the other's work: so the training process
(:mod:`agent.worker_program`) has in memory what training needs, and no ledger, seal or connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from agent.look_messages import LookResult
from agent.training_settings import TrainingSettings
from dpagent.errors import DpagentError
from dpagent.protocol.messages import Fragment, Plan

MORE_NICENESS: Final = 5
"""Training gives way to the agent by so much, where both want the same core."""


class WorkerError(DpagentError):
    """The training process cannot do what it was asked, or has ended; the text gives the reason.

    Attributes:
        spent_s: processor time that it has spent on it, with its forks, in seconds. Of a preparation: public.
    """

    def __init__(self, reason: str, spent_s: float = 0.0) -> None:
        super().__init__(reason)
        self.spent_s = spent_s


class UsedProcessError(WorkerError):
    """The round is to be prepared in a training process that has not worked yet: an engine is to be tried,
    and what memory and time that takes must not depend on what the records have left in this one."""


@dataclass(frozen=True, slots=True)
class Order:
    """A round that is to be prepared.

    Attributes:
        plan: the round's.
        weights: of the global model, as they came.
        assets: by role.
        failure: why the update shall be noise alone; None: it shall not.
        is_rehearsal: whether the device sits the round out: all is done as for an update, without a record.
        adopts: whether what a look at the data found counts from this round on. Public.
    """

    plan: Plan
    weights: bytes
    assets: Mapping[str, bytes]
    failure: str | None = None
    is_rehearsal: bool = False
    adopts: bool = False


class Prepared(NamedTuple):
    """A round that the board can run.

    Attributes:
        longest_s: the time that training takes with the largest lot, by a trial with made-up records. Public.
        took_s: processor time of the preparation, and of the process's start where it is its first. Public.
        tried_s: processor time of forks that have tried engines for it. Public.
    """

    longest_s: float
    took_s: float = 0.0
    tried_s: float = 0.0


class Update(NamedTuple):
    """A device's part in a round, of which all but ``failure`` may leave.

    Attributes:
        fragments: of the noisy sum, one for each block of it.
        failure: why it is noise alone, or None. Only for the owner of the device.
    """

    fragments: tuple[Fragment, ...]
    failure: str | None


@dataclass(frozen=True, slots=True)
class Reading:
    """The question for the update of the round that was prepared last: records are read from here on.

    Attributes:
        found: of a look at the data, where what it found counts from this round on. Private.
    """

    found: LookResult | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to the program.

    Attributes:
        settings: of training on this board.
        log_level: below which nothing is worth sending.
    """

    settings: TrainingSettings
    log_level: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer of a part that failed, with the reason.

    Attributes:
        reason: in words.
        is_of_use: whether only this process's past is against it.
        spent_s: as of :class:`WorkerError`.
    """

    reason: str
    is_of_use: bool = False
    spent_s: float = 0.0

    def error(self) -> WorkerError:
        """What the one who asked is to see."""
        return (UsedProcessError if self.is_of_use else WorkerError)(self.reason, self.spent_s)
