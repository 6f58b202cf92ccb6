"""Words from the system's entropy, and the pool: once each, in any thread, on either side of a fork."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from children import PATIENCE_S
from numpy.typing import NDArray

from dpagent.errors import ParameterError
from dpagent.privacy.noise import entropy
from dpagent.privacy.noise.discrete_gaussian import DiscreteGaussianSampler
from dpagent.privacy.noise.entropy import MAX_POOL, NoisePool, random_bytes, uniform_words


class Numbered:
    """A sampler whose values are 1, 2, 3, …, so that each can be told from all others."""

    def __init__(self) -> None:
        self._next = itertools.count(1)
        self.drawn: list[NDArray[np.int64]] = []

    def sample(self, count: int) -> NDArray[np.int64]:
        values = np.array([next(self._next) for _ in range(count)], dtype=np.int64)
        self.drawn.append(values)
        return values


def test_words_are_the_bytes_in_order() -> None:
    data = bytes(range(16))
    np.testing.assert_array_equal(
        uniform_words(2, lambda _: data),
        [int.from_bytes(data[:8], "little"), int.from_bytes(data[8:], "little")],
    )
    assert uniform_words(0, os.urandom).shape == (0,)
    assert random_bytes(3, lambda n: b"abc"[:n]) == b"abc"


@pytest.mark.parametrize("given", [7, 9])
def test_entropy_of_another_length_is_refused(given: int) -> None:
    with pytest.raises(ParameterError, match=f"entropy gave {given} bytes; expected the 8"):
        uniform_words(1, lambda _: bytes(given))


def test_a_pool_hands_out_each_value_once_and_draws_what_is_missing() -> None:
    sampler = Numbered()
    pool = NoisePool(sampler)
    assert pool.available == 0
    pool.prepare(10)
    pool.prepare(4)  # there are more already
    assert pool.available == 10
    assert pool.sample(3).tolist() == [1, 2, 3]
    pool.prepare(9)
    assert pool.available == 9
    assert len(sampler.drawn) == 2
    assert pool.sample(8).tolist() == list(range(4, 12))
    assert pool.sample(5).tolist() == list(range(12, 17))
    assert pool.available == 0
    assert pool.sample(0).shape == (0,)
    assert pool.sample(2).dtype == np.int64


def test_what_was_handed_out_is_overwritten_in_the_pool_and_nowhere_else() -> None:
    sampler = Numbered()
    pool = NoisePool(sampler)
    pool.prepare(6)
    (held,) = sampler.drawn
    first = pool.sample(4)
    assert held.tolist() == [0, 0, 0, 0, 5, 6]
    second = pool.sample(2)
    assert not held.any()
    assert [*first, *second] == [1, 2, 3, 4, 5, 6]


def test_clear_forgets_and_overwrites() -> None:
    sampler = Numbered()
    pool = NoisePool(sampler)
    pool.prepare(6)
    pool.clear()
    assert pool.available == 0
    assert not sampler.drawn[0].any()
    assert pool.sample(1).tolist() == [7]


def test_threads_never_get_the_same_value() -> None:
    pool = NoisePool(Numbered())
    got: list[list[int]] = [[] for _ in range(6)]
    start = threading.Barrier(7)

    def take(mine: list[int], count: int) -> None:
        start.wait()
        for _ in range(60):
            mine.extend(pool.sample(count).tolist())

    threads = [threading.Thread(target=take, args=(mine, 5 + i)) for i, mine in enumerate(got)]
    for thread in threads:
        thread.start()
    start.wait()
    for _ in range(40):
        pool.prepare(100)
    for thread in threads:
        thread.join()
    values = list(itertools.chain.from_iterable(got))
    assert len(values) == 60 * sum(range(5, 11))
    assert len(set(values)) == len(values)
    assert 0 not in values


def test_a_sample_does_not_wait_for_a_pool_being_filled() -> None:
    """What is there is handed out while ``prepare`` is still drawing."""
    drawing, go_on = threading.Event(), threading.Event()

    class Slow(Numbered):
        def sample(self, count: int) -> NDArray[np.int64]:
            if count > 50:
                drawing.set()
                assert go_on.wait(PATIENCE_S)
            return super().sample(count)

    pool = NoisePool(Slow())
    pool.prepare(10)
    filler = threading.Thread(target=pool.prepare, args=(100,))
    filler.start()
    assert drawing.wait(PATIENCE_S)
    assert pool.sample(10).tolist() == list(range(1, 11))
    assert filler.is_alive()
    go_on.set()
    filler.join()
    assert pool.available == 90


@pytest.mark.parametrize("seen_by", ["counter", "process id"])
def test_either_sign_of_a_fork_empties_the_pool(seen_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Numbered()
    pool = NoisePool(sampler)
    pool.prepare(5)
    if seen_by == "counter":
        entropy._count_fork()
    else:
        monkeypatch.setattr(os, "getpid", lambda: -1)
    assert pool.available == 0
    assert not sampler.drawn[0].any()
    assert pool.sample(2).tolist() == [6, 7]


_FORK = """
import json, os, signal, sys, threading
import numpy as np
from dpagent.privacy.noise.discrete_gaussian import DiscreteGaussianSampler
from dpagent.privacy.noise.entropy import NoisePool

pool = NoisePool(DiscreteGaussianSampler(1e6))
pool.prepare(300)
held = pool._store._blocks[0]
locked, done = threading.Event(), threading.Event()

def hold():
    with pool._store.lock, pool._store.filling:
        locked.set()
        done.wait()

holder = threading.Thread(target=hold)
holder.start()
locked.wait()
read, write = os.pipe()
if os.fork() == 0:  # the thread that holds the locks does not exist here
    signal.alarm(20)
    available = pool.available
    pool.prepare(200)
    values = pool.sample(100).tolist() + pool.sample(200).tolist()
    direct = DiscreteGaussianSampler(1e6).sample(100).tolist()
    os.write(write, json.dumps([available, bool(held.any()), values, direct]).encode())
    os._exit(0)
done.set()
holder.join()
os.wait()
os.close(write)
with os.fdopen(read) as pipe:
    child = json.load(pipe)
print(json.dumps([child, pool.available, pool.sample(300).tolist()]))
"""


def test_after_a_real_fork_parent_and_child_have_values_of_their_own() -> None:
    """In a process of its own, with a lock held by another thread at the moment of the fork."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORK],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (available, kept, child, direct), held, parent = json.loads(done.stdout)
    assert available == 0
    assert not kept, "the child still has its parent's values"
    assert held == len(parent) == 300
    # σ is a million: a handful of coincidences is chance, a run of them would be shared values
    for mine, yours in itertools.combinations((parent[:100], child[:100], child[100:200], direct), 2):
        assert sum(a == b for a, b in zip(mine, yours, strict=True)) <= 3
    assert len(set(parent) & set(child)) <= 6


def test_a_pool_of_noise_has_the_sampler_s_values() -> None:
    pool = NoisePool(DiscreteGaussianSampler(50.0))
    pool.prepare(100_000)
    values = np.concatenate([pool.sample(60_000), pool.sample(40_000)])
    assert abs(values.std() - 50) < 1  # 9 standard errors
    assert pool.available == 0


@pytest.mark.parametrize("count", [-1, MAX_POOL + 1, 2.5])
def test_a_pool_too_large_is_named(count: int) -> None:
    pool = NoisePool(Numbered())
    with pytest.raises(ParameterError, match="count"):
        pool.prepare(count)
    assert pool.available == 0
    with pytest.raises(ParameterError, match="count"):
        pool.sample(-1)
