"""Sampling, against enumeration of small distributions."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dpagent.errors import ParameterError
from dpagent.privacy.accounting.amplification import amplified_epsilon, unamplified_epsilon

Distribution = NDArray[np.float64]
DISTRIBUTIONS = st.lists(st.integers(0, 1000), min_size=6, max_size=6).filter(any)


def normalised(weights: list[int]) -> Distribution:
    return np.array(weights) / sum(weights)


def least_delta(first: Distribution, second: Distribution, epsilon: float) -> float:
    """The least δ at ``epsilon``, both ways: the mass above e^ε times the other's."""
    return max(
        float(np.maximum(a - math.exp(epsilon) * b, 0).sum()) for a, b in ((first, second), (second, first))
    )


@given(one=DISTRIBUTIONS, other=DISTRIBUTIONS, epsilon=st.floats(0, 5), q=st.floats(1e-3, 1))
@settings(deadline=None)
def test_sampling_costs_no_more_than_stated_for_any_pair(
    one: list[int], other: list[int], epsilon: float, q: float
) -> None:
    without, present = normalised(one), normalised(other)
    delta = least_delta(without, present, epsilon)
    mixed = (1 - q) * without + q * present
    assert least_delta(without, mixed, amplified_epsilon(epsilon, q)) <= q * delta + 1e-12


@pytest.mark.parametrize("q", [1e-3, 0.1, 0.9])
def test_sampling_is_sharp(q: float) -> None:
    """Randomised response with an escape: the pair that every (ε, δ) pair is a processing of."""
    epsilon, delta = 1.5, 0.01
    yes = (1 - delta) / (1 + math.exp(-epsilon))
    without, present = np.array([delta, yes, 1 - delta - yes, 0]), np.array([0, 1 - delta - yes, yes, delta])
    assert least_delta(without, present, epsilon) == pytest.approx(delta)
    mixed = (1 - q) * without + q * present
    amplified = amplified_epsilon(epsilon, q)
    assert least_delta(without, mixed, amplified) == pytest.approx(q * delta, rel=1e-9)
    assert least_delta(without, mixed, amplified * 0.999) > q * delta * 1.0001


@given(epsilon=st.floats(0, 1000), q=st.floats(1e-300, 1))
@settings(deadline=None)
def test_amplified_epsilon_is_rounded_up(epsilon: float, q: float) -> None:
    with mpmath.workdps(400):
        exact = mpmath.log1p(mpmath.mpf(q) * mpmath.expm1(mpmath.mpf(epsilon)))
        got = amplified_epsilon(epsilon, q)
        assert exact <= got <= min(mpmath.mpf(epsilon), exact * (1 + 1e-11) + 1e-300)


@given(epsilon=st.floats(1e-9, 1000), q=st.floats(1e-300, 1))
@settings(deadline=None)
def test_unamplified_epsilon_is_the_inverse_rounded_down(epsilon: float, q: float) -> None:
    base = unamplified_epsilon(epsilon, q)
    assert 0 < base <= 1000
    assert amplified_epsilon(base, q) <= epsilon
    with mpmath.workdps(400):
        exact = mpmath.log1p(mpmath.expm1(mpmath.mpf(epsilon)) / mpmath.mpf(q))
        assert base >= min(exact, 1000) * (1 - 1e-10)


@pytest.mark.parametrize("function", [amplified_epsilon, unamplified_epsilon])
def test_bad_values_are_named(function) -> None:  # type: ignore[no-untyped-def]
    for epsilon in (math.nan, -1.0, 1001.0):
        with pytest.raises(ParameterError, match="epsilon"):
            function(epsilon, 0.5)
    for q in (0.0, 1.1, math.nan):
        with pytest.raises(ParameterError, match="sampling rate"):
            function(1.0, q)


@pytest.mark.parametrize("q", [0.5, 1.0])
def test_nothing_costs_nothing_before_sampling(q: float) -> None:
    assert amplified_epsilon(0.0, q) == 0.0
    with pytest.raises(ParameterError, match="epsilon"):
        unamplified_epsilon(0.0, q)


def test_the_inverse_keeps_a_sample_of_everything_and_refuses_what_rounding_swallows() -> None:
    assert unamplified_epsilon(0.7, 1.0) == 0.7
    with pytest.raises(ParameterError, match=r"^epsilon is 5e-324"):
        unamplified_epsilon(5e-324, 0.5)
