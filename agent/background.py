"""Work in a thread of its own, while the program's thread serves the network."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

ResultT = TypeVar("ResultT")


def in_thread(work: Callable[[], ResultT]) -> Future[ResultT]:
    """Begin ``work`` in a daemon thread, which the end of the program ends, whatever it is at.

    A pool of :mod:`concurrent.futures` would keep a program that is told to stop until the work is done.
    """
    future: Future[ResultT] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised where the result is taken
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="training", daemon=True).start()
    return future


def at_once(work: Callable[[], ResultT]) -> Future[ResultT]:
    """Do ``work`` in the caller's thread, for those who drive a device step by step."""
    future: Future[ResultT] = Future()
    future.set_result(work())
    return future
