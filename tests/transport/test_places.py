"""Places for messages that wait: never more are taken than there are."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
from children import PATIENCE_S

from dpagent.transport.places import Places


def test_as_many_are_taken_as_there_are_and_none_where_nobody_lets_go() -> None:
    places = Places(5)
    assert places.take(3, 0.0) == 3
    assert places.take(3, 0.0) == 2
    assert places.take(1, 0.01) == 0
    places.let_go(4)
    assert places.take(9, 0.0) == 4


def test_who_waits_goes_on_when_places_are_let_go_of() -> None:
    places, taken = Places(1), list[int]()
    assert places.take(1, 0.0) == 1
    waiter = threading.Thread(target=lambda: taken.append(places.take(3, PATIENCE_S)))
    waiter.start()
    places.let_go(2)
    waiter.join(PATIENCE_S)
    assert taken == [2]


@pytest.fixture
def _in_turn() -> Iterator[None]:
    """Threads interrupt each other every few lines, and none waits 5 ms for another."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_in_turn")
def test_two_threads_never_hold_more_than_there_are() -> None:
    places, waiting, most = Places(7), list[int](), list[int]()
    lock = threading.Lock()

    def bring() -> None:
        for _ in range(2_000):
            number = places.take(3, PATIENCE_S)
            with lock:
                waiting.extend([1] * number)
                most.append(len(waiting))

    bringer = threading.Thread(target=bring)
    bringer.start()
    while bringer.is_alive() or waiting:
        with lock:
            number = len(waiting)
            waiting.clear()
        if number:
            places.let_go(number)
    bringer.join()
    assert max(most) <= 7
