"""Schedules: shares of the budget, against the formulas of the papers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpagent.errors import ParameterError
from dpagent.privacy import Schedule


@given(
    kind=st.sampled_from(["uniform", "incrementing", "linear"]),
    step=st.floats(0, 0.99),
    ratio=st.floats(1, 100),
    rounds=st.integers(1, 3000),
)
@settings(deadline=None)
def test_shares_are_positive_rising_and_sum_to_one(kind: str, step: float, ratio: float, rounds: int) -> None:
    shares = Schedule(kind, step=step, ratio=ratio).shares(rounds)  # type: ignore[arg-type]
    assert shares.shape == (rounds,)
    assert (shares > 0).all()
    assert (np.diff(shares) >= 0).all()
    assert shares.sum() == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("rounds", [2, 3, 100, 1001])
@pytest.mark.parametrize("step", [0.0, 0.3, 0.99])
def test_incrementing_follows_the_corrected_closed_form(rounds: int, step: float) -> None:
    rho = 0.7
    d = step * 2 * rho / (rounds * (rounds - 1))
    t = np.arange(1, rounds + 1)
    expected = rho / rounds + (t - (rounds + 1) / 2) * d
    np.testing.assert_allclose(rho * Schedule("incrementing", step=step).shares(rounds), expected, rtol=1e-12)


def test_linear_runs_from_least_to_greatest() -> None:
    shares = Schedule("linear", ratio=5.0).shares(9)
    assert shares[-1] / shares[0] == pytest.approx(5)
    np.testing.assert_allclose(np.diff(shares), np.diff(shares)[0])


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"kind": "falling"}, "schedule kind"),
        ({"step": 1.0}, "schedule step"),
        ({"step": float("nan")}, "schedule step"),
        ({"ratio": 0.5}, "schedule ratio"),
    ],
)
def test_bad_parameters_are_named(arguments: dict[str, object], name: str) -> None:
    with pytest.raises(ParameterError, match=name):
        Schedule(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("rounds", [0, -1, 2_000_000, 1.5])
def test_bad_rounds_are_named(rounds: int) -> None:
    with pytest.raises(ParameterError, match="rounds"):
        Schedule().shares(rounds)
