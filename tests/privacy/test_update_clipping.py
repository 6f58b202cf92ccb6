"""Whole updates with a vote on the clip norm: bounded, worth half a vote at the most, and priced together."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from attacks import proven_epsilon
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st

from dpagent.errors import ParameterError
from dpagent.norm import Norm
from dpagent.privacy.accounting.composition import composed
from dpagent.privacy.accounting.pld import PldAccountant
from dpagent.privacy.mechanisms.central import CentralGaussian, CentralLaplace
from dpagent.privacy.update_clipping import COUNT_WEIGHT, UpdateClipping

DELTA = 1e-5
norms = pytest.mark.parametrize("norm", list(Norm))


def order(norm: Norm) -> int:
    return 2 if norm is Norm.L2 else 1


def mechanism(clipping: UpdateClipping, noise: float) -> CentralGaussian | CentralLaplace:
    kind = CentralGaussian if clipping.norm is Norm.L2 else CentralLaplace
    return kind(clipping.radius, noise, 1.0, clipping.dimension)


@norms
@given(
    weight=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    clip_norm=st.floats(1e-9, 1e6),
    scale=st.floats(1e-12, 1e12),
    dimension=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_device_exceeds_the_radius(
    norm: Norm, weight: float, clip_norm: float, scale: float, dimension: int, seed: int
) -> None:
    clipping = UpdateClipping(norm, clip_norm, dimension, weight)
    change = np.random.default_rng(seed).normal(size=dimension) * scale
    sent = clipping.clip(change)
    assert sent.shape == (clipping.dimension,)
    assert np.linalg.norm(sent[:dimension], order(norm)) <= clip_norm * (1 + 1e-12)
    assert np.linalg.norm(sent, order(norm)) <= clipping.radius * (1 + 1e-12)
    if weight:
        within = np.linalg.norm(change, order(norm)) <= clip_norm
        assert sent[-1] == (1 if within else -1) * clipping.largest_vote


@norms
def test_the_radius_is_reached_and_a_device_without_records_sends_zeros(norm: Norm) -> None:
    clipping = UpdateClipping(norm, 0.7, 9, COUNT_WEIGHT)
    for length in (0.7 * (1 - 1e-12), 5.0):
        change = np.full(9, length / 9 if norm is Norm.L1 else length / 3)
        assert np.linalg.norm(clipping.clip(change), order(norm)) == pytest.approx(clipping.radius, rel=1e-9)
    assert not clipping.clip(np.zeros(9)).any()
    assert UpdateClipping(norm, 0.7, 9).radius == 0.7


def test_one_price_is_that_of_two_mechanisms() -> None:
    """Andrew et al., theorem 1: z = (z_Δ⁻² + (2σ_b)⁻²)^(−1/2); and ε split in two for Laplace noise."""
    z, weight = 1.7, 0.5
    clipping = UpdateClipping(Norm.L2, 3.0, 20, weight)
    noise = z * clipping.radius
    of_update, of_count = noise / clipping.clip_norm, noise / (weight * clipping.clip_norm)
    assert (of_update**-2 + (2 * of_count) ** -2) ** -0.5 == pytest.approx(z, rel=1e-12)
    theirs = PLDAccountant()
    for each in (of_update, 2 * of_count):
        theirs.compose(dp_accounting.GaussianDpEvent(each), 7)
    ours = PldAccountant().epsilon_after([mechanism(clipping, z).event] * 7, DELTA)
    assert ours == pytest.approx(theirs.get_epsilon(DELTA), rel=2e-3)
    pure = UpdateClipping(Norm.L1, 3.0, 20, weight)
    scale = pure.radius / 0.8
    assert pure.clip_norm / scale + pure.largest_vote / scale == pytest.approx(0.8, rel=1e-12)


@norms
def test_a_round_costs_the_same_at_every_clip_norm(norm: Norm) -> None:
    found = [mechanism(UpdateClipping(norm, clip_norm, 50, 0.5), 2.0) for clip_norm in (1e-9, 0.3, 1.0, 1e6)]
    assert len({each.event for each in found}) == len({each.sensitivity_units for each in found}) == 1


@norms
def test_the_share_of_devices_within_the_norm_comes_back_from_the_noisy_sum(norm: Norm) -> None:
    """Mean and variance of 20,000 draws, within six standard errors; of 200 devices 130 are within."""
    devices, noise, dimension = 200, 3.0, 4
    clipping = UpdateClipping(norm, 0.5, dimension, COUNT_WEIGHT)
    made = mechanism(clipping, noise)
    changes = np.zeros((devices, dimension))
    changes[:130, 0], changes[130:, 0] = 0.4, 0.6
    rows = np.array([clipping.clip(change) for change in changes], np.float32)
    total = made.constrain(rows).total
    draws = total[-1] + made.sampler().sample(20_000)
    shares = np.array([clipping.share_within(float(each)) for each in draws * made.granularity / devices])
    spread = made.deviation_units * made.granularity / (COUNT_WEIGHT * clipping.clip_norm * devices)
    assert shares.mean() == pytest.approx(130 / devices, abs=6 * spread / math.sqrt(len(shares)) + 1e-6)
    assert shares.std() == pytest.approx(spread, rel=0.1)


@norms
def test_an_attack_on_one_device_with_its_vote_proves_no_more_than_claimed(norm: Norm) -> None:
    """The direction in which update and vote point together is the best for the attacker."""
    clipping = UpdateClipping(norm, 1.0, 1, 1.0)
    made = mechanism(clipping, 1.0)
    device = made.constrain(np.array([clipping.clip(np.array([1.0]))], np.float32)).total
    noise = made.sampler().sample(400_000).reshape(2, 2, -1)
    way = device if norm is Norm.L2 else np.sign(device)
    absent, present = way @ noise[0], way @ (noise[1] + device[:, np.newaxis])
    thresholds = np.linspace(-2, 4, 25) * absent.std()
    delta = DELTA if norm is Norm.L2 else 0.0
    claimed = made.statement(delta).epsilon if norm is Norm.L2 else composed(made.event).epsilon
    assert 0.5 < proven_epsilon(present, absent, thresholds, delta) <= claimed


def test_bad_values_are_named() -> None:
    for arguments, text in (
        ((0.0, 3, 0.5), "clip norm is 0"),
        ((math.inf, 3, 0.5), "clip norm is inf"),
        ((1.0, 0, 0.5), "parameters is 0"),
        ((1.0, 3, 1.5), "count weight is 1.5"),
    ):
        with pytest.raises(ParameterError, match=text):
            UpdateClipping(Norm.L2, *arguments)
