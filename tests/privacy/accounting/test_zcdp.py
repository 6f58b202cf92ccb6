"""Zero-concentrated differential privacy: against mpmath, and against the Gaussian exactly computed."""

from __future__ import annotations

import math

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpagent.errors import ParameterError
from dpagent.privacy.accounting.divergences import pure_cumulants
from dpagent.privacy.accounting.zcdp import gaussian_rho, pure_rho, zcdp_epsilon, zcdp_rho


@given(epsilon=st.floats(1e-6, 500), order=st.floats(1.0001, 1e4))
def test_rho_of_a_pure_mechanism_covers_all_orders_and_is_tight(epsilon: float, order: float) -> None:
    rho = pure_rho(epsilon)
    assert rho <= epsilon**2 / 2
    assert pure_cumulants([epsilon], [order])[0, 0] <= order * (order - 1) * rho * (1 + 1e-9)
    at_one = pure_cumulants([epsilon], [1 + 1e-7])[0, 0] / 1e-7
    assert at_one == pytest.approx(rho, rel=1e-4 * (1 + epsilon))


@given(rho=st.floats(1e-12, 1e6), delta=st.floats(1e-100, 0.99), epsilon=st.floats(1e-6, 1e3))
@settings(deadline=None, max_examples=10)
def test_conversions_are_on_the_safe_side_of_their_formula(rho: float, delta: float, epsilon: float) -> None:
    """Whatever order they chose, no order gives less: against the best of many in exact arithmetic."""
    with mpmath.workdps(50):
        log_delta = mpmath.log(mpmath.mpf(delta))

        def delta_at(a: mpmath.mpf, rho: float, epsilon: float) -> mpmath.mpf:
            return (a - 1) * (rho * a - epsilon) - mpmath.log(a - 1) + a * mpmath.log1p(-1 / a)

        def attained(rho: float, epsilon: float) -> mpmath.mpf:
            """The convex log δ at its least, by ternary search."""
            low, high = mpmath.mpf(-45), mpmath.mpf(45)
            for _ in range(200):
                left, right = (2 * low + high) / 3, (low + 2 * high) / 3
                at_left, at_right = (delta_at(1 + mpmath.exp(u), rho, epsilon) for u in (left, right))
                low, high = (low, right) if at_left <= at_right else (left, high)
            return delta_at(1 + mpmath.exp(low), rho, epsilon)

        assert attained(rho, zcdp_epsilon(rho, delta)) <= log_delta
        assert attained(zcdp_rho(epsilon, delta), epsilon) <= log_delta


@pytest.mark.parametrize("rho", [1e-8, 1e-3, 0.1, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
def test_zcdp_converts_as_an_independent_minimisation_does(rho: float, delta: float) -> None:
    with mpmath.workdps(40):

        def epsilon_at(a: mpmath.mpf) -> mpmath.mpf:
            return rho * a + mpmath.log((a - 1) / a) - (mpmath.log(delta) + mpmath.log(a)) / (a - 1)

        # the derivative vanishes at the best order
        def slope(a: mpmath.mpf) -> mpmath.mpf:
            return rho + (mpmath.log(delta) + mpmath.log(a)) / (a - 1) ** 2

        start = 1 + mpmath.sqrt(mpmath.log(1 / mpmath.mpf(delta)) / rho)
        best = mpmath.findroot(slope, (1 + (start - 1) / 10**6, start), solver="bisect", tol=1e-40)
        expected = float(mpmath.mpf(epsilon_at(best)))
    ours = zcdp_epsilon(rho, delta)
    assert ours == pytest.approx(max(expected, 0.0), rel=1e-9, abs=1e-12)
    assert ours <= rho + 2 * math.sqrt(rho * math.log(1 / delta))  # Bun and Steinke's Prop. 1.3
    if ours > 0:
        assert zcdp_rho(ours, delta) == pytest.approx(rho, rel=1e-9)


@pytest.mark.parametrize(("rho", "epsilon"), [(0.1, 1.0), (1.0, 0.5), (0.005, 0.2), (20.0, 60.0)])
def test_zcdp_covers_the_gaussian_exactly_computed(rho: float, epsilon: float) -> None:
    """Against the exact δ of the Gaussian mechanism (Balle and Wang, 2018), and not far from it."""
    mu = math.sqrt(2 * rho)
    exact = float(
        mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)
    )
    assert epsilon <= zcdp_epsilon(rho, exact)  # an upper bound
    assert 12 * exact >= 1 or zcdp_epsilon(rho, 12 * exact) <= epsilon


@given(rho=st.floats(1e-20, 1e12), delta=st.floats(1e-300, 0.999), more=st.floats(1.001, 10))
@settings(max_examples=100)
def test_zcdp_conversion_is_monotone_and_finite_everywhere(rho: float, delta: float, more: float) -> None:
    epsilon = zcdp_epsilon(rho, delta)
    assert 0 <= epsilon < math.inf
    assert zcdp_epsilon(min(rho * more, 1e12), delta) >= epsilon * (1 - 1e-9)
    assert zcdp_epsilon(rho, min(delta * more, 0.9999)) <= epsilon * (1 + 1e-9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gaussian_rho(0.0), "noise multiplier"),
        (lambda: pure_rho(math.inf), "epsilon"),
        (lambda: zcdp_epsilon(-1.0, 0.1), "rho"),
        (lambda: zcdp_epsilon(1.0, 1.0), "delta"),
        (lambda: zcdp_rho(0.0, 0.1), "epsilon"),
        (lambda: zcdp_rho(1.0, 0.0), "delta"),
    ],
)
def test_bad_values_are_named(call: object, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        call()  # type: ignore[operator]
