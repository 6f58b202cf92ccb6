"""The publisher: spooled fragments leave at random times in the jitter window, at a bounded rate.

It only decides when a fragment leaves: fragments are on disk before, and only a receipt removes them.

**The grid.** Slots begin, and jitter windows open, only at points of a grid that is the device's own: its
epoch is drawn at random when the program starts, its period comes from ``agent.yaml``. A round's slot begins
at the next point once it is prepared, and its window opens a whole number of compute slots later. So when a
message came, how long admission and training took and how large the lot was show in no time of publication,
as long as training fits its slots, of which the last quarter stays free. How many those are follows from a
trial before the charge (:mod:`agent.effort`). The update is taken at the beginning of that quarter, and must
be spooled in the first half of it. Whoever announces a plan again changes nothing of that, and what gets
another time after an interruption gets none on the grid.

**Receipts on topics of their own.** Where the plan wants them, a fragment leaves right after a subscription
to the topic of its receipt. It ends when the fragment would be due again without one, and goes on without a
break if it leaves again: the coordinator learns from a broker of MQTT 5 whether anybody hears a topic, and so
when nobody does any more. That time is drawn for this fragment alone. Had the subscription ended with the
receipt, it would tell how long the way to the board is; with the next publication, or with the round, it
would tell which fragments are one board's (``docs/decisions/2026-11-26-receipts-of-ones-own.md``).
"""

from __future__ import annotations

import math
import random
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, NamedTuple

from agent.departures import AHEAD, Departures, Seal, sealed_for
from agent.state import AgentState
from dpagent.clock import Clock
from dpagent.protocol.messages import Plan
from dpagent.protocol.topics import Topics
from dpagent.transport.session import MqttSession

_SLOT_MARGIN: Final = 0.25
"""Training leaves this fraction of its last slot free."""
_SKIPPED: Final = _SLOT_MARGIN / 2
"""Publication skips a slot that opens within this fraction of a slot."""
_ON_THE_GRID: Final = 1e-6
"""A time this close to a point of the grid, in periods, is that point, but for rounding."""
_TO_DECIDE: Final = 0.25
_LEAST_WAIT_S: Final = 0.001


class Slots(NamedTuple):
    """The time that training has: from a point of the device's grid (monotonic), so many compute slots.

    Attributes:
        begins_at: the point of the grid.
        number: of slots, at least 1.
        sought_from: the point is the first one at this time (monotonic) or later. Unlike the point, it tells
            nothing of the grid.
    """

    begins_at: float
    number: int
    sought_from: float


@dataclass(frozen=True, slots=True)
class _Window:
    """A round whose fragments may leave; see :meth:`Publisher.open_window`."""

    plan: Plan
    begins_at: float
    slots: int

    @property
    def job(self) -> str:
        """In hexadecimal."""
        return self.plan.job.hex()

    @property
    def round(self) -> int:
        """Its number."""
        return self.plan.round


class Publisher:
    """Publishes the pending fragments of the spool.

    Args:
        state: the agent's, with the spool.
        session: to publish by.
        topics: of the fleet.
        messages_per_second: most fragments on average, resends included.
        period_s: of the device's grid.
        clock: the program's.
        seal: seals an encoded fragment for the coordinator of a plan.
    """

    def __init__(
        self,
        state: AgentState,
        session: MqttSession,
        topics: Topics,
        *,
        messages_per_second: float,
        period_s: float,
        clock: Clock,
        seal: Seal = sealed_for,
    ) -> None:
        self._state, self._session, self._clock = state, session, clock
        self._departures = Departures(
            session, topics, messages_per_second=messages_per_second, clock=clock, seal=seal
        )
        self._random = random.SystemRandom()
        self.period_s = period_s
        self._epoch = clock.monotonic() - self._random.uniform(0.0, period_s)
        self._window: _Window | None = None
        self._jitter_ends_at = -math.inf
        """Of the times that were drawn last."""
        self._probed_until = -math.inf
        """When it is over that a mixer is sent fragments of the open round, on any grid: no probe is sent to
        it again before, nor at a time that would tell the grid (monotonic)."""
        self._opened = "", 0, -math.inf
        """The last round whose slots began, or that got its times when it was spooled, and when its window
        opens (monotonic)."""
        self._is_held = False
        """Whether the connection was lost, and :meth:`go_on` not called since."""

    def running(self) -> AbstractContextManager[None]:
        """Publish at the times that were drawn, also while this thread does something else."""
        return self._departures.running()

    def grid_time(self, earliest: float) -> float:
        """The first point of the grid at ``earliest`` (monotonic seconds) or later."""
        points = (earliest - self._epoch) / self.period_s
        return self._epoch + math.ceil(points - _ON_THE_GRID) * self.period_s

    def slots(self, decided_from: float, number: int = 1, *, prepared_at: float = -math.inf) -> Slots:
        """The slots of a round: they begin on the grid, a quarter of a period later or more, so that the time
        of a decision that takes less than that does not show.

        Args:
            decided_from: when the decision on the round began (monotonic seconds).
            number: of slots.
            prepared_at: they begin no earlier (likewise).
        """
        sought_from = max(decided_from + _TO_DECIDE * self.period_s, prepared_at)
        return Slots(self.grid_time(sought_from), number, sought_from)

    def end_of(self, plan: Plan, slots: Slots) -> float:
        """When the slots of a round are over (monotonic seconds)."""
        return slots.begins_at + slots.number * self.slot_s(plan)

    def end_on_any_grid(self, plan: Plan, slots: Slots) -> float:
        """The first time (monotonic seconds) by which the slots of a round are over, whatever the grid is."""
        return slots.sought_from + self.period_s + slots.number * self.slot_s(plan)

    def slot_s(self, plan: Plan) -> float:
        """A round's compute slot, as a whole number of the grid's periods."""
        return math.ceil(plan.compute_slot_s / self.period_s) * self.period_s

    def slots_for(self, plan: Plan, seconds: float) -> int:
        """How many slots training takes, at least 1, if it takes so many seconds."""
        return max(1, math.ceil(seconds / self.slot_s(plan) + _SLOT_MARGIN))

    def training_ends_at(self, plan: Plan, slots: Slots) -> float:
        """When training has to be over that has these slots (monotonic seconds)."""
        return slots.begins_at + (slots.number - _SLOT_MARGIN) * self.slot_s(plan)

    def open_window(self, plan: Plan, begins_at: float, slots: Slots | None = None) -> None:
        """Publish in the jitter windows of this round from now on, and nothing of another.

        Args:
            plan: the round's.
            begins_at: the point of the grid (monotonic seconds) at which its first slot begins.
            slots: that its training takes, once that is known: nothing of it leaves before they are over.
        """
        self._departures.clear()
        before, number = self._window, 1 if slots is None else slots.number
        self._window = window = _Window(plan, begins_at, number)
        if before is None or (before.job, before.round) != (window.job, window.round):
            self._probed_until = -math.inf
        if slots is not None:
            self._opened = window.job, window.round, begins_at + number * self.slot_s(plan)
            self._probe_until(self.end_on_any_grid(plan, slots))

    def _probe_until(self, opens_at: float) -> None:
        """The jitter window of the open round opens then, at the latest, on any grid."""
        assert self._window is not None
        over_at = opens_at + self._window.plan.jitter_window_s
        self._probed_until = max(self._probed_until, over_at)

    def close_window(self) -> None:
        """Publish nothing until another window is opened."""
        self._departures.clear()
        self._window = None

    def hold(self) -> None:
        """Publish nothing until :meth:`go_on`: the connection was lost, and by the next one all that were due
        meanwhile would leave at once."""
        self._departures.clear()
        self._is_held = True

    def go_on(self) -> None:
        """There is a connection: publish, at times that are drawn anew."""
        self._is_held = False
        self.draw_times_again()

    def draw_probe_times(self, decided_from: float) -> None:
        """Give every probe of the open round a new random time, once it is made and after an interruption.

        It is that of a fragment whose training takes one slot, on a grid that is drawn for it alone: so it
        tells nothing of the device's grid, nor of its training.

        Args:
            decided_from: when the decision on the round began, or would have on any grid (monotonic seconds).
        """
        if self._window is not None:
            plan = self._window.plan
            earliest = decided_from + _TO_DECIDE * self.period_s + self.slot_s(plan)
            self._probe_until(earliest + self.period_s)
            self._state.probes.draw_times(
                {
                    digest: earliest
                    + self._random.uniform(0.0, self.period_s)
                    + self._random.uniform(0.0, plan.jitter_window_s)
                    for digest in self._state.probes.pending(plan.job.hex(), plan.round)
                }
            )

    def draw_times(self) -> None:
        """Give every pending fragment of the open round a random time, once it is spooled: in the jitter
        window, which opens on the grid. Those of other rounds wait until theirs is open again."""
        if (window := self._window) is not None:
            slot_s = self.slot_s(window.plan)
            # A window that is about to open is let pass: the remaining work must not show either.
            passed = math.floor((self._clock.monotonic() - window.begins_at) / slot_s + _SKIPPED)
            opens_at = window.begins_at + max(window.slots, passed + 1) * slot_s
            self._opened = window.job, window.round, opens_at
            self._draw(window, opens_at)

    def draw_times_again(self) -> None:
        """The same after an interruption: the jitter window is open from now on, unless it was to open later.

        Not on the grid: who announces a plan again and again would have fragments leave right after points of
        it alone, and know those of one device, of all rounds, by where these are.
        """
        if (window := self._window) is not None:
            job, number, opens_at = self._opened
            is_known = (job, number) == (window.job, window.round)
            now = self._clock.monotonic()
            self._draw(window, max(now, opens_at) if is_known else now)

    def _draw(self, window: _Window, opens_at: float) -> None:
        self._departures.clear()
        self._note_left()  # Before other times are drawn for what has left, or that would undo them.
        self._jitter_ends_at = opens_at + window.plan.jitter_window_s
        self._state.reschedule(
            (
                self._random.uniform(opens_at, self._jitter_ends_at)
                if of == (window.job, window.round)
                else None,
                digest,
            )
            for digest, of in self._state.spool.pending().items()
        )

    def is_open_for(self, plan: Plan) -> bool:
        """Whether the window of this very plan is open, its deadline aside."""
        window = self._window
        return window is not None and plan == window.plan.with_values({"deadline": plan.deadline})

    def publish_due(self) -> None:
        """Publish due probes and fragments, as far as the session and the rate allow; note those that have
        left, and prepare the next ones."""
        self._note_left()
        window = self._window
        if window is not None and not self._is_held:
            state = self._state
            self._departures.prepare(
                window.plan,
                state.probes.due(math.inf, AHEAD),
                state.spool.next_ones(self._clock.monotonic(), AHEAD, self._departures.prepared),
                message=lambda digest: state.probes.message(digest) or state.spool.message(digest),
                again_from=(self._probed_until, self._jitter_ends_at),
            )
        self._departures.leave()
        self._note_left()

    def _note_left(self) -> None:
        probes, fragments = self._departures.take_left()
        self._state.probes.mark_sent(probes)
        if fragments:
            self._state.mark_sent(fragments, self._clock.unix())

    def due_in_s(self) -> float:
        """Seconds until something may be published, or a subscription ends; otherwise infinite."""
        now = self._clock.monotonic()
        wait_s = self._departures.next_end_at - now
        if self._window is None or self._is_held or not self._session.has_room:
            return max(wait_s, _LEAST_WAIT_S)  # A plan, a connection and a PUBACK are events of their own.
        if (due_at := self._state.probes.next_due_at()) is not None:
            wait_s = min(wait_s, due_at - now)
        if (due_at := self._state.spool.next_due_at()) is not None:
            wait_s = min(wait_s, self._departures.turn_of(due_at) - now)
        return max(wait_s, _LEAST_WAIT_S)
