"""Reads that may not return, of a driver or a mount that hangs: in a thread, waited for a moment only."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

ResultT = TypeVar("ResultT")

_WAIT_S: Final = 1.0
"""A sensor on a 1-Wire bus answers in 0.75 s. As long as one does not answer, nobody waits for it again."""


class BoundedReads:
    """Reads for a loop that must go on.

    Args:
        name: of the thread, which begins with the first read.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: Future[Any] | None = None
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()

    def read(self, work: Callable[[], ResultT]) -> ResultT:
        """What ``work`` returns, or raises. Nothing else may touch what it touches until then.

        Raises:
            TimeoutError: it takes too long, or what was read before has not returned yet.
        """
        if self._last is None:
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        elif not self._last.done():
            raise TimeoutError
        answer: Future[ResultT] = Future()
        self._last = answer
        self._asked.put((work, answer))
        return answer.result(_WAIT_S)

    def _serve(self) -> None:
        while True:
            work, answer = self._asked.get()
            try:
                answer.set_result(work())
            except BaseException as error:  # noqa: BLE001 - it is the asker's
                answer.set_exception(error)
