"""The publisher: spooled fragments leave at random times in the jitter window, at a bounded rate.

It only decides when a fragment leaves: fragments are on disk before, and only a receipt removes them.

**The grid.** Slots begin, and jitter windows open, only at points of a grid that is the device's own: its
epoch is drawn at random when the program starts, its period comes from ``agent.yaml``. A round's slot begins
at the next point after its charge, and its window opens a whole number of compute slots later. So when a
message came, how long admission and training took and how large the lot was show in no time of publication,
as long as training fits three quarters of its slot.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Final, TypeAlias

from agent.state import AgentState
from dpagent import faults
from dpagent.clock import Clock
from dpagent.faults import FaultPoint
from dpagent.protocol.dummies import as_sent
from dpagent.protocol.messages import Plan
from dpagent.protocol.sealing import seal_encoded
from dpagent.transport.session import MqttSession

_RESEND_S: Final = 5.0
"""A fragment without a receipt is resent after this time, multiplied by a random factor of 1 to 2."""
_SLOT_MARGIN: Final = 0.25
"""Publication skips a slot that opens within this fraction of a slot."""
_ON_THE_GRID: Final = 1e-6
"""A time this close to a point of the grid, in periods, is that point, but for rounding."""
_BURST: Final = 10
_LEAST_WAIT_S: Final = 0.001


Seal: TypeAlias = Callable[[bytes, Plan], bytes]


def sealed_for(fragment: bytes, plan: Plan) -> bytes:
    """A spooled fragment, sealed to the coordinator that made the plan; anew each time."""
    return seal_encoded(as_sent(fragment, plan.wire), plan.fleet, plan.sealing_key)


class Publisher:
    """Publishes the pending fragments of the spool.

    Args:
        state: the agent's, with the spool.
        session: to publish by.
        topic: of fragments.
        messages_per_second: most publications, resends included.
        period_s: of the device's grid.
        clock: the program's.
        seal: seals an encoded fragment for the coordinator of a plan.
    """

    def __init__(
        self,
        state: AgentState,
        session: MqttSession,
        topic: str,
        *,
        messages_per_second: float,
        period_s: float,
        clock: Clock,
        seal: Seal = sealed_for,
    ) -> None:
        self._state, self._session, self._topic, self._clock = state, session, topic, clock
        self._seal = seal
        self._random = random.SystemRandom()
        self._rate = messages_per_second
        self._allowance = float(_BURST)
        self._allowance_at = clock.monotonic()
        self._period_s = period_s
        self._epoch = clock.monotonic() - self._random.uniform(0.0, period_s)
        self._window: tuple[Plan, float] | None = None

    def grid_time(self, earliest: float) -> float:
        """The first point of the grid at ``earliest`` (monotonic seconds) or later."""
        points = (earliest - self._epoch) / self._period_s
        return self._epoch + math.ceil(points - _ON_THE_GRID) * self._period_s

    def slot_s(self, plan: Plan) -> float:
        """A round's compute slot, as a whole number of the grid's periods."""
        return math.ceil(plan.compute_slot_s / self._period_s) * self._period_s

    def open_window(self, plan: Plan, begins_at: float) -> None:
        """Publish in the jitter windows of this round from now on.

        Args:
            plan: the round's.
            begins_at: the point of the grid (monotonic seconds) at which work on it begins.
        """
        self._window = plan, begins_at

    def close_window(self) -> None:
        """Publish nothing until another window is opened."""
        self._window = None

    def draw_times(self) -> None:
        """Give every pending fragment a new random time, after spooling and after an interruption."""
        if self._window is not None:
            pending = self._state.spool.pending()
            times = self._times(*self._window, count=len(pending))
            self._state.reschedule(zip(times, pending, strict=True))

    def publish_due(self) -> None:
        """Publish due fragments, as far as the session and the rate allow."""
        if not self._session.has_room or self._window is None:
            return
        self._refill()
        now = self._clock.monotonic()
        resend_at: dict[bytes, float] = {}
        for fragment in self._state.spool.due(now, int(self._allowance)):
            # The session would send the excess later, in a burst.
            if not self._session.has_room:
                break
            sealed = self._seal(fragment.message, self._window[0])
            faults.reached(FaultPoint.AGENT_SEALED)
            if self._session.publish(self._topic, sealed) is None:
                break
            faults.reached(FaultPoint.AGENT_PUBLISHED)
            self._allowance -= 1
            resend_at[fragment.digest] = now + _RESEND_S * self._random.uniform(1.0, 2.0)
        if resend_at:
            self._state.mark_sent(resend_at, self._clock.unix())

    def due_in_s(self) -> float:
        """Seconds until something may be published; infinite without a window, a pending fragment or room."""
        if self._window is None or not self._session.has_room:
            return math.inf  # A plan, a connection and a PUBACK are events of their own.
        due_at = self._state.spool.next_due_at()
        if due_at is None:
            return math.inf
        until_allowed_s = (1.0 - self._allowance) / self._rate
        return max(due_at - self._clock.monotonic(), until_allowed_s, _LEAST_WAIT_S)

    def _times(self, plan: Plan, begins_at: float, *, count: int) -> list[float]:
        """Independent monotonic times in the jitter window, which opens whole slots after the work began.

        The margin skips a window that is about to open: the remaining work before publication must not show
        either.
        """
        slot_s = self.slot_s(plan)
        slots = max(0, math.floor((self._clock.monotonic() - begins_at) / slot_s + _SLOT_MARGIN)) + 1
        opens_at = begins_at + slots * slot_s
        return [opens_at + self._random.uniform(0.0, plan.jitter_window_s) for _ in range(count)]

    def _refill(self) -> None:
        """Let the rate limit's allowance grow with time (a token bucket)."""
        now = self._clock.monotonic()
        self._allowance = min(float(_BURST), self._allowance + self._rate * (now - self._allowance_at))
        self._allowance_at = now
