"""Per-layer clipping and noise: the cost of one Gaussian mechanism, and no more."""

from __future__ import annotations

import math

import numpy as np
import pytest
from attacks import proven_epsilon
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from dpagent.errors import ParameterError
from dpagent.privacy import PldAccountant
from dpagent.privacy.accounting import cumulants
from dpagent.privacy.gaussian import DiscretisedGaussian
from dpagent.privacy.per_layer import Layer, PerLayerGaussian

ANY_FLOAT32 = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
LAYERS = (Layer("conv", 3, 0.5, 0.2), Layer("dense", 4, 2.0, 0.7), Layer("bias", 2, 0.1, 0.1))


@given(batch=hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.just(9)), elements=ANY_FLOAT32))
@settings(deadline=None)
def test_no_layer_of_no_record_exceeds_its_sensitivity(batch: NDArray[np.float32]) -> None:
    m = PerLayerGaussian(LAYERS, 2.0, 0.1)
    whole = m.constrain(batch)
    assert whole.excluded == np.count_nonzero(~np.isfinite(batch).all(axis=1))
    rows = [m.constrain(row[np.newaxis]) for row in batch]
    np.testing.assert_array_equal(whole.total, sum(row.total for row in rows))
    for row, (total, excluded) in zip(batch, rows, strict=True):
        assert excluded == (not np.isfinite(row).all())
        if excluded:
            assert not total.any()
        for part, place in zip(m.parts, m.slices, strict=True):
            assert sum(int(x) ** 2 for x in total[place]) <= part.sensitivity_steps**2


def test_layers_are_clipped_each_by_itself() -> None:
    m = PerLayerGaussian(LAYERS, 2.0, 0.1)
    gradient = np.array([[3, 4, 0, 0.1, 0.2, 0.2, 0, -7, 0]], dtype=np.float32)
    got = m.in_units(m.constrain(gradient).total)
    np.testing.assert_allclose(got, [0.3, 0.4, 0, 0.1, 0.2, 0.2, 0, -0.1, 0], atol=3e-5)
    assert m.granularities == tuple(layer.clip_norm / 65_536 for layer in LAYERS)


@given(
    shares=st.lists(st.floats(1e-3, 1), min_size=1, max_size=8),
    noise=st.floats(0.1, 50),
)
@settings(deadline=None)
def test_the_layers_multipliers_make_up_the_whole(shares: list[float], noise: float) -> None:
    layers = tuple(Layer(str(i), 1 + i, 1.0, share / sum(shares)) for i, share in enumerate(shares))
    m = PerLayerGaussian(layers, noise, 0.1, fine_steps=1000)
    # from the noise as it is drawn and the sensitivity as it is
    inverse = math.fsum((part.sensitivity_steps / part.sigma_steps) ** 2 for part in m.parts)
    assert inverse <= 1 / noise**2
    assert inverse == pytest.approx(1 / noise**2, rel=1e-12)
    assert m.event.noise_multiplier == noise


def gaussian(sigma: float, shift: int, reach: int) -> NDArray[np.float64]:
    """N_ℤ(shift, σ²) on −reach..reach."""
    weights = np.exp(-((np.arange(-reach, reach + 1) - shift) ** 2) / (2 * sigma**2))
    return np.asarray(weights / weights.sum())


@pytest.mark.parametrize("rate", [1.0, 0.2])
def test_the_renyi_divergence_is_within_that_of_one_mechanism(rate: float) -> None:
    """Two layers of one coordinate each with noise of different size, enumerated on a grid."""
    layers = (Layer("a", 1, 1.0, 0.3), Layer("b", 1, 1.0, 0.7))
    m = PerLayerGaussian(layers, 1.1, rate, fine_steps=3)
    sigmas, shifts = [p.sigma_steps for p in m.parts], [p.sensitivity_steps for p in m.parts]
    reach = 90
    without = np.multiply.outer(*(gaussian(s, 0, reach) for s in sigmas))
    present = np.multiply.outer(*(gaussian(s, x, reach) for s, x in zip(sigmas, shifts, strict=True)))
    present = (1 - rate) * without + rate * present
    orders = (2.0, 3.0, 5.0)
    bounds = cumulants(np.array([1.1]), rate, orders)[0]
    for order, bound in zip(orders, bounds, strict=True):
        for first, second in ((present, without), (without, present)):
            attained = math.log(float(np.sum(first**order * second ** (1 - order))))
            assert attained <= bound * (1 + 1e-9)
            assert first is without or attained > 0.9 * bound  # the bound is not idle


def test_one_layer_is_the_plain_mechanism() -> None:
    m = PerLayerGaussian((Layer("all", 50, 0.7, 1.0),), 1.5, 0.1, steps=2)
    plain = DiscretisedGaussian(0.7, 1.5, 0.1, 50, steps=2)
    batch = np.random.default_rng(0).normal(size=(5, 50)).astype(np.float32)
    np.testing.assert_array_equal(m.constrain(batch).total, plain.constrain(batch).total)
    assert m.event == plain.event
    assert m.statement(1e-5).epsilon == plain.statement(1e-5).epsilon
    assert m.parts[0].sigma_steps == pytest.approx(plain.sigma_steps, rel=1e-14)
    assert m.parts[0].sigma_steps >= plain.sigma_steps


def test_noise_has_each_layers_size() -> None:
    layers = (Layer("a", 40_000, 1.0, 0.8), Layer("b", 40_000, 10.0, 0.2))
    m = PerLayerGaussian(layers, 1.0, 1.0)
    noise = m.in_units(m.perturb(np.zeros(80_000, dtype=np.int64)))
    for part, place in zip(m.parts, m.slices, strict=True):
        assert noise[place].std() == pytest.approx(part.sigma_steps * part.granularity, rel=0.03)


def test_an_attack_on_two_layers_proves_no_more_than_claimed() -> None:
    """The best test statistic: each layer weighed by its shift over its variance."""
    draws, delta = 200_000, 1e-5
    m = PerLayerGaussian((Layer("a", 1, 1.0, 0.5), Layer("b", 1, 3.0, 0.5)), 1.0, 1.0)
    record = m.constrain(np.array([[9.0, -9.0]], dtype=np.float32)).total
    weights = [record[i] / part.sigma_steps**2 for i, part in enumerate(m.parts)]
    noise = [[part.sampler().sample(draws) for part in m.parts] for _ in range(2)]
    without = sum(w * x for w, x in zip(weights, noise[0], strict=True))
    present = sum(w * (x + s) for w, x, s in zip(weights, noise[1], record, strict=True))
    claimed = m.statement(delta).epsilon
    assert 1.5 < proven_epsilon(present, without, np.linspace(-2, 4, 25), delta) < claimed


def test_the_record_states_the_maths() -> None:
    m = PerLayerGaussian(LAYERS, 2.0, 0.1, steps=3)
    assert (m.name, m.unit, m.adjacency) == ("per-layer-gaussian", "record", "add-or-remove-one")
    assert (m.trust, m.norm, m.dimension) == ("none", "L2", 9)
    assert m.slices == (slice(0, 3), slice(3, 7), slice(7, 9))
    assert (m.event.noise_multiplier, m.event.sampling_rate, m.event.steps) == (2.0, 0.1, 3)
    statement = m.statement(1e-5)
    assert statement.epsilon == PldAccountant().epsilon_after([m.event], 1e-5)
    assert statement.delta >= 1e-5
    assert 0 < m.statistical_distance < 1e-25


def test_bad_values_are_named() -> None:
    with pytest.raises(ParameterError, match="layers are empty"):
        PerLayerGaussian((), 1.0, 0.1)
    with pytest.raises(ParameterError, match="same name"):
        PerLayerGaussian((Layer("a", 1, 1.0, 0.5), Layer("a", 1, 1.0, 0.5)), 1.0, 0.1)
    with pytest.raises(ParameterError, match="shares of the layers add up to"):
        PerLayerGaussian((Layer("a", 1, 1.0, 0.5), Layer("b", 1, 1.0, 0.4)), 1.0, 0.1)
    for arguments, name in (
        ((0, 1.0, 0.5), "size of layer 'a'"),
        ((1, 0.0, 0.5), "clip norm of layer 'a'"),
        ((1, 1.0, 0.0), "share of layer 'a'"),
        ((1, 1.0, math.nan), "share of layer 'a'"),
    ):
        with pytest.raises(ParameterError, match=name):
            Layer("a", *arguments)
    for noise in (0.0, math.nan, 1e5):
        with pytest.raises(ParameterError, match="noise multiplier"):
            PerLayerGaussian(LAYERS, noise, 0.1)
    m = PerLayerGaussian(LAYERS, 1.0, 0.1)
    with pytest.raises(ParameterError, match="gradients"):
        m.constrain(np.zeros((1, 8), dtype=np.float32))
    with pytest.raises(ParameterError, match="total"):
        m.perturb(np.zeros(8, dtype=np.int64))
