"""Pools: the messages that wait to leave together, in random order.

A pool holds messages of one plan and one length. It leaves whole: when it has ``batch`` messages, or
``least`` ``longest_s`` after its first. The order of departure is drawn from the operating system's
randomness and depends on nothing that arrived. No message leaves twice, as far as digests are remembered:
one that the broker delivers twice would be known by leaving twice. The digests are keyed, of this process
alone, and of what the broker has seen leave anyway; none is kept with its time or its place.
"""

from __future__ import annotations

import hashlib
import os
import random
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from dpagent.protocol.mixing import Inner

_OVERHEAD_BYTES: Final = 256
"""Of a held message, besides its bytes: objects, and its digest."""

_MOST_POOLS: Final = 64
"""Of a fleet, one pool fills at a time, or two where a round follows another."""

_Kind: TypeAlias = tuple[bytes, int]


@dataclass(slots=True)
class _Pool:
    """Messages by their digests, of one plan and one length."""

    begun_at: float
    messages: dict[bytes, bytes] = field(default_factory=dict)


class Pools:
    """The messages that a mixer holds.

    Args:
        batch: messages of a pool with which it leaves.
        least: with which it leaves after ``longest_s``.
        longest_s: seconds from its first message.
        memory_bytes: most that all pools take. Beyond, the other pool with the fewest messages is dropped for
            a new message; without another, the message is.
        remembered: messages that are known again at least, after they have left.
    """

    def __init__(
        self, *, batch: int, least: int, longest_s: float, memory_bytes: int, remembered: int
    ) -> None:
        self._batch, self._least, self._longest_s = batch, least, longest_s
        self._memory_bytes, self._remembered = memory_bytes, remembered
        self._pools: dict[_Kind, _Pool] = {}
        self._held_bytes = 0
        self._random = random.SystemRandom()
        self._digest_key = os.urandom(32)
        self._departed: set[bytes] = set()
        self._departed_before: set[bytes] = set()
        self.repeats = 0
        """Messages that arrived again."""
        self.dropped = 0
        """Messages that had no room."""

    @property
    def held(self) -> int:
        """Number of messages that wait."""
        return sum(len(pool.messages) for pool in self._pools.values())

    def add(self, inner: Inner, now: float) -> None:
        """Take a message that arrived at ``now`` (monotonic seconds)."""
        digest = hashlib.blake2b(inner.sealed, digest_size=16, key=self._digest_key).digest()
        kind = inner.plan, len(inner.sealed)
        pool = self._pools.get(kind)
        is_held = pool is not None and digest in pool.messages
        if is_held or digest in self._departed or digest in self._departed_before:
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
        pool.messages[digest] = inner.sealed
        self._held_bytes += _size(kind)

    def depart(self, now: float) -> list[bytes]:
        """The messages of all pools that leave now (monotonic seconds), each pool in random order."""
        leaving = [kind for kind, pool in self._pools.items() if self._leaves(pool, now)]
        departed: list[bytes] = []
        for kind in leaving:
            pool = self._take(kind)
            for digest in pool.messages:
                self._remember(digest)
            messages = list(pool.messages.values())
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

    def _remember(self, digest: bytes) -> None:
        """In two sets, the older of which is forgotten when the newer is full: no order of departure."""
        if len(self._departed) >= self._remembered:
            self._departed_before, self._departed = self._departed, set()
        self._departed.add(digest)


def _size(kind: _Kind) -> int:
    return kind[1] + _OVERHEAD_BYTES
