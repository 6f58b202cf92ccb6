"""Normal form: an accountant gives back each charge as simply as it can be written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpagent.errors import ParameterError
from dpagent.privacy.accounting.normal_form import Component, SampledGaussian, counted, event_of, runs_of
from dpagent.privacy.accounting.pld import PldAccountant
from dpagent.privacy.events import (
    MAX_COUNT,
    ApproximateEvent,
    Event,
    GaussianEvent,
    PoissonSampledEvent,
    SelfComposedEvent,
)

MECHANISMS = st.builds(
    SampledGaussian, st.floats(1e-6, 1e12), st.just(1.0) | st.floats(1e-300, 1)
) | st.builds(ApproximateEvent, st.floats(0, 1000), st.floats(0, 1, exclude_max=True))


@given(mechanism=MECHANISMS, count=st.integers(1, MAX_COUNT))
def test_a_charge_comes_through_its_event(mechanism: Component, count: int) -> None:
    assert runs_of(event_of(mechanism, count)) == (mechanism, count)


@pytest.mark.parametrize(
    "event",
    [
        GaussianEvent(2.0),
        PoissonSampledEvent(0.25, GaussianEvent(2.0)),
        SelfComposedEvent(GaussianEvent(2.0), 3),
        SelfComposedEvent(PoissonSampledEvent(0.25, GaussianEvent(2.0)), 3),
        ApproximateEvent(0.5, 1e-6),
        SelfComposedEvent(ApproximateEvent(0.5, 1e-6), 3),
    ],
)
def test_a_simple_event_is_given_back_as_it_is(event: Event) -> None:
    nested = SelfComposedEvent(SelfComposedEvent(event, 1), 1)
    for charged in (event, nested):
        accountant = PldAccountant()
        accountant.compose(charged)
        assert accountant.events == (event,)


@pytest.mark.parametrize(
    "event",
    [GaussianEvent(2.0), ApproximateEvent(0.5, 1e-6), ApproximateEvent(0.0), ApproximateEvent(1000.0)],
)
def test_a_sample_of_everything_costs_what_the_mechanism_costs(event: Event) -> None:
    """To the last bit: neither ε nor δ is rounded up for nothing."""
    assert runs_of(PoissonSampledEvent(1.0, event)) == runs_of(event)
    assert runs_of(PoissonSampledEvent(1, event)) == runs_of(event)


@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_there_is_one_zero(rate: float) -> None:
    """Equal charges print alike, whichever came first."""
    for event in (ApproximateEvent(-0.0, -0.0), PoissonSampledEvent(rate, ApproximateEvent(-0.0, -0.0))):
        assert repr(runs_of(event)) == repr((ApproximateEvent(0.0, 0.0), 1))


def test_nested_counts_have_one_limit() -> None:
    most = SelfComposedEvent(SelfComposedEvent(GaussianEvent(2.0), 2**30), 2**23)
    assert runs_of(most) == (SampledGaussian(2.0, 1.0), MAX_COUNT)
    with pytest.raises(ParameterError, match=r"^count is "):
        runs_of(SelfComposedEvent(most, 2))
    with pytest.raises(ParameterError, match=r"^count is "):
        counted([GaussianEvent(2.0)], counted([most]))
