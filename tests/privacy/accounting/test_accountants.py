"""What every accountant does alike, whatever its bounds; and which one is chosen."""

from __future__ import annotations

import itertools
import math
import random as random_module
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpagent.errors import ParameterError
from dpagent.privacy.accounting.accountant import Accountant
from dpagent.privacy.accounting.basic import BasicAccountant
from dpagent.privacy.accounting.choice import accountant_name, accountant_named, priced
from dpagent.privacy.accounting.normal_form import UnsupportedEventError, runs_of
from dpagent.privacy.accounting.pld import PldAccountant
from dpagent.privacy.accounting.rdp import RdpAccountant
from dpagent.privacy.events import (
    MAX_COUNT,
    ApproximateEvent,
    Event,
    GaussianEvent,
    PoissonSampledEvent,
    SelfComposedEvent,
    poisson_sampled,
)

DELTA = 1e-5
EVERY = pytest.mark.parametrize("make", [PldAccountant, RdpAccountant, BasicAccountant])
Make = Callable[[], Accountant]

MECHANISMS: tuple[Event, ...] = (
    GaussianEvent(3.0),
    PoissonSampledEvent(0.1, GaussianEvent(1.5)),
    ApproximateEvent(0.5),
    ApproximateEvent(0.2, 1e-9),
    PoissonSampledEvent(0.01, ApproximateEvent(1.0)),
    PoissonSampledEvent(0.3, ApproximateEvent(1.0, 1e-8)),
)


def supported(make: Make) -> list[Event]:
    return [event for event in MECHANISMS if make().supports(event)]


def lists(make: Make) -> st.SearchStrategy[list[Event]]:
    charge = st.builds(SelfComposedEvent, st.sampled_from(supported(make)), st.integers(1, 9))
    return st.lists(charge, min_size=1, max_size=8)


def epsilon_of(make: Make, *events: Event) -> float:
    accountant = make()
    accountant.compose(*events)
    return accountant.epsilon(DELTA)


@EVERY
@given(data=st.data(), random=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=25)
def test_neither_order_nor_grouping_changes_a_bit(
    make: Make, data: st.DataObject, random: random_module.Random
) -> None:
    events = data.draw(lists(make))
    together, singly = make(), make()
    together.compose(*events)
    single = [
        event.event for event in events if isinstance(event, SelfComposedEvent) for _ in range(event.count)
    ]
    random.shuffle(single)
    for event in single:
        singly.compose(event)
    expected = together.epsilon(DELTA)
    assert singly.epsilon(DELTA) == expected
    assert singly.events == together.events
    assert epsilon_of(make, *together.events) == expected
    assert make().epsilon_after(iter(events), DELTA) == expected
    assert make().running_epsilon(events, DELTA)[-1] == pytest.approx(expected, rel=1e-3)


@EVERY
def test_asking_charges_nothing(make: Make) -> None:
    accountant, events = make(), supported(make)
    accountant.compose(events[0])
    before = accountant.epsilon(DELTA)
    assert accountant.epsilon_after(events, DELTA) > before
    running = accountant.running_epsilon(events, DELTA)
    assert running.shape == (len(events),)
    assert running[0] > before * (1 - 1e-3)
    assert running[-1] == pytest.approx(accountant.epsilon_after(events, DELTA), rel=1e-3)
    assert accountant.epsilon(DELTA) == accountant.epsilon_after([], DELTA) == before


@EVERY
def test_nothing_costs_nothing(make: Make) -> None:
    assert make().epsilon(DELTA) == 0.0
    assert make().events == ()
    assert make().running_epsilon([], DELTA).shape == (0,)


@EVERY
def test_each_figure_bounds_one_known_in_closed_form(make: Make) -> None:
    """A single (ε, 0)-DP mechanism is (ε, δ)-DP, and one composed of ε = 0 gives nothing away."""
    assert 0 < epsilon_of(make, ApproximateEvent(0.5)) <= 0.5
    assert epsilon_of(make, SelfComposedEvent(ApproximateEvent(0.0), 1000)) == 0.0


@EVERY
def test_more_costs_more_and_less_delta_costs_more(make: Make) -> None:
    for event in supported(make):
        costs = [epsilon_of(make, SelfComposedEvent(event, count)) for count in (1, 2, 7, 50)]
        assert costs == sorted(costs)
        assert costs[0] < costs[-1]
        accountant = make()
        accountant.compose(event)
        assert accountant.epsilon(1e-7) >= accountant.epsilon(1e-3)


@EVERY
@pytest.mark.parametrize("delta", [-1e-5, 1.0, math.nan, math.inf])
def test_a_bad_delta_is_named(make: Make, delta: float) -> None:
    for ask in (
        lambda: make().epsilon(delta),
        lambda: make().epsilon_after([ApproximateEvent(0.1)], delta),
        lambda: make().running_epsilon([], delta),
    ):
        with pytest.raises(ParameterError, match="delta"):
            ask()


@EVERY
@pytest.mark.parametrize(
    ("event", "part"),
    [
        (PoissonSampledEvent(0.1, SelfComposedEvent(ApproximateEvent(0.1), 2)), "holds a SelfComposedEvent"),
        (PoissonSampledEvent(0.1, PoissonSampledEvent(0.1, ApproximateEvent(0.1))), "a PoissonSampledEvent;"),
        (SelfComposedEvent(PoissonSampledEvent(0.1, SelfComposedEvent(GaussianEvent(1.0), 2)), 3), "Self"),
        ("noise", "a str"),
    ],
)
def test_what_no_accountant_prices_is_named_and_nothing_charged(make: Make, event: Event, part: str) -> None:
    accountant = make()
    assert not accountant.supports(event)
    for act in (
        lambda: accountant.compose(ApproximateEvent(0.5), event),
        lambda: accountant.epsilon_after([event], DELTA),
        lambda: accountant.running_epsilon([event], DELTA),
    ):
        with pytest.raises(UnsupportedEventError, match=part):
            act()
    assert accountant.events == ()


@pytest.mark.parametrize(
    ("make", "event", "part"),
    [
        (RdpAccountant, ApproximateEvent(1.0, 1e-6), "delta of an ApproximateEvent is 1e-06"),
        (BasicAccountant, GaussianEvent(1.0), "a GaussianEvent"),
        (BasicAccountant, PoissonSampledEvent(0.5, GaussianEvent(1.0)), "a GaussianEvent"),
    ],
)
def test_what_one_accountant_does_not_price_is_named_and_nothing_charged(
    make: Make, event: Event, part: str
) -> None:
    accountant = make()
    assert not accountant.supports(event)
    assert PldAccountant().supports(event)
    with pytest.raises(UnsupportedEventError, match=part):
        accountant.compose(ApproximateEvent(0.5), event)
    assert accountant.events == ()


@EVERY
def test_more_runs_than_can_be_counted_are_refused_and_nothing_charged(make: Make) -> None:
    accountant = make()
    with pytest.raises(ParameterError, match="count"):
        accountant.compose(SelfComposedEvent(ApproximateEvent(0.1), MAX_COUNT), ApproximateEvent(0.1))
    with pytest.raises(ParameterError, match="count"):
        accountant.compose(SelfComposedEvent(SelfComposedEvent(ApproximateEvent(0.1), 2**30), 2**30))
    assert accountant.epsilon(DELTA) == 0.0


def test_no_bound_is_above_a_looser_one() -> None:
    """Privacy-loss distributions are the tightest, and addition the loosest, of pure mechanisms too."""
    for count in (1, 3, 20, 200):
        for event in (ApproximateEvent(0.3), PoissonSampledEvent(0.2, ApproximateEvent(0.9))):
            costs = [
                epsilon_of(make, SelfComposedEvent(event, count))
                for make in (PldAccountant, RdpAccountant, BasicAccountant)
            ]
            for tighter, looser in itertools.pairwise(costs):
                assert tighter <= looser * (1 + 1e-4)


def test_sums_of_delta_are_exact() -> None:
    """Ten times 0.1 is above 1 in exact arithmetic, as the double 0.1 is."""
    accountant = BasicAccountant()
    accountant.compose(SelfComposedEvent(ApproximateEvent(0.25, 1e-6), 10))
    assert accountant.epsilon(1e-5) == (2.5 if 10 * 1e-6 <= 1e-5 else math.inf)
    assert accountant.epsilon(0.99e-5) == math.inf
    assert BasicAccountant().epsilon_after([ApproximateEvent(1.0)], 0.0) == 1.0


# --- the tight accountant's grid, on mixes -------------------------------------------------------

MIXES = st.lists(
    st.builds(
        poisson_sampled,
        st.builds(GaussianEvent, st.floats(0.4, 20)),
        st.floats(1e-3, 1),
        st.integers(1, 20),
    )
    | st.builds(
        SelfComposedEvent,
        st.builds(ApproximateEvent, st.floats(1e-3, 2), st.just(0.0) | st.floats(1e-12, 1e-8)),
        st.integers(1, 5),
    ),
    min_size=1,
    max_size=6,
)


@given(events=MIXES)
# Few pure runs decide, and their ε do not fit one grid: the grid was 2.5 % loose.
@example(
    events=[ApproximateEvent(0.75), ApproximateEvent(0.77), poisson_sampled(GaussianEvent(2.5), 0.0017, 5)]
)
@example(
    events=[
        SelfComposedEvent(ApproximateEvent(0.168), 4),
        SelfComposedEvent(ApproximateEvent(0.216, 1e-10), 2),
        SelfComposedEvent(ApproximateEvent(0.05), 3),
        SelfComposedEvent(ApproximateEvent(0.048, 1e-10), 5),
        SelfComposedEvent(ApproximateEvent(0.0017, 1e-10), 2),
    ]
)
@settings(max_examples=25, deadline=None)
def test_running_costs_rise_to_the_total(events: list[Event]) -> None:
    running = PldAccountant().running_epsilon(events, DELTA)
    assert running.shape == (len(events),)
    assert (np.diff(running) >= 0).all()
    for count, cost in enumerate(running, start=1):
        alone = epsilon_of(PldAccountant, *events[:count])
        assert alone * 0.99 <= cost
        # on the grid of the whole, which is coarse for the first few
        assert cost <= alone * 1.15 + 0.02 * running[-1] + 1e-6
    assert running[-1] == pytest.approx(alone, rel=0.01)


@given(events=MIXES)
@settings(max_examples=25, deadline=None)
def test_the_grid_of_its_own_choice_costs_little(events: list[Event]) -> None:
    accountant = priced(events, DELTA)[0]
    assert isinstance(accountant, PldAccountant)
    assert accountant.grid is not None
    finer = PldAccountant(grid=max(accountant.grid / 8, 1e-7))
    assert accountant.epsilon_after(events, DELTA) <= finer.epsilon_after(events, DELTA) * 1.002 + 1e-9


# --- normal form ---------------------------------------------------------------------------------


@given(
    rate=st.floats(1e-300, 1),
    epsilon=st.floats(0, 1000),
    delta=st.just(0.0) | st.floats(0, 1, exclude_max=True),
)
def test_a_sampled_mechanism_is_charged_its_amplified_epsilon_and_delta(
    rate: float, epsilon: float, delta: float
) -> None:
    charged, count = runs_of(PoissonSampledEvent(rate, ApproximateEvent(epsilon, delta)))
    assert isinstance(charged, ApproximateEvent)
    assert count == 1
    assert rate * delta <= charged.delta <= rate * delta * (1 + 1e-15) + 5e-324
    assert charged.epsilon <= epsilon
    if epsilon < 700:
        assert charged.epsilon >= math.log1p(rate * math.expm1(epsilon)) * (1 - 1e-15)
    if rate == 1:
        assert (charged.epsilon, charged.delta) == (epsilon, delta)


def test_counts_of_nested_events_multiply() -> None:
    event = SelfComposedEvent(SelfComposedEvent(poisson_sampled(GaussianEvent(2.0), 0.25, 3), 4), 5)
    sampled, count = runs_of(event)
    assert count == 60
    assert sampled == runs_of(PoissonSampledEvent(0.25, GaussianEvent(2.0)))[0]
    assert runs_of(PoissonSampledEvent(1.0, GaussianEvent(2.0))) == runs_of(GaussianEvent(2.0))


# --- the choice ----------------------------------------------------------------------------------


def test_a_job_of_few_different_rounds_is_priced_tightly_and_many_quickly() -> None:
    few = [poisson_sampled(GaussianEvent(2.0 + i % 7), 0.1) for i in range(3000)]
    many = [poisson_sampled(GaussianEvent(2.0 + i / 100), 0.1) for i in range(3000)]
    approximate = [ApproximateEvent(1e-3 + i * 1e-7, 1e-12) for i in range(3000)]
    assert accountant_name(few, DELTA) == "pld"
    assert accountant_name(many, DELTA) == "rdp"
    assert accountant_name(approximate, DELTA) == "basic"
    assert accountant_name([*many, approximate[0]], DELTA) == "pld"
    assert accountant_name([ApproximateEvent(1.0)], 0.0) == "basic"
    with pytest.raises(UnsupportedEventError, match="GaussianEvent"):
        accountant_name(few, 0.0)
    with pytest.raises(ParameterError, match="events are none"):
        accountant_name([], DELTA)


@pytest.mark.parametrize("rate", [5e-324, 1e-308, 1e-300])
@pytest.mark.parametrize("noise", [0.05, 1.0, 100.0, 10_000.0])
@pytest.mark.parametrize("kind", [GaussianEvent, lambda noise: ApproximateEvent(1 / noise)])
@pytest.mark.parametrize("rounds", [1, 2])
def test_a_job_at_the_least_of_rates_has_a_price(
    noise: float, rate: float, kind: Callable[[float], Event], rounds: int
) -> None:
    """A plan may announce any rate above 0, and a device prices it before anything else."""
    events = [poisson_sampled(kind(sigma), rate) for sigma in (noise, 2 * noise)[:rounds]]
    account = priced(events, 1e-5)[0]
    assert account.epsilon_after(events, 1e-5) <= 1e-12


def test_an_accountant_made_by_name_and_grid_says_the_same() -> None:
    events = [poisson_sampled(GaussianEvent(sigma), 0.1, 3) for sigma in (3.0, 2.0)]
    chosen = priced(events, DELTA)[0]
    assert isinstance(chosen, PldAccountant)
    again = accountant_named(chosen.name, grid=chosen.grid)
    assert again.epsilon_after(events, DELTA) == chosen.epsilon_after(events, DELTA)
    assert chosen.epsilon_after(events, DELTA) == pytest.approx(epsilon_of(PldAccountant, *events), rel=1e-4)
    with pytest.raises(ParameterError, match=r"grid is .*expected none"):
        accountant_named("rdp", grid=0.1)
    with pytest.raises(ParameterError, match="accountant is 'moments'; expected one of pld, rdp, basic"):
        accountant_named("moments")  # type: ignore[arg-type]


# --- events --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: GaussianEvent(0.0), "noise multiplier"),
        (lambda: GaussianEvent(math.inf), "noise multiplier"),
        (lambda: ApproximateEvent(-0.1), "epsilon"),
        (lambda: ApproximateEvent(1001.0), "epsilon"),
        (lambda: ApproximateEvent(1.0, 1.0), "delta"),
        (lambda: PoissonSampledEvent(0.0, GaussianEvent(1.0)), "sampling rate"),
        (lambda: PoissonSampledEvent(1.1, GaussianEvent(1.0)), "sampling rate"),
        (lambda: PoissonSampledEvent(0.5, 1.0), "event is 1.0"),  # type: ignore[arg-type]
        (lambda: SelfComposedEvent(GaussianEvent(1.0), 0), "count"),
        (lambda: SelfComposedEvent(GaussianEvent(1.0), MAX_COUNT + 1), "count"),
        (lambda: SelfComposedEvent(None, 1), "event is None"),  # type: ignore[arg-type]
    ],
)
def test_bad_events_are_named(make: Callable[[], Event], name: str) -> None:
    with pytest.raises(ParameterError, match=name):
        make()
