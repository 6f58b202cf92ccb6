"""What the agent has written to the disk today, which memory cards and eMMC bear only so much of.

The kernel counts it (``write_bytes`` of ``/proc/thread-self/io``, proc(5)) for the thread that keeps the
state: ledger, rounds, spool and notes, none of whose sizes depends on a record. What training and decoding
write does depend on records, and so may whether a model's file has room; another thread writes that. None of
it may count: the count of the whole process, ``/proc/self/io``, takes in those of its children when they end
(``wait_task_zombie`` of the kernel's exit.c); that of a thread does not.

The day is that of UTC. The count is kept with the others in the database, when they are written anyway, so
that a restart begins no new day.
"""

from __future__ import annotations

from typing import Final

from agent.sensors import Sensors
from agent.state import AgentState
from dpagent.clock import Clock

_DAY_S: Final = 86_400


class DiskWrites:
    """The count of the thread that uses it.

    Args:
        sensors: of the board.
        state: where the count is kept.
        clock: the program's.
    """

    def __init__(self, sensors: Sensors, state: AgentState, clock: Clock) -> None:
        self._sensors, self._state, self._clock = sensors, state, clock
        self._day = self._today()
        self._kept = state.written_on(self._day)
        self._counted_from = sensors.written_bytes()

    def _today(self) -> int:
        return int(self._clock.unix() // _DAY_S)

    def today(self) -> int | None:
        """Bytes written today; None where the kernel does not say."""
        written, day = self._sensors.written_bytes(), self._today()
        if written is None or self._counted_from is None:
            return None
        if day != self._day:
            self._day, self._kept, self._counted_from = day, 0, written
        return self._kept + max(0, written - self._counted_from)

    def keep(self) -> None:
        """Note the count for the next start."""
        if (written := self.today()) is not None:
            self._state.keep_written(self._day, written)
