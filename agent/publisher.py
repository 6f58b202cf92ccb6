"""The publisher: spooled fragments leave at random times in the jitter window, at a bounded rate.

It only decides when a fragment leaves: fragments are on disk before, and only a receipt removes them.
"""

from __future__ import annotations

import math
import random
from typing import Final

from agent.state import AgentState
from dpagent.clock import Clock
from dpagent.protocol.messages import Plan
from dpagent.transport.session import MqttSession

_RESEND_S: Final = 5.0
"""A fragment without a receipt is resent after this time, multiplied by a random factor of 1 to 2."""
_SLOT_MARGIN: Final = 0.25
"""Publication skips a slot that opens within this fraction of a slot."""
_BURST: Final = 10
_LEAST_WAIT_S: Final = 0.001


class Publisher:
    """Publishes the pending fragments of the spool.

    Args:
        state: the agent's, with the spool.
        session: to publish by.
        topic: of fragments.
        messages_per_second: most publications, resends included.
        clock: the program's.
    """

    def __init__(
        self, state: AgentState, session: MqttSession, topic: str, messages_per_second: float, clock: Clock
    ) -> None:
        self._state, self._session, self._topic, self._clock = state, session, topic, clock
        self._random = random.SystemRandom()
        self._rate = messages_per_second
        self._allowance = float(_BURST)
        self._allowance_at = clock.monotonic()
        self._window: tuple[Plan, float] | None = None

    def open_window(self, plan: Plan, arrived_at: float) -> None:
        """Publish in the jitter windows of this round from now on.

        Args:
            plan: the round's.
            arrived_at: monotonic time of its arrival.
        """
        self._window = plan, arrived_at

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
            if self._session.publish(self._topic, fragment.message) is None:
                break
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

    def _times(self, plan: Plan, arrived_at: float, *, count: int) -> list[float]:
        """Independent monotonic times in the jitter window, which opens whole slots after the plan's arrival.

        The training time depends on the lot, and the lot is private; as long as training fits
        the first slot, the times do not reveal it. The margin skips a window that is about to open:
        the remaining work before publication must not show either.
        """
        elapsed = (self._clock.monotonic() - arrived_at) / plan.compute_slot_s
        slots = math.floor(elapsed + _SLOT_MARGIN) + 1
        opens_at = arrived_at + slots * plan.compute_slot_s
        return [opens_at + self._random.uniform(0.0, plan.jitter_window_s) for _ in range(count)]

    def _refill(self) -> None:
        """Let the rate limit's allowance grow with time (a token bucket)."""
        now = self._clock.monotonic()
        self._allowance = min(float(_BURST), self._allowance + self._rate * (now - self._allowance_at))
        self._allowance_at = now
