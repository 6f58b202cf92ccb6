"""What noise that is drawn inexactly adds to δ."""

from __future__ import annotations

import math

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpagent.errors import ParameterError
from dpagent.privacy.accounting.imperfect_noise import imperfect_delta


def test_imperfect_noise() -> None:
    assert imperfect_delta(2.0, 1e-5, 0.0) == 1e-5
    assert imperfect_delta(2.0, 1e-5, 1e-6) == pytest.approx(1e-5 + (1 + math.exp(2)) * 1e-6)
    assert imperfect_delta(2.0, 1e-5, 1e-6) >= 1e-5 + (1 + math.exp(2)) * 1e-6
    assert imperfect_delta(1000.0, 0.0, 1e-30) == 1.0
    assert 0 < imperfect_delta(0.0, 0.0, 1e-300) < 1e-299


@pytest.mark.parametrize("wrong", [-1e-300, math.nan, math.inf])
def test_bad_values_are_named(wrong: float) -> None:
    for name in ("epsilon", "delta", "distance"):
        values = {"epsilon": 1.0, "delta": 1e-5, "distance": 1e-9, name: wrong}
        with pytest.raises(ParameterError, match=rf"^{name} is "):
            imperfect_delta(**values)
    with pytest.raises(ParameterError, match=r"^delta is "):
        imperfect_delta(1.0, math.nextafter(1.0, 2.0), 1e-9)
    assert imperfect_delta(0.0, 1.0, 1e-9) == 1.0


@given(epsilon=st.floats(0, 60), delta=st.floats(0, 1), log_distance=st.floats(-80, 3))
def test_it_is_the_bound_of_the_proof_rounded_up(epsilon: float, delta: float, log_distance: float) -> None:
    distance = math.exp(log_distance)
    with mpmath.workdps(40):
        exact = min(mpmath.mpf(1), delta + (1 + mpmath.exp(epsilon)) * mpmath.mpf(distance))
        got = imperfect_delta(epsilon, delta, distance)
        assert exact <= got <= exact * (1 + mpmath.mpf(2) ** -38)
