"""Pools: the messages that wait to leave together, in random order.

A pool holds messages of one plan and one length. It leaves whole: when it has ``batch`` messages, or
``least`` ``longest_s`` after its first. The order of departure is drawn from the operating system's
randomness and depends on nothing that arrived. A message that comes again while it waits leaves once; those
that have left are known by :mod:`mixer.departed`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from dpagent.protocol.mixing import Inner

_OVERHEAD_BYTES: Final = 256
"""Of a held message, besides its bytes: objects."""

_MOST_POOLS: Final = 64
"""Of a fleet, one pool fills at a time, or two where a round follows another."""

_Kind: TypeAlias = tuple[bytes, int]


@dataclass(slots=True)
class _Pool:
    """Messages of one plan and one length."""

    begun_at: float
    messages: set[bytes] = field(default_factory=set)


class Pools:
    """The messages that a mixer holds.

    Args:
        batch: messages of a pool with which it leaves.
        least: with which it leaves after ``longest_s``.
        longest_s: seconds from its first message.
        memory_bytes: most that all pools take. Beyond, the other pool with the fewest messages is dropped for
            a new message; without another, the message is.
    """

    def __init__(self, *, batch: int, least: int, longest_s: float, memory_bytes: int) -> None:
        self._batch, self._least, self._longest_s = batch, least, longest_s
        self._memory_bytes = memory_bytes
        self._pools: dict[_Kind, _Pool] = {}
        self._held_bytes = 0
        self._random = random.SystemRandom()
        self.repeats = 0
        """Messages that arrived again while they waited."""
        self.dropped = 0
        """Messages that had no room."""

    @property
    def held(self) -> int:
        """Number of messages that wait."""
        return sum(len(pool.messages) for pool in self._pools.values())

    def add(self, inner: Inner, now: float) -> None:
        """Take a message that arrived at ``now`` (monotonic seconds)."""
        kind = inner.plan, len(inner.sealed)
        pool = self._pools.get(kind)
        if pool is not None and inner.sealed in pool.messages:
            self.repeats += 1
            return
        if pool is None:
            if len(self._pools) >= _MOST_POOLS:
                self._drop_fewest(set(self._pools))
            pool = self._pools[kind] = _Pool(now)
        while self._held_bytes + _size(kind) > self._memory_bytes:
            if not (others := self._pools.keys() - {kind}):
                self.dropped += 1
                return
            self._drop_fewest(others)
        pool.messages.add(inner.sealed)
        self._held_bytes += _size(kind)

    def depart(self, now: float) -> list[bytes]:
        """The messages of all pools that leave now (monotonic seconds), each pool in random order."""
        leaving = [kind for kind, pool in self._pools.items() if self._leaves(pool, now)]
        departed: list[bytes] = []
        for kind in leaving:
            messages = list(self._take(kind).messages)
            self._random.shuffle(messages)
            departed += messages
        return departed

    def _leaves(self, pool: _Pool, now: float) -> bool:
        number = len(pool.messages)
        return number >= self._batch or (number >= self._least and now >= pool.begun_at + self._longest_s)

    def _take(self, kind: _Kind) -> _Pool:
        pool = self._pools.pop(kind)
        self._held_bytes -= len(pool.messages) * _size(kind)
        return pool

    def _drop_fewest(self, kinds: set[_Kind]) -> None:
        fewest = min(kinds, key=lambda kind: len(self._pools[kind].messages))
        self.dropped += len(self._take(fewest).messages)


def _size(kind: _Kind) -> int:
    return kind[1] + _OVERHEAD_BYTES
