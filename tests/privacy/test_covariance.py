"""Second moments: bounded, symmetric, and noisy as claimed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from attacks import proven_epsilon
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dpagent.errors import ParameterError
from dpagent.privacy.covariance import FLOAT64_SLACK, MAX_LOT, SecondMoments, leading_directions
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian

ANY_FLOAT32 = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(
    rows=hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.just(6)), elements=ANY_FLOAT32),
    norm=st.floats(1e-4, 1e4),
)
def test_no_record_adds_more_than_the_radius(rows: Any, norm: float) -> None:
    moments = SecondMoments(6, norm)
    parts = [moments.total(row[np.newaxis]) for row in rows]
    for row, part in zip(rows, parts, strict=True):
        assert np.linalg.norm(part) <= moments.radius * (1 + FLOAT64_SLACK)
        if not np.isfinite(row).all():
            assert not part.any()
    np.testing.assert_allclose(moments.total(rows), sum(parts), atol=1e-12 * moments.radius)


def test_a_record_that_warns_where_it_is_converted_is_left_out_like_any_other() -> None:
    """A signalling NaN. A warning takes a thousand times as long as a record, and stands in the log."""
    rows = np.array([[0.5, 0.5], [0.25, 0.0]], np.float32)
    rows.view(np.int32)[0, 1] = 0x7F800001
    assert SecondMoments(2, 1.0).total(rows).tolist() == [0.0625, 0.0, 0.0]


def test_the_matrix_comes_back_and_the_radius_is_reached() -> None:
    rows = np.random.default_rng(0).normal(size=(50, 4)) * 0.1
    moments = SecondMoments(4, 1.0)
    np.testing.assert_allclose(moments.matrix(moments.total(rows)), rows.T @ rows, rtol=1e-12)
    far = moments.total(np.array([[3.0, -4.0, 0.0, 0.0]]))
    assert np.linalg.norm(far) == pytest.approx(1.0)
    np.testing.assert_allclose(moments.matrix(far)[:2, :2], [[0.36, -0.48], [-0.48, 0.64]], atol=1e-15)
    assert moments.total(np.zeros((0, 4))).tolist() == [0.0] * 10


def test_the_slack_covers_the_largest_lot() -> None:
    """L·γ of either side, from the text."""
    unit = MAX_LOT * 2.0**-53
    assert 2 * MAX_LOT * unit / (1 - unit) <= FLOAT64_SLACK


def test_directions_of_a_known_matrix() -> None:
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(5, 5)))[0]
    moments = turn @ np.diag([1.0, 9.0, 4.0, 0.5, 2.0]) @ turn.T
    found = leading_directions(moments, 3)
    assert found.shape == (5, 3)
    assert found.dtype == np.float32
    for direction, column in zip(found.T, (1, 2, 4), strict=True):
        assert abs(float(direction @ turn[:, column])) == pytest.approx(1.0, abs=1e-6)
        assert direction[np.abs(direction).argmax()] > 0


def test_an_attack_on_the_largest_record_proves_no_more_than_claimed() -> None:
    draws, delta = 200_000, 1e-5
    moments = SecondMoments(2, 3.0)
    mechanism = DiscretisedGaussian(
        moments.radius, 1.0, 1.0, moments.dimension, accumulation_slack=FLOAT64_SLACK
    )
    record = mechanism.quantize(moments.total(np.array([[3.0, 3.0]])))
    noise = mechanism.sampler().sample(2 * draws * 3).reshape(2, draws, 3)
    projected = noise @ record / mechanism.sigma_units**2
    shift = float(record @ record) / mechanism.sigma_units**2
    claimed = mechanism.statement(delta).epsilon
    proven = proven_epsilon(projected[1] + shift, projected[0], np.linspace(-2, 4, 25), delta)
    assert 1.5 < proven < claimed


@pytest.mark.parametrize(
    ("arguments", "text"),
    [((0, 1.0), "values is 0"), ((4097, 1.0), "values is 4097"), ((3, 0.0), "record norm is 0"),
     ((3, math.nan), "record norm is nan")],
)  # fmt: skip
def test_bad_values_are_named(arguments: Any, text: str) -> None:
    with pytest.raises(ParameterError, match=text):
        SecondMoments(*arguments)


def test_bad_arrays_are_named() -> None:
    moments = SecondMoments(3, 1.0)
    with pytest.raises(ParameterError, match="records have shape"):
        moments.total(np.zeros((2, 4)))
    with pytest.raises(ParameterError, match="noisy_sum has shape"):
        moments.matrix(np.zeros(5))
    with pytest.raises(ParameterError, match="components is 4"):
        leading_directions(np.eye(3), 4)
