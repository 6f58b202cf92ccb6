"""Clipping by layer and the count for a quantile: one vector of bounded norm, and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from attacks import proven_epsilon
from hypothesis import given
from hypothesis import strategies as st

from dpagent.errors import ParameterError
from dpagent.privacy.clipping import COUNT_WEIGHT, Clipping, adapted_norm
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian
from dpagent.protocol.terms import ClippingTerms
from dpagent.schema.problems import SchemaError

THREE = Clipping((3, 4, 2), (0.5, 2.0, 0.1), (0.2, 0.7, 0.1))


def layers(clipping: Clipping) -> list[slice]:
    """The coordinates of each layer."""
    ends = np.cumsum(clipping.sizes)
    return [slice(end - size, end) for end, size in zip(ends, clipping.sizes, strict=True)]


def contribution(clipping: Clipping, gradient: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What one record adds to a scaled sum, by the definition."""
    clipped = gradient.copy()
    within = 0
    for place, norm in zip(layers(clipping), clipping.norms, strict=True):
        length = float(np.linalg.norm(gradient[place]))
        within += length <= norm
        if length > norm:
            clipped[place] *= norm / length
    return clipping.scaled_sum(clipped, within, 1)


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    weight=st.sampled_from([0.0, 0.2, 1.0]),
    scale=st.floats(1e-3, 1e3),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_record_exceeds_the_radius(sizes: list[int], weight: float, scale: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    norms = (10.0 ** generator.uniform(-3, 3, len(sizes))).tolist()
    if len(sizes) == 1:
        clipping = Clipping.whole(sizes[0], norms[0], count_weight=weight)
    else:
        shares = generator.dirichlet(np.ones(len(sizes)))
        clipping = Clipping(tuple(sizes), tuple(norms), tuple((shares / shares.sum()).tolist()))
    gradient = generator.normal(size=clipping.parameters) * scale
    assert np.linalg.norm(contribution(clipping, gradient)) <= clipping.radius * (1 + 1e-12)


def test_the_radius_is_reached() -> None:
    far = np.full(9, 1e3)
    assert np.linalg.norm(contribution(THREE, far)) == pytest.approx(THREE.radius, rel=1e-12)
    counting = Clipping.whole(9, 0.7, count_weight=COUNT_WEIGHT)
    just_within = np.full(9, 0.7 / 3 * (1 - 1e-12))
    for gradient in (far, just_within):
        assert np.linalg.norm(contribution(counting, gradient)) == pytest.approx(counting.radius, rel=1e-9)
    assert counting.radius == pytest.approx(0.7 * math.sqrt(1.01))
    # Shares of a plan may add up to a little more than 1.
    above = Clipping((4, 5), (0.3, 0.7), (0.5, 0.5 + 9e-10))
    assert np.linalg.norm(contribution(above, far)) == pytest.approx(above.radius, rel=1e-12)


@given(seed=st.integers(0, 2**32 - 1))
def test_a_gradient_comes_back_from_its_scaled_sum(seed: int) -> None:
    total = np.random.default_rng(seed).normal(size=9)
    for clipping in (THREE, Clipping.whole(9, 0.3), Clipping.whole(9, 0.3, count_weight=0.2)):
        np.testing.assert_allclose(clipping.gradient(clipping.scaled_sum(total, 3, 5)), total, rtol=1e-12)


def test_one_norm_changes_nothing() -> None:
    clipping, total = Clipping.whole(5, 0.3), np.arange(5.0)
    assert clipping.scaled_sum(total, 2, 3).tolist() == total.tolist()
    assert (clipping.radius, clipping.dimension, clipping.parameters) == (0.3, 5, 5)


def test_noise_reaches_each_layer_as_separate_mechanisms_would_bring_it() -> None:
    """Layer ℓ with a multiplier of σ/√p_ℓ and a clip norm of C_ℓ has noise of σ·C_ℓ/√p_ℓ (Abadi et al.)."""
    clipping = Clipping((40_000, 40_000), (1.0, 10.0), (0.8, 0.2))
    mechanism = DiscretisedGaussian(clipping.radius, 1.5, 1.0, clipping.dimension, accumulation_slack=0.0)
    noise = mechanism.add_noise(np.zeros(clipping.dimension, np.int64)) * mechanism.granularity
    gradient = clipping.gradient(noise)
    slack = mechanism.sensitivity_units / mechanism.resolution
    for place, norm, share in zip(layers(clipping), clipping.norms, clipping.shares, strict=True):
        assert gradient[place].std() == pytest.approx(1.5 * norm / math.sqrt(share) * slack, rel=0.03)


def test_the_default_shares_let_the_least_noise_through() -> None:
    best = Clipping.layers((100, 10_000, 30), (1.0, 0.3, 2.0))

    def noise(shares: np.ndarray[Any, Any]) -> float:
        return sum(
            size * norm**2 / share for size, norm, share in zip(best.sizes, best.norms, shares, strict=True)
        )

    least = noise(np.array(best.shares))
    generator = np.random.default_rng(1)
    for _ in range(200):
        other = generator.dirichlet(np.ones(3) * 3)
        assert noise(other) >= least * (1 - 1e-12)


def test_an_attack_on_two_layers_and_one_on_the_count_prove_no_more_than_claimed() -> None:
    """Whole noisy sums of the code as shipped, projected on the direction of the record's contribution."""
    draws, delta = 200_000, 1e-5
    layers = Clipping((1, 1), (1.0, 3.0), (0.5, 0.5))
    counting = Clipping.whole(1, 1.0, count_weight=1.0)
    for clipping, gradient in ((layers, np.array([9.0, -9.0])), (counting, np.array([1.0]))):
        mechanism = DiscretisedGaussian(clipping.radius, 1.0, 1.0, clipping.dimension, accumulation_slack=0.0)
        record = mechanism.quantize(contribution(clipping, gradient))
        sampler = mechanism.sampler()
        noise = sampler.sample(2 * draws * 2).reshape(2, draws, 2)
        projected = noise @ record / mechanism.sigma_units**2
        shift = float(record @ record) / mechanism.sigma_units**2
        claimed = mechanism.statement(delta).epsilon
        proven = proven_epsilon(projected[1] + shift, projected[0], np.linspace(-2, 4, 25), delta)
        assert 1.5 < proven < claimed


def test_the_share_within_is_estimated_without_bias() -> None:
    clipping = Clipping.whole(3, 2.0, count_weight=0.2)
    lots = [clipping.scaled_sum(np.zeros(3), within, 50)[-1] for within in (0, 25, 40, 50)]
    assert [clipping.share_within(lot / 50) for lot in lots] == pytest.approx([0.0, 0.5, 0.8, 1.0])


def test_the_norm_follows_the_quantile() -> None:
    """On norms spread evenly over [0, 10), the norm settles at the quantile asked for."""
    norms = np.arange(1000) / 100
    norm = 0.1
    for _ in range(400):
        norm = adapted_norm(norm, float(np.mean(norms <= norm)), quantile=0.7, rate=0.2)
    assert norm == pytest.approx(7.0, rel=0.02)
    assert adapted_norm(1.0, 5.0, quantile=0.5, rate=0.2) == adapted_norm(1.0, 1.0, quantile=0.5, rate=0.2)


def terms(norm: float) -> ClippingTerms:
    """A plan's, with a norm that follows a quantile."""
    return ClippingTerms(norms=[norm], shares=[1.0], count_weight=0.2, accumulation_slack=0.001)


@pytest.mark.parametrize(("share", "end"), [(0.0, 1e6), (1.0, 1e-9)])
def test_a_norm_that_follows_a_quantile_stays_what_a_plan_can_announce(share: float, end: float) -> None:
    norm = 1.0
    for _ in range(100):
        norm = adapted_norm(norm, share, quantile=0.5, rate=1.0)
        assert terms(norm).norms == [norm]
        assert Clipping.whole(3, norm, count_weight=0.2).norms == (norm,)
    assert norm == end
    beyond = end * (1.001 if end > 1 else 0.999)
    with pytest.raises(SchemaError, match="norms"):
        terms(beyond)
    with pytest.raises(ParameterError, match=r"clip norm is .*expected a number in \[1e-09, 1e\+06\]"):
        Clipping.whole(3, beyond)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (((), (), ()), "0 layers"),
        (((1, 2), (1.0,), (1.0,)), "2 layers, 1 clip norms"),
        (((0,), (1.0,), (1.0,)), "size of layer 0 is 0"),
        (((1,), (0.0,), (1.0,)), "clip norm is 0"),
        (((1, 1), (1.0, math.nan), (0.5, 0.5)), "clip norm of layer 1 is nan"),
        (((1, 1), (1.0, 1.0), (0.5, 0.4)), "shares of the layers add up to 0.9"),
        (((1,), (1.0,), (1 - 1e-9,)), "share of the only layer is 0.999999999"),
        (((1, 1), (1.0, 1.0), (1.0, 0.0)), "share of layer 1 is 0"),
        (((1,), (1.0,), (1.0,), 1.5), "count weight is 1.5"),
        (((1, 1), (1.0, 1.0), (0.5, 0.5), 0.2), "expected one norm for all"),
    ],
)
def test_bad_values_are_named(arguments: Any, text: str) -> None:
    with pytest.raises(ParameterError, match=text):
        Clipping(*arguments)


@pytest.mark.parametrize(("sizes", "norms"), [([3, 4], [1.0]), ([3], [1.0, 2.0]), ([], [])])
def test_norms_that_do_not_fit_the_layers_are_named(sizes: list[int], norms: list[float]) -> None:
    with pytest.raises(ParameterError, match=f"{len(sizes)} layers, {len(norms)} clip norms"):
        Clipping.layers(sizes, norms)


def test_bad_quantiles_are_named() -> None:
    for arguments, name in (
        ({"quantile": 1.5, "rate": 0.2}, "quantile"),
        ({"quantile": 0.5, "rate": 0.0}, "rate"),
    ):
        with pytest.raises(ParameterError, match=name):
            adapted_norm(1.0, 0.5, **arguments)
    with pytest.raises(ParameterError, match="clip norm"):
        adapted_norm(0.0, 0.5, quantile=0.5, rate=0.2)
