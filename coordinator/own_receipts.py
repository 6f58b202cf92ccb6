"""Receipts on topics of their own, published by whichever program has counted: the coordinator, or a worker.

They need no signature (:mod:`dpagent.protocol.receipts`), and go out at QoS 0, many in one write: a device
whose receipt is lost sends its fragment again, and gets another.

The broker sees which publication of which connection each one answers. How long it takes to count a fragment,
and how much less for a dummy, would show in the time of the answer. So each leaves a fixed time after its
fragment was taken, which is longer than that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Final

from dpagent.clock import Clock
from dpagent.protocol.receipts import receipt_digest, receipt_place
from dpagent.protocol.topics import Topics
from dpagent.transport.session import MqttSession

HELD_S: Final = 0.5
"""How long after its fragment was taken a receipt leaves. Devices send again after 5 s or more."""


class OwnReceipts:
    """Publishes each receipt on its own topic.

    Args:
        session: to publish with. Without a connection they are lost.
        topics: of the fleet.
        clock: the program's.
    """

    def __init__(self, session: MqttSession, topics: Topics, clock: Clock) -> None:
        self._session, self._topics, self._clock = session, topics, clock
        self._held: deque[tuple[float, tuple[bytes, ...]]] = deque()
        """When they leave (monotonic), and whose they are, in that order."""

    def put(self, fragment_ids: Iterable[bytes], taken_at: float) -> None:
        """Publish the receipts of fragments that are durably counted, when it is time.

        Args:
            fragment_ids: in an order that does not tell dummies from others.
            taken_at: when the work on them began (monotonic seconds).
        """
        self._held.append((taken_at + HELD_S, tuple(fragment_ids)))

    def due_in_s(self) -> float:
        """Seconds until the next one leaves; infinite without any."""
        return max(0.0, self._held[0][0] - self._clock.monotonic()) if self._held else math.inf

    def publish_due(self) -> None:
        """Publish those whose time has come."""
        leaving: list[bytes] = []
        while self._held and self.due_in_s() == 0.0:
            leaving += self._held.popleft()[1]
        if leaving:
            self._session.publish_together(
                [(self._topics.receipt(receipt_place(each)), receipt_digest(each)) for each in leaving]
            )
