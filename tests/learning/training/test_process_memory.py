"""What processes have for themselves: as much as they wrote, shared memory once."""

from __future__ import annotations

import gc
import mmap
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dpagent.learning.training.forks import end, forked
from dpagent.learning.training.process_memory import own_mib, shared_mib

MIB = 1 << 20


@contextmanager
def a_fork_that_writes(private: int, shared: mmap.mmap) -> Iterator[int]:
    """A fork that has so many MiB of its own and has written to all that is shared."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        gc.disable()  # It writes to each object that the process has.
        taken = bytearray(os.urandom(1)) * (private * MIB)
        shared[:] = bytes([len(taken) % 251]) * len(shared)
        theirs.send(b"!")
        theirs.recv(1)

    with ours:
        with theirs:
            process = forked(serve, theirs.fileno())
        try:
            assert ours.recv(1) == b"!"
            yield process
        finally:
            end(process, ours)


def test_memory_is_counted_for_whom_it_is() -> None:
    mine = bytearray(os.urandom(1)) * (40 * MIB)
    others = shared_mib(os.getpid())  # Of whatever ran in this process before.
    shared = mmap.mmap(-1, 24 * MIB)
    before = own_mib(os.getpid())
    assert before >= 40
    with a_fork_that_writes(16, shared) as fork:
        group = (os.getpid(), fork)
        assert 16 <= own_mib(fork) <= 16 + 24 + 8, "not what it has in common with this process"
        assert own_mib(os.getpid()) < before - 30, "what is common is nobody's own"
        assert shared_mib(*group) - others == pytest.approx(24, abs=1)
        mine[:] = bytes(len(mine))
        assert own_mib(fork) >= 16 + 40, "what this process wrote to, only the fork has as it was"
    assert own_mib(os.getpid()) >= 40


def test_a_process_that_has_ended_has_no_memory_to_tell() -> None:
    with pytest.raises(OSError, match="No such file"):
        own_mib(2**22 + 1)
