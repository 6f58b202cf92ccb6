"""Pools: when they leave, in which order, and what they take of memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from dpagent.protocol.codec import MessageError
from dpagent.protocol.mixing import Inner
from mixer.pools import Pools

PLAN, OTHER = b"p" * 32, b"q" * 32
MESSAGE_BYTES = 100


def pools(*plans: bytes, **changes: Any) -> Pools:
    values: dict[str, Any] = {
        "batch": 8, "least": 4, "longest_s": 2.0, "memory_bytes": 1 << 20,
    }  # fmt: skip
    held = Pools(**(values | changes))
    for plan in plans or (PLAN, OTHER):
        held.announce(plan, MESSAGE_BYTES)
    return held


def message(number: int, size: int = MESSAGE_BYTES) -> bytes:
    return number.to_bytes(4, "big").ljust(size, b"\0")


def fill(into: Pools, numbers: range, plan: bytes = PLAN, now: float = 0.0) -> None:
    for number in numbers:
        into.add(Inner(plan, message(number)), now)


def test_a_batch_leaves_whole_and_at_once() -> None:
    held = pools()
    fill(held, range(7))
    assert held.depart(1.9) == []
    fill(held, range(7, 8))
    assert sorted(held.depart(1.9)) == [message(number) for number in range(8)]
    assert held.held == 0


def test_fewer_leave_after_the_longest_time_and_too_few_never() -> None:
    held = pools()
    fill(held, range(3))
    assert held.depart(1e9) == []
    fill(held, range(3, 4), now=1.0)
    assert held.depart(1.99) == []
    assert sorted(held.depart(2.0)) == [message(number) for number in range(4)]


def test_plans_do_not_mix_among_each_other() -> None:
    held = pools()
    fill(held, range(7))
    fill(held, range(7, 14), plan=OTHER)
    assert held.depart(1.0) == []
    assert held.held == 14


@pytest.mark.parametrize("size", [MESSAGE_BYTES - 1, MESSAGE_BYTES + 1])
def test_another_length_than_that_of_the_plan_is_refused(size: int) -> None:
    held = pools()
    with pytest.raises(MessageError, match="wrong size"):
        held.add(Inner(PLAN, message(99, size)), 0.0)
    assert held.held == 0


def test_every_order_of_departure_is_as_likely() -> None:
    orders: Counter[tuple[int, ...]] = Counter()
    trials = 6_000
    for _ in range(trials):
        held = pools(batch=3, least=2)
        fill(held, range(3))
        orders[tuple(int.from_bytes(each[:4], "big") for each in held.depart(0.0))] += 1
    assert len(orders) == 6
    # Chi-square with 5 degrees of freedom at α = 1e-6.
    assert sum((seen - trials / 6) ** 2 / (trials / 6) for seen in orders.values()) < 35.9


def test_a_message_that_comes_again_while_it_waits_leaves_once() -> None:
    held = pools(batch=4)
    fill(held, range(3))
    fill(held, range(2))
    assert held.repeats == 2
    fill(held, range(3, 4))
    assert sorted(held.depart(0.0)) == [message(number) for number in range(4)]
    assert held.held == 0


def test_what_answers_no_plan_that_was_announced_is_refused() -> None:
    held = pools(PLAN)
    fill(held, range(7))
    for number in range(100):
        with pytest.raises(MessageError, match="unknown plan"):
            held.add(Inner(number.to_bytes(32, "big"), message(number)), 0.0)
    fill(held, range(7, 8))
    assert len(held.depart(0.0)) == 8


def test_the_last_four_plans_count_and_a_plan_that_comes_again_is_a_new_one() -> None:
    plans = [bytes([number]) * 32 for number in range(6)]
    held = pools(*plans[:4], batch=100)
    for plan in plans[:4]:
        fill(held, range(3), plan=plan)
    held.announce(plans[0], MESSAGE_BYTES)
    assert held.held == 12
    for plan in plans[4:]:
        held.announce(plan, MESSAGE_BYTES)
    assert (held.held, held.dropped) == (6, 6)
    for plan in plans[1:3]:
        with pytest.raises(MessageError, match="unknown plan"):
            held.require(plan)
    for plan in (plans[0], *plans[3:]):
        held.require(plan)


def test_a_full_memory_drops_what_answers_an_older_plan() -> None:
    held = pools(OTHER, PLAN, memory_bytes=10 * (MESSAGE_BYTES + 256), batch=100, least=9)
    fill(held, range(8), plan=OTHER)
    fill(held, range(10, 19))
    assert len(held.depart(2.0)) == 9
    assert (held.held, held.dropped) == (0, 8)
    fill(held, range(20, 29))
    fill(held, range(40, 50), plan=OTHER)
    assert len(held.depart(2.0)) == 9, "no older plan takes the room of a newer one"
    assert (held.held, held.dropped) == (1, 17)
