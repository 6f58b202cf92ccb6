"""Departures: messages leave at their times, whatever the rest of the agent is at.

The agent's thread stands still now and then: while it prices a plan, hashes a model that has come, waits for
the disk, or reads what the coordinator sends in a flood. If publications waited for it, all that are due by
then would leave together at its end, and the coordinator would know them for one board's; likewise the ends
of subscriptions to receipts. So a thread of its own sends what is due. The agent's prepares the next ones
ahead of their times, from the spool, and notes later which have left.

**The rate.** What waits for its turn must not leave at equal distances, or each board's would have a beat of
its own, by which the coordinator would know all of them. So when one is due and the one before it has left,
the next is held for a time that is drawn from an exponential distribution: a queue of the kind M/M/1.
While it is full, a board's fragments are a Poisson process, and those of several boards together are one, of
which no time tells whose a fragment is; while it is not, they leave as they came, as a Poisson process too
(Burke, "The Output of a Queuing System", Operations Research 4(6), 1956). Probes, which are known by name,
have a queue of their own: they wait for no fragment, and no fragment waits for them.

**The order.** Which of those that are due leaves is drawn, too. In the order of their times, two fragments of
a board would wait for nearly the same others, and whoever withholds receipts would know them by that: the
time from one copy to the next would be nearly the same for both. Of a Poisson process whose events are dealt
out at random, each fragment's are a Poisson process of its own, independent of all others'.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from typing import Final, TypeAlias

from agent.spool import SpooledFragment
from dpagent import faults
from dpagent.clock import Clock
from dpagent.faults import FaultPoint
from dpagent.protocol.dummies import as_sent
from dpagent.protocol.messages import Plan
from dpagent.protocol.mixing import seal_for
from dpagent.protocol.topics import Topics
from dpagent.transport.session import MqttSession

log = logging.getLogger(__name__)

AHEAD: Final = 256
"""Messages that are prepared: what leaves in half a minute at ten a second, and at most 15 MB."""
_RESEND_S: Final = 5.0
"""A fragment without a receipt is resent after this time, multiplied by a random factor of 1 to 2; through a
mixer, no sooner than so long after the jitter window."""
_BURST: Final = 20
"""Fragments that leave at once where so many could have left before, and the session took none."""
_LOOK_S: Final = 0.1
"""How often the thread looks whether the session takes what is due."""
_LEAST_WAIT_S: Final = 0.001

Seal: TypeAlias = Callable[[bytes, Plan], bytes]


def sealed_for(fragment: bytes, plan: Plan) -> bytes:
    """A spooled fragment, sealed to the coordinator that made the plan, and once more to the mixer that it
    names; anew each time."""
    return seal_for(as_sent(fragment, plan), plan)


def _is_due(fragment: SpooledFragment, now: float) -> bool:
    """Whether its time has come (monotonic seconds)."""
    return fragment.due_at is not None and fragment.due_at <= now


class _Queue:
    """Messages that leave one after the other.

    Args:
        rate: most a second, on average.
        chance: draws how long each is held.

    Attributes:
        again_from: through a mixer, when the time begins after which one is sent again (monotonic).
        waiting: by digest, in the order of their times.
        left: when those are sent again that have left since that was last asked, by digest (monotonic).
    """

    def __init__(self, rate: float, chance: random.Random) -> None:
        self._rate, self._chance = rate, chance
        self._left_at = -math.inf
        self._leaves_at: float | None = None
        self.again_from = -math.inf
        self.waiting: dict[bytes, SpooledFragment] = {}
        self.left: dict[bytes, float] = {}

    def turn_of(self, due_at: float) -> float:
        """When one leaves, of which the first is due at a time (monotonic), as far as that is known."""
        return due_at if self._leaves_at is None else max(due_at, self._leaves_at)

    def next_to_leave(self, now: float) -> SpooledFragment | None:
        """One of those that are due, if it is time for one to leave; each is as likely."""
        due = list(takewhile(lambda each: _is_due(each, now), self.waiting.values()))
        if not due:
            self._leaves_at = None  # Of one that has its receipt by now.
            return None
        if self._leaves_at is None:
            assert due[0].due_at is not None
            begins_at = max(due[0].due_at, self._left_at, now - _BURST / self._rate)
            self._leaves_at = begins_at + self._chance.expovariate(self._rate)
        return self._chance.choice(due) if self._leaves_at <= now else None

    def note_left(self, digest: bytes, again_at: float) -> None:
        """One has left."""
        assert self._leaves_at is not None
        self._left_at, self._leaves_at = self._leaves_at, None
        del self.waiting[digest]
        self.left[digest] = again_at

    def prepare(self, fragments: Iterable[SpooledFragment]) -> None:
        """These leave, and no others any more; see :meth:`Departures.prepare`."""
        # The thread may have sent one since its time was read.
        self.waiting = {each.digest: each for each in fragments if each.digest not in self.left}

    def take_left(self) -> dict[bytes, float]:
        """What has left since the last call."""
        left, self.left = self.left, {}
        return left

    @property
    def first(self) -> SpooledFragment | None:
        """The one whose time comes first."""
        return next(iter(self.waiting.values()), None)


class Departures:
    """Sends prepared messages when they are due, at a bounded rate.

    Args:
        session: to publish by.
        topics: of the fleet.
        messages_per_second: most fragments on average, resends included.
        clock: the program's.
        seal: seals an encoded fragment for the coordinator of a plan.
    """

    def __init__(
        self, session: MqttSession, topics: Topics, *, messages_per_second: float, clock: Clock, seal: Seal
    ) -> None:
        self._session, self._topics, self._clock, self._seal = session, topics, clock, seal
        self._random = random.SystemRandom()
        self._changed = threading.Condition()
        """Held by whichever thread uses what follows."""
        self._plan: Plan | None = None
        self._probes, self._fragments = (_Queue(messages_per_second, self._random) for _ in range(2))
        self._heard_until: dict[str, tuple[float, bytes]] = {}
        """By the topic of a receipt, when its subscription ends (monotonic), and the digest of the fragment:
        if that leaves again, it ends no sooner."""
        self._is_over = False
        self._failure: Exception | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Send what is due in a thread of its own. Without one, :meth:`leave` does it."""
        self._is_over = False
        thread = threading.Thread(target=self._run, name="departures", daemon=True)
        thread.start()
        try:
            yield
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify()
            thread.join()

    def prepare(
        self,
        plan: Plan,
        probes: Mapping[bytes, float],
        fragments: Mapping[bytes, float],
        *,
        message: Callable[[bytes], bytes | None],
        again_from: tuple[float, float],
    ) -> None:
        """These messages leave at their times, and no others any more.

        Args:
            plan: of the round.
            probes, fragments: due times (monotonic seconds) by digest, in order.
            message: of a digest; None if it does not leave any more.
            again_from: where a mixer holds messages back, when the time begins after which a probe is sent
                again, and a fragment (monotonic seconds).
        """
        with self._changed:
            before = self._probes.waiting | self._fragments.waiting

        def read(due_at: Mapping[bytes, float]) -> Iterator[SpooledFragment]:
            for digest, at in due_at.items():
                text = before[digest].message if digest in before else message(digest)
                if text is not None:
                    yield SpooledFragment(digest, text, at)

        # Before the thread has to wait: the disk may take long.
        new_probes, new_fragments = [*read(probes)], [*read(fragments)]
        with self._changed:
            self._plan = plan
            self._probes.again_from, self._fragments.again_from = again_from
            self._probes.prepare(new_probes)
            self._fragments.prepare(new_fragments)
            self._changed.notify()

    def clear(self) -> None:
        """Nothing leaves until more is prepared."""
        with self._changed:
            self._plan = None
            self._probes.waiting, self._fragments.waiting = {}, {}

    def leave(self) -> None:
        """Send what is due, as far as session and rate allow, and end the subscriptions that are over."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._leave()

    def take_left(self) -> tuple[dict[bytes, float], dict[bytes, float]]:
        """Probes and fragments that have left since the last call: when each is sent again, by digest
        (monotonic seconds)."""
        with self._changed:
            return self._probes.take_left(), self._fragments.take_left()

    @property
    def prepared(self) -> frozenset[bytes]:
        """Digests of the fragments that are prepared."""
        with self._changed:
            return frozenset(self._fragments.waiting)

    @property
    def next_end_at(self) -> float:
        """When the next subscription to a receipt ends of a fragment that does not leave again (monotonic
        seconds); infinite without any."""
        with self._changed:
            return min(
                (until for until, digest in self._heard_until.values() if not self._waits(digest)),
                default=math.inf,
            )

    def turn_of(self, due_at: float) -> float:
        """When a fragment leaves, where the first is due at a time (monotonic), as far as that is known."""
        with self._changed:
            return self._fragments.turn_of(due_at)

    def _run(self) -> None:
        try:
            with self._changed:
                while not self._is_over:
                    wait_s = self._due_in_s()
                    self._changed.wait(None if wait_s == math.inf else wait_s)
                    self._leave()
        except Exception as error:
            log.debug("the details", exc_info=True)
            self._failure = error  # For the thread that does the rest.

    def _due_in_s(self) -> float:
        now, wait_s = self._clock.monotonic(), math.inf
        for queue in (self._probes, self._fragments):
            if (first := queue.first) is not None and first.due_at is not None:
                wait_s = min(wait_s, queue.turn_of(first.due_at) - now)
        if not self._session.has_room:
            wait_s = max(wait_s, _LOOK_S)
        return max(min(wait_s, self.next_end_at - now), _LEAST_WAIT_S)

    def _leave(self) -> None:
        self._leave_due()
        now = self._clock.monotonic()
        for topic, (until, digest) in [*self._heard_until.items()]:
            # What is due and waits for its turn is heard on: else how long it waits would be seen, and that
            # is a matter of how many others of this board do.
            if until <= now and not self._waits(digest):
                del self._heard_until[topic]
                self._session.hear_no_more(topic)

    def _waits(self, digest: bytes) -> bool:
        return digest in self._probes.waiting or digest in self._fragments.waiting

    def _leave_due(self) -> None:
        if (plan := self._plan) is None:
            return
        for queue in (self._probes, self._fragments):
            self._send(queue, plan)

    def _send(self, queue: _Queue, plan: Plan) -> None:
        """Publish what is due of the open round."""
        topic = self._topics.fragments if plan.mixer is None else self._topics.mixer
        # Without room, the session would send the excess later, in a burst.
        while self._session.has_room:
            now = self._clock.monotonic()
            if (each := queue.next_to_leave(now)) is None:
                break
            sealed = self._seal(each.message, plan)
            faults.reached(FaultPoint.AGENT_SEALED)
            again_at = self._resend_time(plan, now, queue.again_from)
            if plan.receipts == "fragment":
                receipt = self._topics.receipt(each.receipt_place)
                self._session.hear(receipt)
                self._heard_until[receipt] = again_at, each.digest
            if self._session.publish(topic, sealed) is None:
                break
            faults.reached(FaultPoint.AGENT_PUBLISHED)
            queue.note_left(each.digest, again_at)

    def _resend_time(self, plan: Plan, now: float, again_from: float) -> float:
        """When a fragment that leaves now is resent.

        A mixer waits until it has a batch. Resends in the window would fill it with copies from those that
        sent first, and broker and coordinator would know who had sent the fragments that come twice.
        """
        after = now if plan.mixer is None else max(now, again_from)
        return after + _RESEND_S * self._random.uniform(1.0, 2.0)
