"""Filters, against every adversary there is over a few small mechanisms.

A mechanism here gives one of two outputs, so its two worlds are two pairs of numbers. An adversary
chooses the next one, or stops, after each output; backward induction over all paths gives the
greatest δ that any of them attains at the ε promised, computed from the probabilities alone.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
from collections.abc import Callable, Sequence

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dpagent.errors import ParameterError, PlanError
from dpagent.privacy.accounting.divergences import ORDERS
from dpagent.privacy.accounting.filters import BudgetExceededError, RenyiFilter, ZcdpFilter, best_order
from dpagent.privacy.accounting.normal_form import UnsupportedEventError, runs_of
from dpagent.privacy.accounting.rdp import RdpAccountant, renyi_divergences
from dpagent.privacy.accounting.zcdp import zcdp_epsilon
from dpagent.privacy.events import ApproximateEvent, Event, GaussianEvent, SelfComposedEvent, poisson_sampled

Pair = tuple[float, float]  # probabilities of the two outputs
Coin = tuple[Pair, Pair, Event]  # without the record, with it, and what it is charged as
Counts = tuple[int, ...]
Rule = Callable[[Counts, int], bool]  # whether one more of a mechanism is admitted after so many


def divergences_of(events: Sequence[Event], orders: Sequence[float] = ORDERS) -> NDArray[np.float64]:
    return renyi_divergences([runs_of(event) for event in events], orders)


def randomised_response(epsilon: float) -> Coin:
    truth = 1 / (1 + math.exp(-epsilon))
    return (truth, 1 - truth), (1 - truth, truth), ApproximateEvent(epsilon)


def skewed(epsilon: float, probability: float) -> Coin:
    """A pure mechanism whose two directions differ."""
    with_it = probability * math.exp(epsilon)
    return (probability, 1 - probability), (with_it, 1 - with_it), ApproximateEvent(epsilon)


def thresholded(sigma: float, rate: float, above: int) -> Coin:
    """Whether a sampled discrete Gaussian release of one record or none is above a threshold."""

    def tail(centre: int) -> float:
        weights = {x: math.exp(-((x - centre) ** 2) / (2 * sigma**2)) for x in range(-60, 61)}
        return math.fsum(w for x, w in weights.items() if x > above) / math.fsum(weights.values())

    absent, present = tail(0), (1 - rate) * tail(0) + rate * tail(1)
    return (absent, 1 - absent), (present, 1 - present), poisson_sampled(GaussianEvent(sigma), rate)


def probabilities(coins: Sequence[Coin], counts: Counts, firsts: Counts) -> Pair:
    """Of one path on which mechanism i ran counts[i] times and gave its first output firsts[i] times."""
    worlds = []
    for world in (0, 1):
        worlds.append(
            math.prod(
                coin[world][0] ** k * coin[world][1] ** (n - k)
                for coin, n, k in zip(coins, counts, firsts, strict=True)
            )
        )
    return worlds[0], worlds[1]


def more(counts: Counts, i: int) -> Counts:
    return (*counts[:i], counts[i] + 1, *counts[i + 1 :])


def worst_delta(coins: Sequence[Coin], admits: Rule, epsilon: float) -> float:
    """The greatest δ at ``epsilon`` over all adaptive adversaries and both directions."""

    def at_best(swapped: bool) -> float:
        # Order makes no difference to what follows, so paths with the same counts are one.
        @functools.cache
        def attained(counts: Counts, firsts: Counts) -> float:
            p, q = probabilities(coins, counts, firsts)
            if swapped:
                p, q = q, p
            best = max(0.0, p - math.exp(epsilon) * q)
            for i in range(len(coins)):
                if admits(counts, i):
                    after = more(counts, i)
                    best = max(best, attained(after, more(firsts, i)) + attained(after, firsts))
            return best

        nothing = (0,) * len(coins)
        return attained(nothing, nothing)

    return max(at_best(False), at_best(True))


def rule_of(make: Callable[[], RenyiFilter | ZcdpFilter], coins: Sequence[Coin]) -> Rule:
    """What a filter says, charged one by one."""

    @functools.cache
    def charged(counts: Counts) -> RenyiFilter | ZcdpFilter:
        if not any(counts):
            return make()
        last = max(i for i, count in enumerate(counts) if count)
        before = (*counts[:last], counts[last] - 1, *counts[last + 1 :])
        privacy_filter = copy.deepcopy(charged(before))
        privacy_filter.charge([coins[last][2]])
        return privacy_filter

    return lambda counts, i: charged(counts).admits([coins[i][2]])


COINS = (randomised_response(0.4), randomised_response(1.0), skewed(0.7, 0.2))
SAMPLED = (thresholded(1.2, 0.5, 0), thresholded(0.8, 0.2, 1), randomised_response(0.3))
UNSAMPLED = (thresholded(2.0, 1.0, 0), thresholded(4.0, 1.0, 1), randomised_response(0.7))


@pytest.mark.parametrize("coins", [COINS, SAMPLED, UNSAMPLED], ids=["pure", "sampled", "unsampled"])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.3), (1.0, 0.2), (2.0, 0.05), (3.0, 0.01)])
def test_no_adaptive_adversary_gets_past_the_renyi_filter(
    coins: tuple[Coin, ...], epsilon: float, delta: float
) -> None:
    order = best_order(epsilon, delta, [event for _, _, event in coins])
    for chosen in (order, 2 * order):
        rule = rule_of(lambda chosen=chosen: RenyiFilter(epsilon, delta, chosen), coins)  # type: ignore[misc]
        assert any(rule((0,) * len(coins), i) for i in range(len(coins)))
        assert worst_delta(coins, rule, epsilon) <= delta


@pytest.mark.parametrize("coins", [COINS, UNSAMPLED], ids=["pure", "unsampled"])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.3), (1.0, 0.2), (2.0, 0.05), (3.0, 0.01)])
def test_no_adaptive_adversary_gets_past_the_zcdp_filter(
    coins: tuple[Coin, ...], epsilon: float, delta: float
) -> None:
    attained = worst_delta(coins, rule_of(lambda: ZcdpFilter(epsilon, delta), coins), epsilon)
    assert attained <= delta


def test_the_search_finds_what_breaks_a_filter_by_exact_prices_of_fixed_charges() -> None:
    """Planted: it admits while the charges so far, had they been fixed in advance, would cost at most δ."""
    epsilon, delta = 2.0, 0.05

    def price(counts: Counts) -> float:
        excess = [0.0, 0.0]
        for firsts in itertools.product(*(range(count + 1) for count in counts)):
            paths = math.prod(math.comb(n, k) for n, k in zip(counts, firsts, strict=True))
            p, q = probabilities(COINS, counts, firsts)
            excess[0] += paths * max(0.0, p - math.exp(epsilon) * q)
            excess[1] += paths * max(0.0, q - math.exp(epsilon) * p)
        return max(excess)

    priced = functools.cache(price)
    assert worst_delta(COINS, lambda counts, i: priced(more(counts, i)) <= delta, epsilon) > 1.2 * delta


def test_a_filter_that_takes_the_best_order_as_it_goes_is_another_than_every_one_of_ours() -> None:
    """Planted: it admits what any order of the accountant still allows. No single order allows both of these.

    With δ divided among the orders it is sound again: every order then has a δ of its own.
    """
    epsilon, delta = 2.0, 1e-5
    few_large, many_small = [ApproximateEvent(1.9)], [poisson_sampled(GaussianEvent(50.0), 1.0, 300)]

    def admitted_by_some(events: Sequence[Event], delta: float, orders: Sequence[float]) -> bool:
        return any(
            RenyiFilter(epsilon, delta, order).admits(events)
            for order in orders
            if order_is_usable(order, delta)
        )

    def order_is_usable(order: float, delta: float) -> bool:
        try:
            RenyiFilter(epsilon, delta, order)
        except PlanError:
            return False
        return True

    assert all(admitted_by_some(events, delta, ORDERS) for events in (few_large, many_small))
    both = [
        order
        for order in ORDERS
        if order_is_usable(order, delta)
        and all(RenyiFilter(epsilon, delta, order).admits(events) for events in (few_large, many_small))
    ]
    assert both == []


def test_orders_that_share_delta_out_are_sound_together() -> None:
    """The rule that the module's text proves: any of m orders may admit, each with δ/m."""
    epsilon, delta, orders = 2.0, 0.1, (3.0, 8.0)
    parts = [
        rule_of(lambda order=order: RenyiFilter(epsilon, delta / 2, order), COINS)  # type: ignore[misc]
        for order in orders
    ]

    def some(counts: Counts, i: int) -> bool:
        return any(reached(part, counts) and part(counts, i) for part in parts)

    def reached(part: Rule, counts: Counts) -> bool:
        try:
            part(counts, 0)
        except BudgetExceededError:  # this order was exhausted on the way
            return False
        return True

    assert 0 < worst_delta(COINS, some, epsilon) <= delta


events_of_all_sorts = st.lists(
    st.one_of(
        st.builds(
            poisson_sampled,
            st.builds(GaussianEvent, st.floats(0.5, 200)),
            st.one_of(st.just(1.0), st.floats(1e-4, 1)),
            st.integers(1, 50),
        ),
        st.builds(SelfComposedEvent, st.builds(ApproximateEvent, st.floats(0, 2)), st.integers(1, 50)),
    ),
    min_size=1,
    max_size=30,
)
unsampled_events = st.lists(
    st.builds(
        SelfComposedEvent,
        st.builds(GaussianEvent, st.floats(0.5, 200)) | st.builds(ApproximateEvent, st.floats(0, 2)),
        st.integers(1, 50),
    ),
    min_size=1,
    max_size=30,
)


@given(
    events=events_of_all_sorts,
    epsilon=st.floats(0.05, 20),
    delta=st.sampled_from([1e-9, 1e-5, 0.05]),
    order=st.floats(1.5, 300),
)
@settings(deadline=None, max_examples=80)
def test_what_the_renyi_filter_admits_is_never_past_its_budget(
    events: list[Event], epsilon: float, delta: float, order: float
) -> None:
    try:
        privacy_filter = RenyiFilter(epsilon, delta, order)
    except PlanError:
        assert epsilon <= (-math.log(delta) - math.log(order)) / (order - 1)
        return
    admitted: list[Event] = []
    for event in events:
        fits, before = privacy_filter.admits([event]), privacy_filter.to_state()
        try:
            privacy_filter.charge([event])
        except BudgetExceededError:
            assert not fits
            assert privacy_filter.to_state() == before
        else:
            assert fits
            admitted.append(event)
    if not admitted:
        assert privacy_filter.spent == 0
        return
    spent = math.fsum(divergences_of(admitted, [order])[:, 0])
    with mpmath.workdps(40):
        a = mpmath.mpf(order)
        at_order = spent + mpmath.log((a - 1) / a) - (mpmath.log(delta) + mpmath.log(a)) / (a - 1)
    assert at_order <= epsilon
    assert spent <= privacy_filter.spent <= spent * (1 + 2e-10) + len(admitted) * 2.0**-59
    if order in ORDERS:
        accountant = RdpAccountant()
        accountant.compose(*admitted)
        assert accountant.epsilon(delta) <= epsilon * (1 + 1e-8)


@given(events=unsampled_events, epsilon=st.floats(0.05, 20), delta=st.sampled_from([1e-9, 1e-5, 0.05]))
@settings(deadline=None, max_examples=60)
def test_what_the_zcdp_filter_admits_is_never_past_its_budget(
    events: list[SelfComposedEvent], epsilon: float, delta: float
) -> None:
    privacy_filter = ZcdpFilter(epsilon, delta)
    rho = mpmath.mpf(0)
    for event in events:
        if privacy_filter.admits([event]):
            privacy_filter.charge([event])
            if isinstance(event.event, GaussianEvent):
                rho += event.count / (2 * mpmath.mpf(event.event.noise_multiplier) ** 2)
            elif isinstance(event.event, ApproximateEvent):
                epsilon_1 = event.event.epsilon
                rho += event.count * epsilon_1 * mpmath.tanh(mpmath.mpf(epsilon_1) / 2)
    assert rho <= privacy_filter.spent
    assert zcdp_epsilon(float(rho), delta) <= epsilon


def test_a_filter_can_be_filled_and_no_further() -> None:
    privacy_filter = RenyiFilter(2.0, 1e-5, 12.0)
    charge = [poisson_sampled(GaussianEvent(30.0), 0.2, 7)]
    count = 0
    while privacy_filter.admits(charge):
        privacy_filter.charge(charge)
        count += 1
    one = divergences_of(charge, [12.0])[0, 0]
    whole = privacy_filter.left + privacy_filter.spent
    assert count == math.floor(whole / (one * (1 + 2e-10)))
    with pytest.raises(BudgetExceededError, match=r"1 events cost .*expected at most .*left of"):
        privacy_filter.charge(charge)
    assert 0 <= privacy_filter.left < one


@given(events=events_of_all_sorts, later=events_of_all_sorts, as_zcdp=st.booleans())
@settings(deadline=None, max_examples=40)
def test_save_and_restore_are_identical(events: list[Event], later: list[Event], as_zcdp: bool) -> None:
    privacy_filter: RenyiFilter | ZcdpFilter
    privacy_filter = ZcdpFilter(30.0, 1e-5) if as_zcdp else RenyiFilter(30.0, 1e-5, 4.0)
    charge_what_fits(privacy_filter, events)
    restored = type(privacy_filter).from_state(json.loads(json.dumps(privacy_filter.to_state())))
    assert restored.to_state() == privacy_filter.to_state()
    assert charge_what_fits(restored, later) == charge_what_fits(privacy_filter, later)
    assert restored.to_state() == privacy_filter.to_state()
    assert (restored.left, restored.spent) == (privacy_filter.left, privacy_filter.spent)


def charge_what_fits(privacy_filter: RenyiFilter | ZcdpFilter, events: Sequence[Event]) -> list[Event]:
    charged = []
    for event in events:
        try:
            fits = privacy_filter.admits([event])
        except UnsupportedEventError:  # a sampled one, for zCDP
            continue
        if fits:
            privacy_filter.charge([event])
            charged.append(event)
    return charged


@pytest.mark.parametrize("privacy_filter", [RenyiFilter(3.0, 1e-5, 8.0), ZcdpFilter(3.0, 1e-5)])
def test_a_refusal_charges_nothing_of_what_was_asked_for(privacy_filter: RenyiFilter | ZcdpFilter) -> None:
    fits = poisson_sampled(GaussianEvent(40.0), 1.0)
    privacy_filter.charge([fits])
    before = privacy_filter.to_state()
    with pytest.raises(BudgetExceededError):
        privacy_filter.charge([fits, SelfComposedEvent(ApproximateEvent(3.0), 50)])
    with pytest.raises(ParameterError, match="delta of an ApproximateEvent"):
        privacy_filter.charge([fits, ApproximateEvent(0.1, 1e-9)])
    assert not privacy_filter.admits([fits, SelfComposedEvent(ApproximateEvent(3.0), 50)])
    privacy_filter.charge([])
    assert privacy_filter.to_state() == before


def test_zcdp_refuses_sampling_as_it_gains_nothing_there() -> None:
    privacy_filter = ZcdpFilter(3.0, 1e-5)
    with pytest.raises(ParameterError, match=r"sampling rate of a GaussianEvent is 0\.1; expected 1"):
        privacy_filter.charge([GaussianEvent(40.0), poisson_sampled(GaussianEvent(40.0), 0.1)])
    assert privacy_filter.spent == 0


def test_nothing_is_free_however_small() -> None:
    for privacy_filter in (RenyiFilter(3.0, 1e-5, 8.0), ZcdpFilter(3.0, 1e-5)):
        for event in (ApproximateEvent(1e-200), poisson_sampled(GaussianEvent(1e12), 1.0)):
            before = privacy_filter.spent
            privacy_filter.charge([event])
            assert privacy_filter.spent > before
    tiny = [poisson_sampled(GaussianEvent(1e12), 1e-300), ApproximateEvent(1e-200)]
    assert (divergences_of(tiny) > 0).all()


def test_order_of_charges_makes_no_difference() -> None:
    events = [poisson_sampled(GaussianEvent(10.0 + i), 0.3, i + 1) for i in range(20)]
    forwards, backwards, together = (RenyiFilter(30.0, 1e-5, 3.7) for _ in range(3))
    for event in events:
        forwards.charge([event])
    for event in reversed(events):
        backwards.charge([event])
    together.charge(events)
    assert forwards.to_state() == backwards.to_state()
    # priced side by side, bounds may differ in their last bits
    assert together.spent == pytest.approx(forwards.spent, rel=1e-11)


def test_the_best_order_fits_the_typical_charge_most_often() -> None:
    for epsilon, events in (
        (2.0, [poisson_sampled(GaussianEvent(20.0), 0.1)]),
        (8.0, [poisson_sampled(GaussianEvent(0.9), 0.01), ApproximateEvent(0.1)]),
        (0.2, [SelfComposedEvent(ApproximateEvent(0.01), 3)]),
    ):
        best = best_order(epsilon, 1e-5, events)
        fits = {}
        for order in ORDERS:
            conversion = np.log1p(-1 / order) - (math.log(1e-5) + math.log(order)) / (order - 1)
            fits[order] = (epsilon - conversion) / divergences_of(events, [order]).sum()
        assert fits[best] == pytest.approx(max(fits.values()), rel=1e-9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RenyiFilter(0.0, 1e-5, 8.0), "epsilon"),
        (lambda: RenyiFilter(math.nan, 1e-5, 8.0), "epsilon"),
        (lambda: RenyiFilter(1001.0, 1e-5, 8.0), "epsilon"),
        (lambda: RenyiFilter(1.0, 0.0, 8.0), "delta"),
        (lambda: RenyiFilter(1.0, 1.0, 8.0), "delta"),
        (lambda: RenyiFilter(1.0, 1e-5, 1.0), "order"),
        (lambda: RenyiFilter(1.0, 1e-5, math.inf), "order"),
        (lambda: ZcdpFilter(-1.0, 1e-5), "epsilon"),
        (lambda: ZcdpFilter(1.0, math.inf), "delta"),
        (lambda: best_order(0.0, 1e-5, [ApproximateEvent(1.0)]), "epsilon"),
        (lambda: best_order(1.0, -1e-5, [ApproximateEvent(1.0)]), "delta"),
        (lambda: best_order(1.0, 1e-5, []), "events are none"),
        (lambda: best_order(1.0, 1e-5, [ApproximateEvent(1.0, 1e-6)]), "delta of an ApproximateEvent"),
        (lambda: divergences_of([ApproximateEvent(1.0)], [1.0]), "order"),
        (lambda: divergences_of([ApproximateEvent(1.0)], [math.nan]), "order"),
    ],
)
def test_bad_values_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        call()


def test_terms_that_leave_no_budget_are_refused_with_the_way_out() -> None:
    with pytest.raises(PlanError, match=r"order 2 leave no budget.*higher order"):
        RenyiFilter(1.0, 1e-5, 2.0)
    with pytest.raises(PlanError, match="leave no budget"):
        ZcdpFilter(1e-12, 1e-300)
    with pytest.raises(PlanError, match="no budget at any order"):
        best_order(1e-3, 1e-5, [ApproximateEvent(1e-3)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version"),
        ({"version": True}, "version"),
        ({"more": 1}, "entries"),
        ({"epsilon": 3.0}, "epsilon"),
        ({"epsilon": "nan"}, "epsilon"),
        ({"delta": "0x1p0"}, "delta"),
        ({"order": "0x1p0"}, "order"),
        ({"spent": 0}, "spent"),
        ({"spent": "-0x1"}, "spent"),
        ({"spent": "0x1p3"}, "spent"),
        ({"spent": "0x" + "f" * 30}, "spent"),
        ({"spent": "f" * 1000}, "spent"),
    ],
)
def test_a_malformed_state_is_refused(change: dict[str, object], message: str) -> None:
    state = RenyiFilter(3.0, 1e-5, 8.0).to_state()
    with pytest.raises(ParameterError, match=message):
        RenyiFilter.from_state(state | change)
    with pytest.raises(ParameterError, match="entries"):
        ZcdpFilter.from_state(state)
    with pytest.raises(ParameterError, match="mapping"):
        RenyiFilter.from_state([])  # type: ignore[arg-type]
