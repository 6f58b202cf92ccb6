"""The discretised Gaussian at the ends of its ranges: drawn, priced and refused where it says."""

from __future__ import annotations

import math

import pytest

from dpagent.errors import ParameterError
from dpagent.privacy.accounting.gaussian_loss import MIN_SIGMA_UNITS
from dpagent.privacy.accounting.pld import PldAccountant
from dpagent.privacy.events import GaussianEvent, poisson_sampled
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian, finest_resolution
from dpagent.privacy.mechanisms.mechanism import Query
from dpagent.privacy.noise.discrete_gaussian import MAX_SIGMA, MIN_SIGMA


def test_noise_is_drawn_and_priced_up_to_the_ends_of_its_ranges() -> None:
    """At 62 units to a clip norm and d = 1, the sensitivity is 64: products with it are exact."""

    def at(units: float) -> DiscretisedGaussian:
        return DiscretisedGaussian(1.0, math.nextafter(units, 0) / 64, 0.1, 1, resolution=62)

    for units in (MIN_SIGMA, MAX_SIGMA):
        assert at(units).sigma_units == units
    for beyond in (math.nextafter(MIN_SIGMA, 0), math.nextafter(MAX_SIGMA, math.inf)):
        with pytest.raises(ParameterError) as caught:
            at(beyond)
        assert f"{MIN_SIGMA / 64:.3g} to {MAX_SIGMA / 64:.3g}" in str(caught.value)
    finest = at(MIN_SIGMA_UNITS)
    finest.require_noise_as_priced(1, 1.0, 1e-5)
    assert finest.round_cost(1e-5)[0] == PldAccountant().epsilon_after([finest.event], 1e-5)
    with pytest.raises(ParameterError, match=f"{MIN_SIGMA_UNITS:,}"):
        at(math.nextafter(MIN_SIGMA_UNITS, 0)).require_noise_as_priced(1, 1.0, 1e-5)


def test_the_finest_grid_of_the_greatest_noise_has_one_unit() -> None:
    assert finest_resolution(MAX_SIGMA / 2) == 1
    with pytest.raises(ParameterError) as caught:
        finest_resolution(math.nextafter(MAX_SIGMA / 2, math.inf))
    assert f"{MAX_SIGMA / 2:g}" in str(caught.value)
    with pytest.raises(ParameterError, match=r"^noise multiplier"):
        finest_resolution(0.0)


@pytest.mark.parametrize("rate", [0.0, math.nan, math.nextafter(1.0, 2.0)])
def test_a_rate_is_above_0_and_at_most_1(rate: float) -> None:
    with pytest.raises(ParameterError, match=r"^sampling rate"):
        DiscretisedGaussian(1.0, 2.0, rate, 10)
    for taken in (5e-324, 1.0):
        DiscretisedGaussian(1.0, 2.0, taken, 10)


def test_a_step_is_one_unless_more_are_asked_for() -> None:
    query = Query(clip_norm=1.0, accumulation_slack=0.0, dimension=3, sampling_rate=0.1)
    built = DiscretisedGaussian.build(query, 2.0, {"resolution": 1024})
    assert (
        built.event == DiscretisedGaussian.family(0.1).event(2.0) == poisson_sampled(GaussianEvent(2.0), 0.1)
    )
    assert built.statement(1e-5).mechanism == DiscretisedGaussian.name
