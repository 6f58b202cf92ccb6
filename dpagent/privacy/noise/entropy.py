"""Random bits from the operating system, and noise drawn from them ahead of need.

An :data:`Entropy` gives n uniform bytes for an argument n. It is ``os.urandom`` everywhere but in
tests; nothing is buffered between it and a draw, so there is no state that a fork could copy.

:class:`NoisePool` is the one place that keeps values. Jin et al. (IEEE S&P 2022) read the noise
off the time that adding noise takes; if the values were drawn in idle time, adding noise only copies them.
A pool promises:

- *no value twice*: a value leaves the store under a lock, is copied out once and overwritten;
- *fork*: a store belongs to the process that made it, known by a counter that every fork raises
  in the child (``os.register_at_fork``) and by the process id, for forks that Python does not
  see. With another owner, the store, its lock (perhaps held by a thread that the child does not
  have) and its values are dropped, and the child's copy is overwritten, before anything is
  handed out;
- *a pool is a cache*: if it holds too few values the rest are drawn at once, and the call takes
  longer, by an amount that depends on how many were missing, and on nothing else.

Overwriting reaches the store. It does not reach copies that numpy, Python or the C library made
on the way (``os.urandom`` returns an immutable ``bytes``), nor memory swapped out.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, require_count

Entropy = Callable[[int], bytes]

#: Values a pool may be asked to hold: 512 MiB of them.
MAX_POOL: Final = 2**26


class Sampler(Protocol):
    """Draws independent integers; draws may run in several threads at a time."""

    def sample(self, count: int) -> NDArray[np.int64]:
        """``count`` independent values, shape (count,); ``count`` may be 0."""


def random_bytes(count: int, entropy: Entropy) -> bytes:
    """``count`` uniform bytes from ``entropy``.

    Raises:
        ParameterError: ``entropy`` gave another number of bytes.
    """
    data = entropy(count)
    if len(data) != count:
        raise ParameterError(f"entropy gave {len(data)} bytes; expected the {count} asked for.")
    return data


def uniform_words(count: int, entropy: Entropy) -> NDArray[np.uint64]:
    """``count`` uniform 64-bit words from ``entropy``, shape (count,)."""
    return np.frombuffer(random_bytes(8 * count, entropy), dtype="<u8").astype(np.uint64, copy=False)


class NoisePool:
    """Values of a sampler, drawn ahead of need and handed out once. Thread-safe and fork-safe.

    >>> from dpagent.privacy.noise.discrete_gaussian import DiscreteGaussianSampler
    >>> pool = NoisePool(DiscreteGaussianSampler(3.0))
    >>> pool.prepare(100)
    >>> pool.sample(30).shape, pool.available
    ((30,), 70)
    """

    def __init__(self, sampler: Sampler) -> None:
        """Make an empty pool.

        Args:
            sampler: draws the values. It must keep none of its own; those of this package do not.
        """
        self._sampler = sampler
        self._store = _Store()

    @property
    def available(self) -> int:
        """Values that could be handed out without drawing."""
        store = self._own_store()
        with store.lock:
            return store.held

    def prepare(self, count: int) -> None:
        """Draw until at least ``count`` values are there; to be called in idle time.

        Calls of ``sample`` in other threads do not wait for the drawing.

        Raises:
            ParameterError: ``count`` is not a whole number from 0 to 2²⁶.
        """
        require_count("count", count, minimum=0, maximum=MAX_POOL)
        store = self._own_store()
        with store.filling:
            missing = count - store.held  # read without the lock: too many are no harm
            if missing > 0:
                store.put(self._sampler.sample(missing))

    def sample(self, count: int) -> NDArray[np.int64]:
        """``count`` independent values, shape (count,); those that the pool lacks are drawn at once.

        Raises:
            ParameterError: ``count`` is not a whole number of at least 0.
        """
        require_count("count", count, minimum=0)
        values = np.empty(count, dtype=np.int64)
        taken = self._own_store().take(values)
        if taken < count:
            values[taken:] = self._sampler.sample(count - taken)
        return values

    def clear(self) -> None:
        """Overwrite and drop all values, for instance before the noise's scale changes."""
        store = self._own_store()
        with store.lock:
            store.clear()

    def _own_store(self) -> _Store:
        """This process's store. Two threads may both make one: each value is still in one store."""
        store = self._store
        if store.owner != _owner():
            store.overwrite()  # without its lock, which a thread left behind may hold for ever
            store = self._store = _Store()
        return store


class _Store:
    """Blocks of values of one process, and the locks that guard them."""

    def __init__(self) -> None:
        self.owner = _owner()
        self.lock = threading.Lock()
        self.filling = threading.Lock()
        self.held = 0
        self._blocks: deque[NDArray[np.int64]] = deque()

    def put(self, block: NDArray[np.int64]) -> None:
        """Add values; the block is the store's from now on."""
        with self.lock:
            self._blocks.append(block)
            self.held += block.size

    def take(self, values: NDArray[np.int64]) -> int:
        """Move values to the beginning of ``values``; returns how many there were."""
        with self.lock:
            taken = 0
            while taken < values.size and self._blocks:
                block = self._blocks.popleft()
                number = min(block.size, values.size - taken)
                values[taken : taken + number] = block[:number]
                block[:number] = 0
                if number < block.size:
                    self._blocks.appendleft(block[number:])
                taken += number
            self.held -= taken
            return taken

    def clear(self) -> None:
        """Overwrite and drop everything; the caller holds the lock."""
        self.overwrite()
        self._blocks.clear()
        self.held = 0

    def overwrite(self) -> None:
        """Overwrite everything; harmless if done twice at a time."""
        for block in tuple(self._blocks):
            block.fill(0)


_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


def _owner() -> tuple[int, int]:
    """This process; the counter tells it from an ancestor whose process id it was given."""
    return _forks, os.getpid()


os.register_at_fork(after_in_child=_count_fork)
