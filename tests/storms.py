"""Processes that are killed, confined or starved on purpose, forked from the tests' own."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def in_a_child(action: Callable[[], None]) -> bool:
    """Do ``action`` in a process of its own, and say whether it was killed."""
    _, status = os.waitpid(_forked(action), 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


@contextmanager
def beside(action: Callable[[Callable[[], object]], None]) -> Iterator[None]:
    """Do ``action`` in a process of its own, which is killed at the end of the block.

    Args:
        action: it is given what it calls when it is ready; the block begins then.
    """
    reading, writing = os.pipe()
    child = _forked(lambda: action(lambda: os.write(writing, b"!")))
    os.close(writing)
    try:
        with os.fdopen(reading, "rb", buffering=0) as said:
            assert said.read(1), "it ended before it was ready"
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _forked(action: Callable[[], None]) -> int:
    with warnings.catch_warnings():
        # Of threads that only the parent has, which the child does not ask for anything.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return child
