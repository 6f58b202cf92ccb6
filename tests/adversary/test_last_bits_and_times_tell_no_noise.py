"""An observer looks at the last bits of what is released, and at how long a draw took.

Claim: the released numbers are integers, each of which every candidate reaches, and a draw takes a time that
    does not depend on what is drawn: neither bits nor times tell more than the values do.
Parameters: sensitivity 1/32, ε = 1 and 20, 400 releases; discrete Laplace and Gaussian noise of scale 50,
    1,500 draws.

Power: the same programs name the true candidate for nearly every release of numpy's polar method and of the
    Box-Muller transform, for a tenth or more of those of numpy's Ziggurat, and by its time for nine in ten of
    a sampler that loops until it accepts (`python -m benchmarks reproduce_m5`). The correlation of 1,500
    times and independent sizes exceeds 0.2 with probability 10⁻¹⁴; that of the looping sampler is 0.8.

Outcome: ours are decided never, theirs as published.
"""

from __future__ import annotations

import pytest

from benchmarks.floating_point import BoxMuller, Integers, Noise, Polar, Ziggurat, attack
from benchmarks.sampling_time import looping_laplace, timed_attack
from dpagent.privacy.noise.discrete_gaussian import DiscreteGaussianSampler
from dpagent.privacy.noise.discrete_laplace import DiscreteLaplaceSampler

RELEASES = 400


@pytest.mark.parametrize("epsilon", [1.0, 20.0])
@pytest.mark.parametrize(("noise", "least"), [(Polar(), 0.8), (BoxMuller(), 0.8), (Ziggurat(), 0.05)])
def test_noise_in_floating_point_is_seen_through(noise: Noise, least: float, epsilon: float) -> None:
    outcome = attack(noise, epsilon, releases=RELEASES)
    assert outcome.decided > least
    assert outcome.right > 0.98
    assert outcome.unexplained < 0.05


@pytest.mark.parametrize("epsilon", [1.0, 20.0])
def test_integers_are_not(epsilon: float) -> None:
    outcome = attack(Integers(1 << 20), epsilon, releases=RELEASES)
    assert (outcome.decided, outcome.unexplained) == (0.0, 0.0)
    assert outcome.success == 0.5


@pytest.mark.parametrize("sampler", [DiscreteLaplaceSampler(50.0), DiscreteGaussianSampler(50.0)])
def test_a_draw_takes_a_time_that_does_not_depend_on_what_is_drawn(
    sampler: DiscreteLaplaceSampler | DiscreteGaussianSampler,
) -> None:
    assert abs(timed_attack(lambda: int(sampler.sample(1)[0]), 50, releases=750).correlation) < 0.2
    looping = timed_attack(looping_laplace(50), 50, releases=750)
    assert looping.correlation > 0.3
    assert looping.success > looping.without + 0.05
