"""Basic composition and group privacy: against mechanisms small enough to enumerate."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpagent.errors import ParameterError
from dpagent.privacy.accounting.composition import composed, exact_sum
from dpagent.privacy.accounting.groups import group_event
from dpagent.privacy.events import ApproximateEvent, GaussianEvent, SelfComposedEvent

Distribution = dict[object, float]


def hockey_stick(p: Distribution, q: Distribution, epsilon: float) -> float:
    """The least δ with P(S) ≤ e^ε·Q(S) + δ for all events S."""
    return math.fsum(max(0.0, p[x] - math.exp(epsilon) * q.get(x, 0.0)) for x in p)


def noisy_answer(bit: int, epsilon: float, delta: float) -> Distribution:
    """The worst (ε, δ)-DP mechanism for one bit: with probability δ the truth is told outright."""
    truthful = (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon))
    return {("told", bit): delta, bit: truthful, 1 - bit: 1 - delta - truthful}


def product(*parts: Distribution) -> Distribution:
    return {
        outcome: math.prod(part[x] for part, x in zip(parts, outcome, strict=True))
        for outcome in itertools.product(*parts)
    }


@pytest.mark.parametrize(("epsilon", "delta", "steps"), [(0.4, 0.0, 3), (0.7, 0.01, 3), (1.5, 0.1, 2)])
def test_basic_composition_holds_for_the_worst_mechanism(epsilon: float, delta: float, steps: int) -> None:
    total = composed(SelfComposedEvent(ApproximateEvent(epsilon, delta), steps), ApproximateEvent(0.2, 0.001))
    assert total.epsilon == pytest.approx(steps * epsilon + 0.2)
    assert total.delta == pytest.approx(steps * delta + 0.001)
    p, q = (
        product(*[noisy_answer(bit, epsilon, delta)] * steps, noisy_answer(bit, 0.2, 0.001)) for bit in (0, 1)
    )
    attained = hockey_stick(p, q, total.epsilon)
    assert attained <= total.delta * (1 + 1e-9) + 1e-15
    assert attained >= 0.001  # the second event's δ is told outright in any case


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0.5, 0.0), (0.5, 1e-3), (2.0, 1e-4), (1e-9, 1e-3), (0.0, 1e-3)]
)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_group_privacy_follows_the_chain(epsilon: float, delta: float, size: int) -> None:
    chain = mpmath.mpf(0)
    for _ in range(size):
        chain = chain * mpmath.exp(epsilon) + delta
    group = group_event(ApproximateEvent(epsilon, delta), size)
    assert size * epsilon <= group.epsilon <= math.nextafter(size * epsilon, math.inf)
    assert group.delta == pytest.approx(float(chain), rel=1e-7)


@given(
    terms=st.lists(st.tuples(st.floats(0, 1e12), st.integers(1, 2**53)), max_size=30),
)
def test_sums_are_exact_and_rounded_up(terms: list[tuple[float, int]]) -> None:
    exact = sum((Fraction(value) * count for value, count in terms), Fraction(0))
    ours = exact_sum(terms)
    assert ours >= exact
    assert ours == 0 or math.nextafter(ours, 0) < exact


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: composed(), "events"),
        (lambda: composed(SelfComposedEvent(ApproximateEvent(900.0), 2)), "epsilon"),
        (lambda: composed(SelfComposedEvent(ApproximateEvent(0.1, 0.6), 2)), "delta"),
        (lambda: composed(SelfComposedEvent(ApproximateEvent(0.1, 0.0), 10**400)), "count"),
        (lambda: composed(GaussianEvent(1.0)), "events"),
        (lambda: group_event(ApproximateEvent(0.1), 0), "group size"),
        (lambda: group_event(ApproximateEvent(0.1), 10**400), "group size"),
        (lambda: group_event(ApproximateEvent(1.0, 0.1), 5), "group size"),
    ],
)
def test_bad_values_are_named(call: object, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        call()  # type: ignore[operator]
