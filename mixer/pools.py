"""Pools: the messages that wait to leave together, in random order.

A pool holds messages of one plan that the coordinator has announced, all of the length that the plan says: so
whoever has an account at the broker can begin none. It leaves whole: when it has ``batch`` messages, or
``least`` ``longest_s`` after its first. The order of departure is drawn from the operating system's
randomness and depends on nothing that arrived. A message that comes again while it waits leaves once; those
that have left are known by :mod:`mixer.departed`.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Final

from dpagent.protocol.codec import MessageError
from dpagent.protocol.mixing import Inner

_OVERHEAD_BYTES: Final = 256
"""Of a held message, besides its bytes: objects."""

_MOST_PLANS: Final = 4
"""One is open at a time; of that before it, messages may still come."""


@dataclass(slots=True)
class _Pool:
    """Messages of one plan, all of one length."""

    size: int
    begun_at: float = math.inf
    messages: set[bytes] = field(default_factory=set)

    @property
    def held_bytes(self) -> int:
        return len(self.messages) * (self.size + _OVERHEAD_BYTES)

    def take(self) -> set[bytes]:
        """All messages; none are left."""
        messages, self.messages, self.begun_at = self.messages, set(), math.inf
        return messages


class Pools:
    """The messages that a mixer holds.

    Args:
        batch: messages of a pool with which it leaves.
        least: with which it leaves after ``longest_s``.
        longest_s: seconds from its first message.
        memory_bytes: most that all pools take. Beyond, the messages of the oldest plan are dropped for one of
            a newer plan; else that one is.
    """

    def __init__(self, *, batch: int, least: int, longest_s: float, memory_bytes: int) -> None:
        self._batch, self._least, self._longest_s = batch, least, longest_s
        self._memory_bytes = memory_bytes
        self._pools: dict[bytes, _Pool] = {}
        """By the digest of the plan; the plan that was announced last stands last."""
        self._random = random.SystemRandom()
        self.repeats = 0
        """Messages that arrived again while they waited."""
        self.dropped = 0
        """Messages that had no room, or whose plan was forgotten."""

    @property
    def held(self) -> int:
        """Number of messages that wait."""
        return sum(len(pool.messages) for pool in self._pools.values())

    def announce(self, plan: bytes, size: int) -> None:
        """Hold messages of a plan from now on. Beyond the last few, plans are forgotten, with what is held.

        Args:
            plan: its digest.
            size: of its sealed fragments, in bytes.
        """
        self._pools[plan] = self._pools.pop(plan) if plan in self._pools else _Pool(size)
        while len(self._pools) > _MOST_PLANS:
            self.dropped += len(self._pools.pop(next(iter(self._pools))).messages)

    def require(self, plan: bytes) -> None:
        """See that messages of a plan are held.

        Raises:
            MessageError: They are not.
        """
        if plan not in self._pools:
            raise MessageError("unknown plan", plan.hex())

    def add(self, inner: Inner, now: float) -> None:
        """Take a message that arrived at ``now`` (monotonic seconds).

        Raises:
            MessageError: It is of no plan that was announced, or has not its length.
        """
        self.require(inner.plan)
        pool = self._pools[inner.plan]
        if len(inner.sealed) != pool.size:
            raise MessageError("wrong size", f"{len(inner.sealed)} bytes; expected {pool.size}")
        if inner.sealed in pool.messages:
            self.repeats += 1
            return
        if not self._have_room(pool):
            self.dropped += 1
            return
        pool.begun_at = min(pool.begun_at, now)
        pool.messages.add(inner.sealed)

    def _have_room(self, pool: _Pool) -> bool:
        """Make room for a message more in a pool, if it is not the oldest that holds any."""
        needed = pool.size + _OVERHEAD_BYTES
        while sum(each.held_bytes for each in self._pools.values()) + needed > self._memory_bytes:
            oldest = next(each for each in self._pools.values() if each is pool or each.messages)
            if oldest is pool:
                return False
            self.dropped += len(oldest.take())
        return True

    def depart(self, now: float) -> list[bytes]:
        """The messages of all pools that leave now (monotonic seconds), each pool in random order."""
        departed: list[bytes] = []
        for pool in self._pools.values():
            if self._leaves(pool, now):
                messages = list(pool.take())
                self._random.shuffle(messages)
                departed += messages
        return departed

    def _leaves(self, pool: _Pool, now: float) -> bool:
        number = len(pool.messages)
        return number >= self._batch or (number >= self._least and now >= pool.begun_at + self._longest_s)
