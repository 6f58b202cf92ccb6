"""The queue from which the processes of an engine take their work."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

from dpagent.learning.training.work_queue import LONGEST, WorkQueue


def _open() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_each_number_is_taken_once_and_none_of_before_is_left() -> None:
    queue = WorkQueue()
    assert [*queue.taken()] == []
    queue.fill(range(LONGEST))
    assert [*islice(queue.taken(), 5)] == [0, 1, 2, 3, 4]
    queue.fill(range(7, 10))
    first, second = queue.taken(), queue.taken()
    assert [next(first), next(second), next(first), next(second, None)] == [7, 8, 9, None]
    queue.fill(range(0))
    assert [*queue.taken()] == []


def test_processes_take_different_numbers() -> None:
    queue, pipes = WorkQueue(), [os.pipe2(os.O_NONBLOCK) for _ in range(3)]
    for _ in range(10):
        queue.fill(range(LONGEST))
        children = []
        for _, writing in pipes:
            child = os.fork()
            if not child:
                os.write(writing, bytes([*queue.taken(), 0]))
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        taken = b"".join(os.read(reading, 2 * LONGEST)[:-1] for reading, _ in pipes)
        assert sorted(taken) == [*range(LONGEST)]
    for pipe in pipes:
        for descriptor in pipe:
            os.close(descriptor)


def test_descriptors_are_closed_with_the_queue() -> None:
    before = _open()
    queue = WorkQueue()
    assert _open() == before + 2
    del queue
    assert _open() == before


def test_a_queue_whose_owner_has_ended_is_empty() -> None:
    queue = WorkQueue()
    reading, writing = os.pipe()
    os.close(writing)
    os.dup2(reading, queue.descriptor)
    os.close(reading)
    assert [*queue.taken()] == []
