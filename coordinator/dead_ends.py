"""Rounds that will not close, since too many members have declined them: why, and what becomes of the job.

With tokens a board decides on a round once, and at the same time on those ahead whose keys are announced. The
reasons that it may have (its budget, its owner's limits, what it lacks) outlast a round. So the job is paused
rather than led into the next round, for which those boards would be charged in vain that do take part
(docs/decisions/2026-11-26-rounds-that-cannot-close.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from coordinator.participation import dead_end
from dpagent.errors import PlanError
from dpagent.wording import counted


class Members(Protocol):
    """What is known of the members and a round."""

    def members(self) -> int:
        """How many devices may take part in a round."""
        ...

    def expected(self, number: int) -> int:
        """How many of them may send for one."""
        ...

    def gone(self, number: int, since: float) -> int:
        """How many devices have tokens of a round, and have been members no more since a time (Unix)."""
        ...


@dataclass(frozen=True, slots=True)
class Halt:
    """Why the coordinator pauses a job by itself, and which rounds it does not open after that."""

    trouble: str
    passed_over: range
    """Their numbers: no device is told of them, and none is charged for them."""


class DeadEnds:
    """The dead ends of one job.

    Args:
        tokens: of members; None where fragments carry none, so that nothing is known.
        job: its name.
        rounds: that it has.
        minimum: devices that a round needs.
        first_round: the first that steps the model; those before it are needed by all others.

    Attributes:
        minimum: as above; its operator may change it.
    """

    def __init__(
        self, tokens: Members | None, job: str, *, rounds: int, minimum: int, first_round: int
    ) -> None:
        self._tokens, self._job = tokens, job
        self._rounds, self.minimum, self._first_round = rounds, minimum, first_round

    def why(self, number: int, gone: int = 0) -> str | None:
        """Why a round will not close, if that is known.

        Args:
            number: of the round.
            gone: devices that are members no more, and of which fragments may count in each block of it.
        """
        if self._tokens is None:
            return None
        may_send = self._tokens.expected(number)
        return dead_end(number, self._tokens.members(), may_send, self.minimum, gone=gone)

    def why_few(self) -> str:
        """What an operator may do for a round that lacks fragments, and whose end is not known."""
        if self._tokens is not None and (members := self._tokens.members()) < self.minimum:
            why = f"The fleet has {counted(members, 'member')}: `dpagent coordinator invite` lets boards in"
        else:
            why = (
                "Devices may be offline or may have declined: `dpagent budget show` on a board gives the "
                "reason"
            )
        return (
            f"{why}. Without them, `dpagent coordinator job minimum {self._job} BOARDS` lets it close with "
            f"fewer, and `dpagent coordinator job pause {self._job} --give-up` gives it up"
        )

    def halt(self, number: int, *, is_open: bool, gone: int = 0) -> Halt:
        """What becomes of the job at a round that will not close.

        Args:
            number: of the round.
            is_open: whether it is open, at its deadline; otherwise it would be the next.
            gone: as of :meth:`why`.

        Raises:
            PlanError: No later round can do without it.
        """
        why = self.why(number, gone)
        if number < self._first_round:
            raise PlanError(f"{why} All others need what it finds, so the job cannot go on.")
        begin = number + 1 if is_open else number
        end = number + 1
        while end <= self._rounds and self.why(end) is not None:
            end += 1
        what = (
            "At its deadline it was given up: boards that were charged for it stay so, others pay nothing."
            if is_open
            else "It was not opened, so nobody pays for it."
        )
        if ahead := end - number - 1:
            what += (
                f" Boards decide ahead, so the same holds for the next {counted(ahead, 'round')}, which will "
                "not be opened."
            )
        then = f"opens round {end}" if end <= self._rounds else "ends the job"
        return Halt(
            f"{why} {what} `dpagent budget show` on a board says why it declined. Once that is mended, "
            f"`dpagent coordinator job resume {self._job}` {then}.",
            range(begin, end),
        )
