"""Processes that are killed, confined or starved on purpose, forked from the tests' own."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable


def in_a_child(action: Callable[[], None]) -> bool:
    """Do ``action`` in a process of its own, and say whether it was killed."""
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
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)
