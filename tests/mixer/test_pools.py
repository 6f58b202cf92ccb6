"""Pools: when they leave, in which order, and what they take of memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

from dpagent.protocol.mixing import Inner
from mixer.pools import Pools

PLAN, OTHER = b"p" * 32, b"q" * 32
MESSAGE_BYTES = 100


def pools(**changes: Any) -> Pools:
    values: dict[str, Any] = {
        "batch": 8, "least": 4, "longest_s": 2.0, "memory_bytes": 1 << 20,
    }  # fmt: skip
    return Pools(**(values | changes))


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


def test_plans_and_lengths_do_not_mix_among_each_other() -> None:
    held = pools()
    fill(held, range(7))
    fill(held, range(7, 14), plan=OTHER)
    held.add(Inner(PLAN, message(99, MESSAGE_BYTES + 1)), 0.0)
    assert held.depart(1.0) == []
    assert held.held == 15


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


def test_a_flood_of_plans_takes_bounded_memory_and_leaves_the_fleets_pool() -> None:
    held = pools(batch=50, least=40)
    fill(held, range(39))
    for number in range(5_000):
        held.add(Inner(number.to_bytes(32, "big"), message(number)), 0.0)
    assert held.held <= 39 + 64
    fill(held, range(39, 50))
    assert len(held.depart(0.0)) == 50


def test_a_full_memory_gives_way_to_the_plan_with_more() -> None:
    held = pools(memory_bytes=10 * (MESSAGE_BYTES + 256), batch=100, least=9)
    fill(held, range(4), plan=OTHER)
    fill(held, range(10, 19))
    assert len(held.depart(2.0)) == 9
    assert held.dropped == 4
    fill(held, range(20, 40))
    assert held.held == 10
    assert held.dropped == 14
