"""Events: ranges with both ends, and the short form."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dpagent.errors import ParameterError
from dpagent.privacy.events import (
    MAX_COUNT,
    MAX_EVENT_EPSILON,
    SIGMA_RANGE,
    ApproximateEvent,
    Event,
    GaussianEvent,
    PoissonSampledEvent,
    SelfComposedEvent,
    poisson_sampled,
)

GAUSSIAN = GaussianEvent(2.0)


@pytest.mark.parametrize(
    ("name", "make", "taken", "refused"),
    [
        ("noise multiplier", GaussianEvent, SIGMA_RANGE, (0.99e-6, 1.01e12)),
        ("epsilon", ApproximateEvent, (0.0, MAX_EVENT_EPSILON), (-5e-324, 1000.1)),
        ("delta", lambda delta: ApproximateEvent(1.0, delta), (0.0, 1 - 2**-53), (-5e-324, 1.0)),
        ("sampling rate", lambda rate: PoissonSampledEvent(rate, GAUSSIAN), (5e-324, 1.0), (0.0, 1.01)),
        ("count", lambda count: SelfComposedEvent(GAUSSIAN, count), (1, MAX_COUNT), (0, MAX_COUNT + 1, 2.0)),
    ],
)
def test_a_range_holds_its_ends_and_nothing_beyond(
    name: str, make: Callable[[float], Event], taken: tuple[float, ...], refused: tuple[float, ...]
) -> None:
    for value in taken:
        make(value)
    for value in refused:
        with pytest.raises(ParameterError, match=rf"^{name} is "):
            make(value)


def test_the_short_form_runs_once_unless_more_is_said() -> None:
    assert poisson_sampled(GAUSSIAN, 0.25) == SelfComposedEvent(PoissonSampledEvent(0.25, GAUSSIAN), 1)
    assert poisson_sampled(GAUSSIAN, 0.25, 3) == SelfComposedEvent(PoissonSampledEvent(0.25, GAUSSIAN), 3)
